"""Averaging hooks with one rank: refused models and arguments, loops, and plans for a link.

The steps after which fragments are exchanged: tests/multiprocess/test_averaging.py.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

from crossover_ddp import (
    CrossoverState,
    KFACState,
    UnsupportedConfigurationError,
    crossover_wrapper,
)
from crossover_ddp._averaging.local_sgd import Schedule
from crossover_ddp._tuning.model import AveragingPlan, LinkModel, plan_averaging
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.codecs import Int4, PowerSGD
from crossover_ddp.errors import CrossoverError
from tests.harness.training import hooked
from tests.multiprocess.averaged_training import averaged

pytestmark = pytest.mark.usefixtures("process_group")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def model_of(
    state: Any, network: nn.Module | None = None, *, hook: Any = None, **options: Any
) -> Any:
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


def grown(state: Any) -> Any:
    network = nn.Linear(4, 2)
    network.register_buffer("seen", torch.zeros(3))
    model = model_of(state, network)
    for _ in range(2):
        backward(model)
    network.seen = torch.zeros(5)
    return model


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: model_of(LocalSGDState(4), find_unused_parameters=True),
        "find_unused_parameters=False, got True",
    ),
    (
        lambda: model_of(
            CrossoverState(hook_state=LocalSGDState(4)), hook=crossover_wrapper(local_sgd_hook)
        ),
        "got it inside of crossover_wrapper",
    ),
    (  # a wrapper would have no gradients to compress
        lambda: model_of(LocalSGDState(4), hook=fp16_compress_wrapper(local_sgd_hook)),
        "got it inside of fp16_compress_wrapper",
    ),
    (lambda: model_of(LocalSGDState(2), with_gaps()), "without gaps, got weight of shape"),
    (lambda: grown(LocalSGDState(2)), "expected seen of 3 elements, as before, got 5"),
    (lambda: grown(ElasticState(2, "sync")), "expected seen of 3 elements, as before, got 5"),
    (watched_by_kfac, "without K-FAC, got a KFACState that watches"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_model_or_hook_that_cannot_work_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(CrossoverError, match=message):
        backward(make())


def test_synchronised_statistics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP itself refuses them on a CPU, so they replace others after its check."""
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward)
    model = model_of(LocalSGDState(4))
    parameters = model.module[1]._parameters
    model.module[1] = nn.SyncBatchNorm(3)
    model.module[1]._parameters = parameters
    with pytest.raises(
        UnsupportedConfigurationError, match="got SyncBatchNorm 1, which waits for all ranks"
    ):
        backward(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGDState(0), "sync_every >= 1, got sync_every=0"),
        (lambda: LocalSGDState(True), "got sync_every=True"),
        (lambda: LocalSGDState(4, -1), "delay >= 0, got delay=-1"),
        (
            lambda: LocalSGDState(4, 5),
            "sync_every >= delay, got sync_every=4 and delay=5.*pass sync_every=5",
        ),
        (
            lambda: LocalSGDState(2, 3, codec=Int4()),
            "sync_every >= delay, got sync_every=2 and delay=3.*pass sync_every=3",
        ),
        (
            lambda: LocalSGDState(1, codec=Int4()),
            "expected delay=1 with sync_every=1 and a codec, got delay=0",
        ),
        (lambda: LocalSGDState(1, 0, 2), "fragments=1 with sync_every=1, got fragments=2"),
        (
            lambda: LocalSGDState(4, 1, mutex=object()),  # type: ignore[arg-type]
            "expected delay=0 with a mutex, got delay=1",
        ),
        (lambda: LocalSGDState(2, outer_lr=0.7), "expected an outer optimizer with outer_lr"),
        (lambda: LocalSGDState(1, outer_optimizer=_sgd), "sync_every >= 2 with an outer optimizer"),
        (
            lambda: ElasticState(2, "late"),  # type: ignore[arg-type]
            "mode='sync', 'async' or 'wild', got mode='late'",
        ),
        (
            lambda: ElasticState(2, mutex=object()),  # type: ignore[arg-type]
            "mode='sync' with a mutex, got mode='async'",
        ),
        (
            lambda: ElasticState(2, "wild", 1.0),
            r"moving_rate < 2 / \(ranks \+ 1\) = 1, got moving_rate=1.0",
        ),
        (lambda: ElasticState(2, moving_rate=0.0), "got moving_rate=0.0"),
        (
            lambda: LocalSGDState(
                4,
                outer_optimizer=_sgd([nn.Parameter(torch.zeros(1))]),  # type: ignore[arg-type]
            ),
            "a function of",
        ),
        (
            lambda: LocalSGDState(4, outer_optimizer=list),  # type: ignore[arg-type]
            "outer_optimizer=<class 'list'>",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Any, message: str) -> None:
    wrong = TypeError if message.startswith(("a function", "outer")) else ValueError
    with pytest.raises(wrong, match=message):
        make()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_an_outer_optimizer_may_decay() -> None:
    """For weights without a gradient the outer step is only its decay."""
    outer = functools.partial(torch.optim.SGD, lr=1.0, weight_decay=0.25)
    model = model_of(LocalSGDState(2, outer_optimizer=outer))
    with torch.no_grad():
        before = model.module[0].weight.clone()
    for _ in range(3):
        backward(model)
    torch.testing.assert_close(model.module[0].weight.detach(), 0.75 * before)


