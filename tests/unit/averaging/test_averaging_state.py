"""Averaging hooks with one rank: what is refused, and what a loop sees."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

from crossover_ddp import CrossoverState, KFACState, UnsupportedConfigurationError, crossover_wrapper
from crossover_ddp._ddp.checks import wants_buffers_broadcast
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.errors import CrossoverError
from tests.harness.training import hooked
from tests.harness.waiting import eventually

pytestmark = pytest.mark.usefixtures("process_group")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def model_of(state: Any, network: nn.Module | None = None, *, hook: Any = None, **options: Any) -> Any:
    own_hook = elastic_hook if isinstance(state, ElasticState) else local_sgd_hook
    return hooked(network or small(), hook or own_hook, state, **options)


def backward(model: nn.Module) -> None:
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()


def with_gaps() -> nn.Module:
    network = nn.Linear(4, 2, bias=False)
    network.weight = nn.Parameter(torch.randn(2, 8)[:, ::2])
    return network


def watched_by_kfac() -> Any:
    network = nn.Sequential(nn.Linear(4, 2))
    model = model_of(LocalSGDState(4), network)
    vars(model)["kfac"] = KFACState(network, kl_clip=None)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unused": (
        lambda: model_of(LocalSGDState(4), find_unused_parameters=True),
        "expected find_unused_parameters=False, got True",
    ),
    "under the wrapper": (
        lambda: model_of(CrossoverState(hook_state=LocalSGDState(4)), hook=crossover_wrapper(local_sgd_hook)),
        "got it inside of crossover_wrapper",
    ),
    "compressed gradients": (  # it has none to compress
        lambda: model_of(LocalSGDState(4), hook=fp16_compress_wrapper(local_sgd_hook)),
        "got it inside of fp16_compress_wrapper",
    ),
    "gaps": (lambda: model_of(LocalSGDState(2), with_gaps()), "without gaps, got weight of shape"),
    "watched": (watched_by_kfac, "without K-FAC, got a KFACState that watches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_or_hook_that_cannot_work_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(CrossoverError, match=message):
        backward(make())


def test_synchronised_statistics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP itself refuses them on a CPU, so they come behind its back."""
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)
    model = model_of(LocalSGDState(4))
    parameters = model.module[1]._parameters
    model.module[1] = nn.SyncBatchNorm(3)
    model.module[1]._parameters = parameters
    with pytest.raises(UnsupportedConfigurationError, match="got SyncBatchNorm 1, which waits for all ranks"):
        backward(model)


