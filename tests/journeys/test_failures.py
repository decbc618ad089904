"""What fails, and what is refused: who hears of it, when, in which words, and what works afterwards."""

import contextlib
import functools
import re
import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from crossover_ddp import DecoupledState, ExchangeError, UnsupportedConfigurationError, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.groups import impatient_group
from tests.harness.networks import blow, mlp
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, WIDTH, Training, Way, optimizers_of
from tests.harness.turn import RecordingTurn
from tests.journeys.test_turn_and_futures import WORK

NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"
PATIENCE_S, LIMIT_S = 10.0, 60.0  # the latter of a busy machine


@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks()
def test_an_owner_that_fails_names_rank_bucket_and_cause_for_all_later_buckets(
    rank: int, world_size: int
) -> None:
    """Rank 0's own work fails."""
    turn = RecordingTurn()
    training = Training("muon", rank, mutex=turn).run(2)
    turn.order.clear()
    failing = mock.patch(NEWTON_SCHULZ, side_effect=ZeroDivisionError("no direction"))
    with contextlib.nullcontext() if rank else failing:
        first = error_of(training.run)
        training.drop()
        assert error_of(training.run) == first
        training.drop()
    dist.destroy_process_group()
    assert re.match(rf"rank {rank} of {world_size}: the .+ of bucket \d+ failed: .*restart", first)
    assert rank or "failed: no direction; " in first
    assert rank or {*turn.order} == {"release"}


@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks()
def test_nobody_waits_for_a_gather_that_was_never_issued(rank: int, world_size: int) -> None:
    """Gathers are issued with a step's last bucket, which an exception in backward keeps away."""
    with inside.force_native():
        training = Training("decoupled", rank).run(6)
        before = training.model.module[2].register_forward_pre_hook(lambda _, inputs: blow(*inputs))
        with pytest.raises(ArithmeticError, match="blown"):
            training.backward()
        before.remove()
        if not rank:  # another one needs nothing, so that it would never answer
            told = error_of(training.state.flush)
            assert told == "no error" or "backward" in told


def last_step(rank: int, world_size: int, leaves: bool) -> list[float]:
    """Rank 0 may leave right after its last step; rank 1's last gradient comes two seconds later then."""
    training = Training("decoupled", rank).run(6)
    if rank and leaves:
        training.model.module[0].weight.register_hook(lambda _: time.sleep(2))
    training.step()
    if leaves and not rank:
        dist.destroy_process_group()
        return []
    training.state.flush()
    return [float(p.detach().sum()) for p in training.model.module.parameters()]


def test_a_rank_may_leave_while_another_still_needs_its_parts() -> None:
    assert run_ranks(last_step, 2, args=(True,))[1] == run_ranks(last_step, 2, args=(False,))[1]


@in_ranks(2)
def test_a_rank_that_is_ahead_keeps_no_gather_from_the_others(rank: int) -> float:
    """Rank 0 ends first: it answers for rank 1's next steps while it has yet to say what is gathered of its last."""
    training = Training("decoupled", rank, module=mlp(WIDTH, 1500, 1500, WIDTH, seed=3), bucket_cap_mb=1)
    with Join([training.model]):
        training.run(6 + 3 * rank)
    training.state.flush()
    return float(sum(p.detach().double().sum() for p in training.model.parameters()))