def test_objects_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"PowerSGD\(\) suits CompressedState"):
        LocalSGDState(2, codec=PowerSGD())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an optimizer or several, got optimizer='adam'"):
        LocalSGDState(2, optimizer="adam")  # type: ignore[arg-type]


def test_a_state_is_loaded_before_it_trains_and_only_with_its_own_settings() -> None:
    state = LocalSGDState(2, 1, outer_optimizer=_sgd)
    model = model_of(state)
    before = [each.clone() for each in model.parameters()]
    state.average()  # replicas are equal
    with state.averaged():
        pass
    assert all(map(torch.equal, model.parameters(), before))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"steps": 3}, r"got keys \['steps'\]"),
        ({"steps": 3, "kept": None, "hook": {}}, r"got keys \['hook', 'kept', 'steps'\]"),
        ({"steps": "3", "kept": None}, "expected a number of steps, got steps='3'"),
        ({"steps": 3, "kept": {}}, "expected a state saved with an outer optimizer"),
    ]
    for given_, message in wrong:
        with pytest.raises(ValueError, match=message):
            state.load_state_dict(given_)
    backward(model)
    saved = state.state_dict()
    with pytest.raises(ValueError, match="expected the state of a LocalSGDState, got keys"):
        LocalSGDState(2, 1).load_state_dict({**saved, "kept": {"centre": {}}})
    with pytest.raises(
        ValueError, match="expected fragments=1 as when the state was saved, got fragments=2"
    ):
        LocalSGDState(4, 0, 2, outer_optimizer=_sgd).load_state_dict(saved)
    fresh = LocalSGDState(2, 1, outer_optimizer=_sgd)
    other = model_of(fresh, nn.Linear(4, 2))
    fresh.load_state_dict(saved)
    with pytest.raises(ValueError, match="expected values of shape"):
        backward(other)


def test_forwards_without_gradients_run_no_exchange() -> None:
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


@pytest.mark.parametrize("end", ["close", "group"])
def test_a_closed_state_is_the_split_hook_and_rounds_end_with_the_process_group(
    end: str,
) -> None:
    state = ElasticState(1, "async")
    model = model_of(state)
    for _ in range(3):
        backward(model)
    if end == "close":
        state.close()
        state.close()
        backward(model)
        assert state.stats()["steps"] == 3
        return
    dist.destroy_process_group()
    with pytest.raises(CrossoverError):
        for _ in range(3):
            state.average()


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: LocalSGDState(2), 1),
        (lambda: LocalSGDState(2, warmup_steps=1), 2),
        (lambda: ElasticState(2, "sync"), 1),
        (lambda: LocalSGDState(1), 5),  # averages gradients
    ],
    ids=["local", "warm", "elastic", "every step"],
)
def test_a_forward_past_the_models_call_is_refused(make: Callable[[], Any], steps: int) -> None:
    """In such a loop parameters would never be averaged."""
    state = make()
    model, inputs = model_of(state), torch.randn(5, 4)
    for _ in range(steps):
        model.forward(inputs).sum().backward()
    for _ in range(2 if steps < 5 else 0):
        with pytest.raises(
            UnsupportedConfigurationError, match=r"write model\(inputs\), not model\.forward"
        ):
            model.forward(inputs).sum().backward()
    model(inputs).sum().backward()
    assert state.stats()["steps"] == steps + 1


def backward_twice(model: Any, inputs: torch.Tensor) -> None:
    loss = model(inputs).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)


def forward_ahead(model: Any, inputs: torch.Tensor) -> None:
    """Run each forward before the last backward, and evaluate in between."""
    first = model(inputs).sum()
    for _ in range(2):
        second = model(inputs).sum()
        with torch.no_grad():
            model(inputs)
            model.forward(inputs)
        first.backward()
        first = second


