"""The DDP model behind a bucket is found, once, without touching unfinished objects."""

import copy
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, reduce_scatter_all_gather_hook
from crossover_ddp._ddp import checks as ddp_checks
from crossover_ddp._ddp.checks import model_of
from tests.harness.oracles import heard
from tests.harness.training import hooked

SPLIT = reduce_scatter_all_gather_hook
pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


class Watched(DistributedDataParallel):
    """A subclass of DDP, as users write them."""


class Lazy:
    """An object that refers to DDP's class, and fails if its own class is asked for."""

    def __init__(self) -> None:
        self.refers_to = DistributedDataParallel

    @property
    def __class__(self) -> Any:
        raise AssertionError("the search has asked a lazy object for its class")


def network(layers: int = 3) -> nn.Module:
    return nn.Sequential(*[nn.Linear(30, 30) for _ in range(layers)])


def step(model: Any) -> None:
    model(torch.ones(2, 30)).sum().backward()


def found_by(model: DistributedDataParallel) -> list[Any]:
    """Train a step and return what `model_of` found for each bucket."""
    found = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found.append(model_of(bucket))
        return SPLIT(None, bucket)

    model.register_comm_hook(None, hook)
    step(model)
    return found


@pytest.mark.parametrize("kind", [DistributedDataParallel, Watched])
def test_a_model_is_found_among_others(kind: type[DistributedDataParallel]) -> None:
    others = [DistributedDataParallel(network()), Watched(network()), Lazy()]
    with pytest.raises(RuntimeError, match="requires a gradient") as half_made:
        DistributedDataParallel(network().requires_grad_(False))
    model = kind(network())
    others.append(copy.deepcopy(model))
    assert found_by(model) == [model]
    assert others and half_made.traceback


def test_a_scripted_model_is_found() -> None:
    """Compiled ones: tests/unit/decoupled/test_decoupled_compile.py."""
    model = DistributedDataParallel(torch.jit.script(network()))
    assert found_by(model) == [model]


def test_models_that_wrap_one_module_are_told_apart_by_their_states() -> None:
    """As when training begins again while the old model is kept, or not collected yet."""
    module, seen = network(), []

    def hook(state: CrossoverState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([model_of(bucket, state=each) for each in (state, state.hook_state)])
        return SPLIT(None, bucket)

    models = [DistributedDataParallel(module) for _ in range(3)]
    for model in models:
        model.register_comm_hook(CrossoverState(hook_state=object()), hook)
        step(model)
    assert seen == [[model, model] for model in models]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_all_objects_are_searched_once_for_each_model(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search keeps no model alive."""
    known, everywhere = ddp_checks._SEARCHES
    searched = mock.Mock(side_effect=everywhere)
    monkeypatch.setattr(ddp_checks, "_SEARCHES", (known, searched))
    for expected in (1, 2):
        model = hooked(network(10 + expected), SPLIT, bucket_cap_mb=0.005, **options)
        for _ in range(4):
            step(model)
        assert searched.call_count == expected
        kept = weakref.ref(model)
        del model
        gc.collect()
        assert kept() is None


def test_no_tuple_in_the_making_is_touched() -> None:
    """CPython cannot finish ``tuple(generator)`` while something else refers to the tuple."""
    model = DistributedDataParallel(network(40))
    parameters = list(model.parameters())
    classes = [DistributedDataParallel, Watched] * 500
    over = threading.Event()

    def make(things: list[Any]) -> int:
        made = 0
        while not over.is_set():
            tuple(each for each in things)  # raises SystemError if the search has touched it
            made += 1
        return made

    def let_others_run(phase: str, information: Any) -> None:
        time.sleep(0)

    sources: list[list[Any]] = [parameters * 10, [model] * 1000, classes]
    threads = ThreadPoolExecutor(len(sources))
    counts = [threads.submit(make, each) for each in sources]
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    # As a finalizer may, in a collection that the search itself sets off.
    gc.callbacks.append(let_others_run)
    gc.set_threshold(1)
    try:
        for _ in range(60):
            assert model in ddp_checks._all_models()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_others_run)
        over.set()
        threads.shutdown()
    assert all(each.result() > 10 for each in counts)


def test_a_model_of_a_destroyed_group_is_not_taken_for_its_successor() -> None:
    module = network()
    old_group = dist.new_group([0])
    old = DistributedDataParallel(module, process_group=old_group)
    assert found_by(old) == [old]
    dist.destroy_process_group(old_group)
    step(hooked(module, SPLIT))


@pytest.mark.usefixtures("set_aside_again")
def test_a_hidden_model_is_warned_about_once_and_trains() -> None:
    ddp_checks._warn_hidden.cache_clear()
    model = hooked(network(12), SPLIT, bucket_cap_mb=0.005)
    gc.freeze()
    try:
        with heard() as messages:
            for _ in range(3):
                step(model)
    finally:
        gc.unfreeze()
    assert ["gc.freeze()" in text for text in messages] == [True]