def owned_by(way: str) -> Way:
    """Return the way of a hook whose model has a group of its own."""

    def made(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
        group = model.process_group
        if way == "muon":
            return MuonState(optimizers[0], process_group=group), muon_hook
        state = KFACState(model, optimizers[0], process_group=group, inv_update_steps=1)
        if way == "kfac":
            return state, kfac_hook
        return DecoupledState(optimizers[0], group, kfac=state, defer="always"), decoupled_hook

    return WAYS["owned"] if way == "owned" else made


def die(*_: Any, **__: Any) -> None:
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("way", "world_size"), [("kfac", 2), ("kfac", 4), ("decoupled_kfac", 2), ("muon", 2), ("owned", 2)]
)
@in_ranks(deaths={1: signal.SIGKILL}, timeout_s=90)
def test_a_peer_that_dies_in_its_owners_work_is_an_error_in_bounded_time(
    rank: int, world_size: int, way: str
) -> None:
    """In backward a peer dies in tests/conformance.

    Who is no neighbour of the dead one on the ring hears of it when a neighbour leaves, or by the timeout.
    """
    group = impatient_group(PATIENCE_S)
    optimizers = functools.partial(optimizers_of, way)
    training = Training(owned_by(way), rank, optimizers=optimizers, process_group=group).run(3)
    dist.barrier()
    begin_s = time.monotonic()
    dying = mock.patch.object(*WORK[way.removeprefix("decoupled_")], die)
    failing = pytest.raises(ExchangeError, match=f"^rank {rank} of {world_size}: the ")
    with dying if rank == 1 else contextlib.nullcontext(), failing:
        training.run(3)
    assert time.monotonic() - begin_s < PATIENCE_S + LIMIT_S
    # A thread may still wait for a rank that is no neighbour of the dead one: no longer than the group's timeout.
    dist.destroy_process_group(group)


# Averaging hooks send no buckets in most steps; below the wrapper another library's hook has all buckets but the last.
REFUSING = [
    pytest.param(way, which, world_size, id=f"{world_size}-{way}-{which}")
    for way in WAYS
    for which in (0, "last", "engine")
    for world_size in (1, 2)
    if way not in ("averaged", "elastic") and (way, which) != ("wrapped", 0)
    if world_size == 1 or which == "last"  # for whose Future peers wait
]
# Nothing of a refused step is left in these: others keep residuals, factors or momentum of its other buckets, and below
# the wrapper another library's exchange goes on.
AS_IF_IT_HAD_NOT_BEEN = ("split", "crossover", "decoupled", "owned")


@pytest.mark.parametrize(("way", "which", "world_size"), REFUSING)
@in_ranks()
def test_a_refused_bucket_is_a_refused_step_and_the_next_backward_begins_anew(
    rank: int, way: str, which: Any, world_size: int
) -> None:
    turn = RecordingTurn()
    training, whole = (Training(way, rank, mutex=mutex).run(6) for mutex in (turn, RecordingTurn()))
    turn.order.clear()
    trouble = AssertionError("ours")
    refused = (
        inside.break_engine(trouble) if which == "engine" else inside.refuse_bucket(which, error=trouble)
    )
    # Not even a mistake of our own leaves the hook, which would be DDP's end.
    with refused, pytest.raises(AssertionError, match=r"^ours$"):
        training.backward()
    assert "release" in turn.order or way == "split" or which == "engine", "siblings go on"
    if way in ("decoupled", "owned"):
        for _ in range(2):
            with pytest.raises(UnsupportedConfigurationError, match="expected a whole backward"):
                training.optimizers[0].step()
    for each in (training, whole):
        each.steps += 1
        each.drop()
    losses, expected = ([each.step() for _ in range(4)] for each in (training, whole))
    training.close()
    whole.close()
    assert losses == expected or way not in AS_IF_IT_HAD_NOT_BEEN
    assert torch.tensor(losses + expected).isfinite().all()


# What no hook exchanges, outside of a backward pass, with words of the error.
SPARSE = SimpleNamespace(
    index=lambda: 0,
    is_last=lambda: True,
    buffer=lambda: torch.zeros(3).to_sparse(),
    parameters=lambda: [torch.zeros(3)],
)
CAPTURED = SimpleNamespace(buffer=lambda: SimpleNamespace(is_cuda=True))


@pytest.mark.torch_version
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("way", "bucket", "message"),
    [
        *((way, SPARSE, "expected dense gradients") for way in ("split", "crossover", "int8")),
        *((way, CAPTURED, "graph is captured") for way in ("crossover", "wrapped", "decoupled", "kfac")),
    ],
)
def test_a_future_carries_the_error_where_no_backward_runs(
    way: str, bucket: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would look there for what is raised after backward. Of a bucket on a CPU nothing is asked of CUDA."""
    got: list[Any] = []
    training = Training(way, around=lambda hook: got.append(hook) or hook)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedConfigurationError, match=message):
        got[0](training.state, bucket).wait()
    training.run(2).close()
