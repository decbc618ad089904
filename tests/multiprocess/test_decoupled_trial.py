"""Whether deferring is worth it is tried and agreed on; results are those of plain DDP all the while, in any case."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp import DecoupledState, GPUMutex
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import new_group
from tests.harness.oracles import heard
from tests.harness.training import Training, decoupled
from tests.multiprocess.averaging_oracle import loss_of, network

WARM_UP, BLOCK, END = inside.TRIAL
STEPS = END + 10
SETTLED = 2  # backward passes before DDP's buckets are known to stay
TIMEOUT_S = 90.0


class Outcome(NamedTuple):
    losses: list[float]
    parameters: bytes
    deferred: list[bool]
    deferring: bool | None
    turns: int


def training_of(way: Any, rank: int, **options: Any) -> Training:
    module = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Training(way, rank, module=module, loss=loss_of, **{"bucket_cap_mb": 0.001, **options})


def train(rank: int, world_size: int, way: str, verdict: bool | None = None, group: str = "") -> Outcome:
    """Train as ``way`` says; ``verdict``: what the trial's clock shall show."""
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    by = "split" if way == "split" else decoupled(defer="auto")
    training = training_of(by, rank, mutex=mutex, gradient_as_bucket_view=not way.endswith("no views"))
    model, state = training.model, training.state
    if verdict is not None:
        inside.pretend_times(state, deferred_s=1.0 if verdict else 3.0, whole_s=2.0)
    losses, deferred = [], []
    for step in range(STEPS):
        if step % 3 == 2:
            with model.no_sync():
                training.backward(1000 + step)
        training.backward(step)
        if rank == 0 and step % 7 == 5 and state is not None:
            state.flush()  # on one rank only: that it does not defer then must not confuse the others
        training.optimizer.step()
        deferred.append(training.is_pending)
        # Every other time gradients stay allocated, and are added to in place.
        training.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 10 == 9:
            model.eval()
            losses.append(float(model(torch.ones(2, 1, 6, 6)).sum()))
            model.train()
    deferring = state.deferring if state is not None else None
    training.close()
    dist.barrier()
    turns = mutex.stats()["turns"] if mutex is not None else 0
    if mutex is not None:
        mutex.close()
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Outcome(losses, values.numpy().tobytes(), deferred, deferring, turns)


@functools.cache
def reference(world_size: int) -> list[tuple[list[float], bytes]]:
    """Return the losses and parameters of all ranks that all are held against."""
    return [each[:2] for each in run_ranks(train, world_size, args=("split",), timeout_s=TIMEOUT_S)]


# With three ranks, unless in the campaign, each way and each verdict once.
CELLS = [
    (way, verdict, world_size)
    for world_size in (2, 3)
    for way in ("decoupled", "decoupled, no views")
    for verdict in (True, False, None)
    if IN_CAMPAIGN or world_size == 2 or (verdict is False) == way.endswith("no views")
]


@pytest.mark.torch_version
@pytest.mark.parametrize(("way", "verdict", "world_size"), CELLS)
def test_training_is_that_of_the_split_hook_whatever_is_chosen(
    way: str, verdict: bool | None, world_size: int
) -> None:
    found = run_ranks(train, world_size, args=(way, verdict), timeout_s=TIMEOUT_S)
    assert [each[:2] for each in found] == reference(world_size)
    assert len({each.deferring for each in found}) == 1
    if verdict is not None:
        assert found[0].deferring is verdict
        assert all(each is verdict for each in found[1].deferred[SETTLED + END :])
    trial = found[1].deferred[SETTLED + WARM_UP + BLOCK : SETTLED + WARM_UP + 2 * BLOCK]
    assert not any(trial), "the second block is not deferred"


@pytest.mark.parametrize("verdict", [True, False])
def test_a_job_that_takes_turns_takes_one_for_each_backward_either_way(verdict: bool) -> None:
    found = run_ranks(train, 2, args=("decoupled", verdict, new_group()), timeout_s=TIMEOUT_S)
    assert [each[:2] for each in found] == reference(2)
    forwards = STEPS + STEPS // 3
    assert all(STEPS <= each.turns <= forwards + 4 for each in found), [each.turns for each in found]


def test_options_for_ddp_follow_the_models_size() -> None:
    small, large = nn.Linear(8, 8), nn.Linear(2**12, 2**12)
    assert DecoupledState.ddp_options(small) == {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.25}
    assert DecoupledState.ddp_options(large)["bucket_cap_mb"] == pytest.approx(4.0, rel=1e-3)
    large.weight.requires_grad_(False)
    assert DecoupledState.ddp_options(large)["bucket_cap_mb"] == 0.25
    huge = nn.Linear(2**16, 2**14, device="meta")
    assert DecoupledState.ddp_options(huge)["bucket_cap_mb"] == 25.0


def test_an_unknown_way_to_defer_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="expected defer='auto' or 'always', got defer='never'"):
        DecoupledState(optimizer, defer="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks()
def test_a_plain_loop_is_never_warned(rank: int) -> None:
    with heard() as said:
        training = training_of(decoupled(defer="auto"), rank)
        inside.pretend_times(training.state, deferred_s=1.0, whole_s=2.0)
        training.run(STEPS)
    assert training.state.deferring is not None, "the trial is to be over"
    assert said == []