def test_buffers_are_broadcast_by_nobody_until_the_state_is_closed() -> None:
    state = LocalSGDState(2)
    model = model_of(state)
    assert wants_buffers_broadcast(model)
    backward(model)
    assert not wants_buffers_broadcast(model)
    state.close()
    assert wants_buffers_broadcast(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGDState(0), "sync_every >= 1, got sync_every=0"),
        (lambda: LocalSGDState(2.0), "sync_every >= 1, got sync_every=2.0"),  # type: ignore[arg-type]
        (lambda: LocalSGDState(True), "got sync_every=True"),
        (lambda: LocalSGDState(4, -1), "delay >= 0, got delay=-1"),
        (lambda: LocalSGDState(4, 4), r"sync_every >= delay \+ 1, got sync_every=4 and delay=4.*pass sync_every=5"),
        (lambda: LocalSGDState(4, 0, 0), "fragments >= 1, got fragments=0"),
        (lambda: LocalSGDState(1, 0, 2), "fragments=1 with sync_every=1, got fragments=2"),
        (lambda: LocalSGDState(4, warmup_steps=-1), "warmup_steps >= 0, got warmup_steps=-1"),
        (lambda: LocalSGDState(4, 1, mutex=object()), "expected delay=0 with a mutex, got delay=1"),  # type: ignore[arg-type]
        (lambda: LocalSGDState(1, outer_optimizer=_sgd), "sync_every >= 2 with an outer optimizer"),
        (lambda: ElasticState(0), "sync_every >= 1, got sync_every=0"),
        (lambda: ElasticState(2, "late"), "mode='sync', 'async' or 'wild', got mode='late'"),  # type: ignore[arg-type]
        (lambda: ElasticState(2, mutex=object()), "mode='sync' with a mutex, got mode='async'"),  # type: ignore[arg-type]
        (lambda: ElasticState(2, "wild", 1.0), r"moving_rate < 2 / \(ranks \+ 1\) = 1, got moving_rate=1.0"),
        (lambda: ElasticState(2, moving_rate=0.0), "got moving_rate=0.0"),
        (lambda: LocalSGDState(4, outer_optimizer=_sgd([nn.Parameter(torch.zeros(1))])), "a function of"),  # type: ignore[arg-type]
        (lambda: LocalSGDState(4, outer_optimizer=3), "outer_optimizer=3"),  # type: ignore[arg-type]
        (lambda: LocalSGDState(4, outer_optimizer=list), "outer_optimizer=<class 'list'>"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused(make: Any, message: str) -> None:
    wrong = TypeError if message.startswith(("a function", "outer")) else ValueError
    with pytest.raises(wrong, match=message):
        make()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_an_outer_optimizer_may_decay() -> None:
    """Of weights that have no gradient, all of the outer step is its decay."""
    outer = functools.partial(torch.optim.SGD, lr=1.0, weight_decay=0.25)
    model = model_of(LocalSGDState(2, outer_optimizer=outer))
    with torch.no_grad():
        before = model.module[0].weight.clone()
    for _ in range(3):
        backward(model)
    torch.testing.assert_close(model.module[0].weight.detach(), 0.75 * before)


def test_a_state_is_loaded_before_it_trains() -> None:
    state = LocalSGDState(2, 1, outer_optimizer=_sgd)
    model = model_of(state)
    with pytest.raises(UnsupportedConfigurationError, match="whose hook was never called"):
        state.average()
    with pytest.raises(ValueError, match=r"got keys \['steps'\]"):
        state.load_state_dict({"steps": 3})
    with pytest.raises(ValueError, match=r"got keys \['hook', 'kept', 'steps'\]"):
        state.load_state_dict({"steps": 3, "kept": None, "hook": {}})
    with pytest.raises(ValueError, match="expected a number of steps, got steps='3'"):
        state.load_state_dict({"steps": "3", "kept": None})
    with pytest.raises(ValueError, match="expected a state saved with an outer optimizer"):
        state.load_state_dict({"steps": 3, "kept": {}})
    backward(model)
    saved = state.state_dict()
    with pytest.raises(ValueError, match="expected the state of a LocalSGDState, got keys"):
        LocalSGDState(2, 1).load_state_dict({**saved, "kept": {"centre": {}}})
    with pytest.raises(ValueError, match="expected fragments=1 as when the state was saved, got fragments=2"):
        LocalSGDState(4, 0, 2, outer_optimizer=_sgd).load_state_dict(saved)
    fresh = LocalSGDState(2, 1, outer_optimizer=_sgd)
    other = model_of(fresh, nn.Linear(4, 2))
    fresh.load_state_dict(saved)
    with pytest.raises(ValueError, match="expected values of shape"):
        backward(other)


def test_forwards_without_gradients_do_not_act() -> None:
    state = LocalSGDState(2)
    model = model_of(state)
    for _ in range(2):
        backward(model)
    with torch.no_grad():
        model(torch.randn(3, 4))
    assert state.stats()["exchanges"] == 0
    for _ in range(2):
        model(torch.randn(3, 4))
        assert state.stats()["exchanges"] == 1


def test_a_closed_state_goes_on_as_the_split_hook() -> None:
    state = ElasticState(1, "async")
    model = model_of(state)
    for _ in range(3):
        backward(model)
    state.close()
    state.close()
    backward(model)
    assert state.stats()["steps"] == 3


def test_rounds_end_with_the_process_group() -> None:
    state = ElasticState(1, "async")
    model = model_of(state)
    for _ in range(3):
        backward(model)
    dist.destroy_process_group()
    with pytest.raises(CrossoverError):
        for _ in range(3):
            state.average()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_centre_is_wide_and_pulls_half_precision(dtype: torch.dtype) -> None:
    network = nn.Linear(4, 2).to(dtype)
    state = ElasticState(1, moving_rate=0.5)
    model = model_of(state, network)
    model(torch.randn(5, 4, dtype=dtype)).sum().backward()
    start = network.weight.detach().clone()
    with torch.no_grad():
        network.weight.add_(1.0)

    def is_pulled() -> bool:
        model(torch.randn(5, 4, dtype=dtype)).sum().backward()
        return bool(state.stats()["pulls"])

    assert eventually(is_pulled)
    torch.testing.assert_close(network.weight.detach(), start + 0.5, atol=1e-2, rtol=0)
    centre = state.state_dict()["kept"]["centre"]["weight"]
    assert centre.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: LocalSGDState(2), 1),
        (lambda: LocalSGDState(2, warmup_steps=1), 2),
        (lambda: ElasticState(2, "sync"), 1),
    ],
    ids=["local", "warm", "elastic"],
)
def test_a_forward_past_the_models_call_is_refused(make: Callable[[], Any], steps: int) -> None:
    """Parameters would never be averaged."""
    state = make()
    model, inputs = model_of(state), torch.randn(5, 4)
    for _ in range(steps):
        model.forward(inputs).sum().backward()
    for _ in range(2):
        with pytest.raises(UnsupportedConfigurationError, match=r"write model\(inputs\), not model\.forward"):
            model.forward(inputs).sum().backward()
    model(inputs).sum().backward()
    assert state.stats()["steps"] == steps + 1


def retained(model: Any, inputs: torch.Tensor) -> None:
    loss = model(inputs).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)


def ahead(model: Any, inputs: torch.Tensor) -> None:
    first = model(inputs).sum()
    for _ in range(2):
        second = model(inputs).sum()
        first.backward()
        first = second


def evaluated(model: Any, inputs: torch.Tensor) -> None:
    loss = model(inputs).sum()
    with torch.no_grad():
        model(inputs)
        model.forward(inputs)
    loss.backward()


LOOPS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "two and two": lambda model, inputs: [
        loss.backward() for loss in [model(inputs).sum() for _ in range(2)]
    ],
    "accumulated": lambda model, inputs: [model(inputs).sum().backward() for _ in range(2)],
    "one loss of two forwards": lambda model, inputs: (model(inputs).sum() + model(inputs).sum()).backward(),
    "retained": retained,
    "ahead": ahead,
    "evaluated": evaluated,
}


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_other_loops_go_on(loop: str, static_graph: bool) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))  # whose buffers no forward changes
    state = LocalSGDState(50)
    model = model_of(state, network, static_graph=static_graph)
    for _ in range(4):
        LOOPS[loop](model, torch.randn(5, 4))
    assert state.stats()["steps"] >= 4
    state.average()


def test_a_state_that_averages_no_parameters_needs_no_call() -> None:
    model, inputs = model_of(LocalSGDState(1)), torch.randn(5, 4)
    for _ in range(3):
        model.forward(inputs).sum().backward()
