"""A state serves one model: the one that it was given, or the one that it has found."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import crossover_ddp as ddp
from crossover_ddp._ddp.checks import BoundModel
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.training import WIDTH, Training, optimizers_of

# A hook, and a function that makes its state from optimizers and a model.
Given = tuple[Any, Callable[[Any, Any], Any]]
GIVEN: dict[str, Given] = {
    "crossover": (ddp.crossover_hook, lambda _, model: ddp.CrossoverState(model=model)),
    "wrapped": (
        ddp.crossover_wrapper(allreduce_hook),
        lambda _, model: ddp.CrossoverState(model=model),
    ),
    "compressed": (
        ddp.compressed_hook,
        lambda _, model: ddp.CompressedState(ddp.Int8(), model=model),
    ),
    "decoupled": (
        ddp.decoupled_hook,
        lambda optimizers, model: ddp.DecoupledState(optimizers[0], defer="always", model=model),
    ),
    "auto": (
        ddp.auto_hook,
        lambda optimizers, model: ddp.AutoState(optimizers[0], losses="rounded", model=model),
    ),
    "deferred_kfac": (
        ddp.decoupled_hook,
        lambda optimizers, model: ddp.DecoupledKFACState(
            optimizers[0], ddp.KFACState(model, kl_clip=None), model=model
        ),
    ),
    "kfac": (ddp.kfac_hook, lambda _, model: ddp.KFACState(model, kl_clip=None)),
    "owned": (ddp.owner_hook, lambda optimizers, model: ddp.OwnerState(optimizers, model=model)),
    "muon": (ddp.muon_hook, lambda optimizers, model: ddp.MuonState(optimizers[0], model=model)),
    "averaged": (ddp.local_sgd_hook, lambda _, model: ddp.LocalSGDState(2, model=model)),
    "elastic": (ddp.elastic_hook, lambda _, model: ddp.ElasticState(2, "sync", model=model)),
}


def normalized() -> nn.Module:
    """Return a network whose buffers travel as well, for which hooks need the model."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    )


def trained_with(
    name: str, rank: int = 0, *, given: DistributedDataParallel | None = None
) -> Training:
    """Return a training whose state is given ``given``, by default its own model."""
    hook, make = GIVEN[name]

    def way(model: Any, optimizers: Sequence[Optimizer], _: Any) -> tuple[Any, Any]:
        return make(optimizers, given or model), hook

    return Training(
        way, rank, module=normalized(), optimizers=lambda model: optimizers_of(name, model)
    )


def no_search() -> Any:
    return mock.patch.object(gc, "get_referrers", side_effect=AssertionError("searched"))


@pytest.mark.parametrize("name", GIVEN)
@in_ranks(2)
def test_no_model_is_searched_for_if_a_state_was_given_it(rank: int, name: str) -> None:
    with no_search():
        training = trained_with(name, rank).run(4)
        training.state.checkpoint(training.optimizers)
        training.run(1)
        training.close()


@in_ranks(2)
def test_a_state_inside_of_a_users_state_needs_no_search_either(rank: int) -> None:
    class Own:
        def __init__(self, inner: ddp.DecoupledState) -> None:
            self.inner = inner

    def hook(state: Own, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return ddp.decoupled_hook(state.inner, bucket)

    def way(model: Any, optimizers: Any, _: Any) -> tuple[Any, Any]:
        return Own(ddp.DecoupledState(optimizers[0], defer="always", model=model)), hook

    with no_search():
        training = Training(way, rank, module=normalized()).run(4)
        training.state.inner.close()


@pytest.mark.usefixtures("process_group", "set_aside_again")
def test_gc_freeze_does_not_hide_a_model_that_was_given() -> None:
    training = trained_with("decoupled")
    gc.freeze()
    try:
        training.run(2)
    finally:
        gc.unfreeze()
    training.close()


@pytest.mark.usefixtures("process_group")
def test_without_the_model_it_is_searched_for() -> None:
    with no_search(), pytest.raises(AssertionError, match="searched"):
        Training("crossover").backward()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", GIVEN)
def test_a_bucket_of_another_model_than_the_given_one_is_refused(name: str) -> None:
    other = DistributedDataParallel(normalized())
    training = trained_with(name, given=other)
    kind = type(training.state).__name__
    for _ in range(2):
        with pytest.raises(
            UnsupportedConfigurationError,
            match=f"expected one model for each {kind}, got a bucket of another model; make a {kind}",
        ):
            training.backward()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", [name for name in GIVEN if name != "kfac"])
def test_a_model_without_ddp_is_refused(name: str) -> None:
    network = normalized()
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got model=Sequential"):
        GIVEN[name][1](optimizers_of(name, network), network)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_given", [True, False])
def test_a_state_keeps_no_model_alive_and_serves_another_one_afterwards(is_given: bool) -> None:
    network = normalized()
    bound: Any = None

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bound.bind(bucket, state)
        return allreduce_hook(None, bucket)

    for _ in range(2):
        model = DistributedDataParallel(network)
        bound = bound or BoundModel(model if is_given else None)
        model.register_comm_hook(None, hook)
        model(torch.ones(4, WIDTH)).sum().backward()
        assert bound.model() is model
        kept = weakref.ref(model)
        del model
        gc.collect()
        assert kept() is None
        assert bound.model() is None