LOOPS: list[Callable[[Any, torch.Tensor], object]] = [
    lambda model, inputs: [loss.backward() for loss in [model(inputs).sum() for _ in range(2)]],
    lambda model, inputs: [model(inputs).sum().backward() for _ in range(2)],
    lambda model, inputs: (model(inputs).sum() + model(inputs).sum()).backward(),
    backward_twice,
    forward_ahead,
]


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_other_orders_of_forward_and_backward_train(
    loop: Callable[[Any, torch.Tensor], object], static_graph: bool
) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))  # without buffers
    state = LocalSGDState(50)
    model = model_of(state, network, static_graph=static_graph)
    for _ in range(4):
        loop(model, torch.randn(5, 4))
    assert state.stats()["steps"] >= 4
    state.average()


@given(
    st.floats(1e-3, 10),
    st.floats(1e3, 1e9),
    st.floats(0, 1e-2),
    st.floats(1e-11, 1e-7),
    st.sampled_from([None, 0.133, 0.5]),
)
def test_a_plan_hides_the_exchange(
    compute_s: float, size_bytes: float, alpha_s: float, beta_s: float, rate: float | None
) -> None:
    link = LinkModel(alpha_s, beta_s)
    if 2 * link.half_s(size_bytes) > 1000 * compute_s:
        return
    plan = plan_averaging(compute_s, size_bytes, link, rate=rate)
    one_s = 2 * link.half_s((rate or 1.0) * size_bytes / plan.fragments)
    assert plan.fragments * one_s <= plan.sync_every * compute_s, "the link cannot keep up"
    assert one_s <= plan.delay * compute_s, "a step would wait"
    Schedule(**plan.arguments())


def test_a_plan_takes_the_shortest_interval_if_there_is_one() -> None:
    plan = plan_averaging(1.0, 3e6, LinkModel(0.0, 0.5e-6))
    assert plan == AveragingPlan(4, 1, 4, 1.0, 1.0, 3.0, 1.0)
    assert not plan.pays
    # In four bits an exchange fits into each step up to an M/C of seven, and into two of fourteen.
    for ratio, wanted in ((5.0, (1, 1, 1)), (6.5, (1, 1, 1)), (13.0, (2, 1, 2))):
        coded = plan_averaging(1.0, ratio * 1e6, LinkModel(0.0, 0.5e-6), rate=0.133)
        assert (coded.sync_every, coded.delay, coded.fragments) == wanted
        assert coded.pays == (ratio > 6)
    assert plan_averaging(1.0, 0.5e6, LinkModel(0.0, 0.5e-6)).sync_every == 2
    # A start-up time as long as a step: one fragment.
    assert plan_averaging(1.0, 1e6, LinkModel(1.0, 0.5e-6)).fragments == 1
    with pytest.raises(ValueError, match="within 4096 steps"):
        plan_averaging(1e-3, 1e9, LinkModel(0.0, 1e-6))


@pytest.mark.defect("codecs-S1")
@pytest.mark.parametrize("mode", ["local", "sync", "async"])
def test_a_mask_of_infinities_is_not_averaged(mode: Any) -> None:
    state = LocalSGDState(2) if mode == "local" else ElasticState(1, mode)
    network = nn.Linear(4, 4)
    network.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    averaged(state, network).run(6).close()
    stats = state.stats()
    assert stats.get("not_finite", 0) == 0
    assert stats.get("exchanges", 0) + stats.get("offers", 0) + stats.get("pulls", 0) > 0


@pytest.mark.defect("strangers-12")
def test_a_count_of_steps_is_exact_in_rounds() -> None:
    """Beyond 2**24 as well, where float32 has no odd numbers."""
    state = ElasticState(1, "async")
    state.load_state_dict({"steps": 2**24, "kept": None})
    training = averaged(state)
    for _ in range(6000):
        training.run(1)
        if state.rounds():
            break
        time.sleep(0.01)
    state.close()
    (steps,) = state.rounds()[0].offered
    assert steps is not None and steps > 2**24


def test_rounds_continue_after_a_hold_and_no_offer_is_lost_or_collected_twice() -> None:
    """A saved state holds the rounds. An offer is withdrawn then; a pull that has arrived stays."""
    state = ElasticState(1, "async")
    training = averaged(state, lr=0.0).run(1)
    for step in range(300):
        training.run(1)
        if step % 3 == 0:
            state.state_dict()
        time.sleep(1e-3)
    state.average()
    rounds = state.rounds()
    state.close()
    assert len(rounds) > 3
    assert all(each.collected is not None for each in rounds)
    offered = [each.offered[0] for each in rounds]
    assert offered == sorted({*offered})
    assert state.stats()["pulls"] == len(rounds) <= state.stats()["offers"]
