"""What fails, and what is refused: who hears of it, when, in which words, and what works afterwards."""

import contextlib
import re
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from crossover_ddp import ExchangeError, UnsupportedConfigurationError
from tests.harness import inside, run_ranks
from tests.harness.networks import blow, mlp
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, WIDTH, Training
from tests.harness.turn import RecordingTurn

NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"


# --- failures ------------------------------------------------------------------------------------------------------


def owner_fails(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Return what a rank is told, twice, when rank 0's own work fails, and what becomes of its turn."""
    turn = RecordingTurn()
    training = Training("muon", rank, mutex=turn).run(2)
    turn.order.clear()
    failing = mock.patch(NEWTON_SCHULZ, side_effect=ZeroDivisionError("no direction"))
    with contextlib.nullcontext() if rank else failing:
        errors = []
        for _ in range(2):
            errors.append(error_of(training.run))
            training.drop()
    dist.destroy_process_group()
    return errors, turn.order


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_owner_that_fails_names_rank_bucket_and_cause_for_all_later_buckets(world_size: int) -> None:
    everyone = run_ranks(owner_fails, world_size)
    for rank, ((first, again), _) in enumerate(everyone):
        assert re.match(rf"rank {rank} of {world_size}: the .+ of bucket \d+ failed: .*restart", first)
        assert again == first
    (first, _), order = everyone[0]
    assert "failed: no direction; " in first
    assert set(order) == {"release"}


def native_gather_is_never_issued(rank: int, world_size: int) -> str:
    """Gathers are issued with a step's last bucket, which an exception in backward keeps away."""
    with inside.force_native():
        training = Training("decoupled", rank).run(6)
        before = training.model.module[2].register_forward_pre_hook(lambda _, inputs: blow(*inputs))
        with pytest.raises(ArithmeticError, match="blown"):
            training.backward()
        before.remove()
        if rank:
            return "flushed"  # this rank needs nothing, so that it would never answer
        try:
            training.state.flush()
            return "flushed"
        except (ExchangeError, UnsupportedConfigurationError) as error:
            return str(error)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nobody_waits_for_a_gather_that_was_never_issued(world_size: int) -> None:
    for outcome in run_ranks(native_gather_is_never_issued, world_size):
        assert outcome == "flushed" or "backward" in outcome


def last_step(rank: int, world_size: int, leaves: bool) -> list[float]:
    """Rank 0 may leave right after its last step; rank 1's last gradient comes two seconds later."""
    training = Training("decoupled", rank).run(6)
    if rank:
        training.model.module[0].weight.register_hook(lambda _: time.sleep(2))
    training.step()
    if leaves and not rank:
        dist.destroy_process_group()
        return []
    training.state.flush()
    return [float(p.detach().sum()) for p in training.model.module.parameters()]


def test_a_rank_may_leave_while_another_still_needs_its_parts() -> None:
    assert run_ranks(last_step, 2, args=(True,))[1] == run_ranks(last_step, 2, args=(False,))[1]


def out_of_inputs(rank: int, world_size: int) -> float:
    """Rank 0 ends first: it answers for rank 1's next steps while it has yet to say what is gathered of its last."""
    training = Training("decoupled", rank, module=mlp(WIDTH, 1500, 1500, WIDTH, seed=3), bucket_cap_mb=1)
    with Join([training.model]):
        training.run(6 + 3 * rank)
    training.state.flush()
    return float(sum(p.detach().double().sum() for p in training.model.parameters()))


def test_a_rank_that_is_ahead_keeps_no_gather_from_the_others() -> None:
    first, second = run_ranks(out_of_inputs, 2)
    assert first == second


# --- refusals ------------------------------------------------------------------------------------------------------

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


def refused_in_the_middle(
    rank: int, world_size: int, way: str, which: Any
) -> tuple[str, bool, list[float], list[float]]:
    turn = RecordingTurn()
    training, whole = (Training(way, rank, mutex=mutex).run(6) for mutex in (turn, RecordingTurn()))
    turn.order.clear()
    text = "none"
    trouble = AssertionError("ours")
    with inside.break_engine(trouble) if which == "engine" else inside.refuse_bucket(which, error=trouble):
        try:
            training.backward()
        except AssertionError as error:
            text = str(error)
    is_given_away = "release" in turn.order
    if way in ("decoupled", "owned"):
        for _ in range(2):
            with pytest.raises(UnsupportedConfigurationError, match="expected a whole backward"):
                training.optimizers[0].step()
    for each in (training, whole):
        each.steps += 1
        for optimizer in each.optimizers:
            optimizer.zero_grad()
    losses = [[each.step() for _ in range(4)] for each in (training, whole)]
    training.close()
    whole.close()
    return text, is_given_away, *losses


@pytest.mark.parametrize(("way", "which", "world_size"), REFUSING)
def test_a_refused_bucket_is_a_refused_step_and_the_next_backward_begins_anew(
    way: str, which: Any, world_size: int
) -> None:
    for text, is_given_away, losses, whole in run_ranks(refused_in_the_middle, world_size, args=(way, which)):
        assert text == "ours", "not even a mistake of our own leaves the hook, which would be DDP's end"
        assert is_given_away or way == "split" or which == "engine", "siblings go on"
        assert losses == whole or way not in AS_IF_IT_HAD_NOT_BEEN
        assert torch.tensor(losses).isfinite().all()


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
