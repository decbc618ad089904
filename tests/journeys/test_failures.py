"""What fails, and what is refused: who hears of it, when, in which words, and what works afterwards."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from crossover_ddp import (
    ExchangeError,
    UnsupportedConfigurationError,
    reduce_scatter_all_gather_hook,
)
from tests.harness import inside, run_ranks
from tests.harness.fuse import blow
from tests.harness.networks import mlp
from tests.harness.training import WAYS, WIDTH, Training, hooked
from tests.harness.turn import RecordingTurn
from tests.harness.waiting import eventually

IMPATIENT_S = 60.0
NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"


def error_of(training: Training) -> str:
    """Return the text of the exchange's failure, which a deferred step tells in the next one."""
    try:
        training.run(3)
    except ExchangeError as error:
        for optimizer in training.optimizers:
            optimizer.zero_grad()  # the step is skipped
        return str(error)
    return "none"


# --- failures ------------------------------------------------------------------------------------------------------


def peer_dies(rank: int, world_size: int, way: str) -> tuple[list[str], list[str], float]:
    """Rank 1 is killed in its third step; return what rank 0 is told, twice, and what became of its turn."""
    turn = RecordingTurn()
    training = Training(way, rank, mutex=turn).run(2)
    if rank:  # when the last layer's gradients are under way, not those of the first
        training.model.module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    begin_s = time.monotonic()
    errors = [error_of(training) for _ in range(2)]
    seconds = time.monotonic() - begin_s
    dist.destroy_process_group()
    return errors, turn.order, seconds


# What may be under way when a peer dies.
THINGS = r"(bucket \d+|factors of K-FAC|the digests of step \d+)"


@pytest.mark.parametrize(
    "way", ["split", "crossover", "decoupled", "kfac"]
)  # others: conformance/test_columns.py
def test_a_dead_peer_is_an_error_in_seconds_that_is_final_and_keeps_no_turn(way: str) -> None:
    outcome, _ = run_ranks(peer_dies, 2, args=(way,), deaths={1: signal.SIGKILL}, timeout_s=90)
    (first, again), order, seconds = outcome
    assert re.match(rf"rank 0 of 2: the .+ of {THINGS} failed: ", first)
    assert seconds < IMPATIENT_S
    assert again == first
    if way in ("crossover", "kfac"):  # deferred steps take their turn before they hear of it
        assert order[-1] == "release", "siblings go on"
        assert order.count("acquire") < order.count("release")


def owner_fails(rank: int, world_size: int, told: str) -> tuple[list[str], list[str]]:
    """Return what rank 0 is told, whose own work fails, and what becomes of its turn; rank 1 is killed afterwards."""
    turn = RecordingTurn()
    training = Training("muon", rank, mutex=turn).run(2)
    turn.order.clear()
    if rank:
        threading.Thread(target=die_when, args=(told,)).start()
        error_of(training)
        time.sleep(60)
    with mock.patch(NEWTON_SCHULZ, side_effect=ZeroDivisionError("no direction")):
        errors = [error_of(training) for _ in range(2)]
    Path(told).touch()
    dist.destroy_process_group()
    return errors, turn.order


def die_when(told: str) -> None:
    eventually(Path(told).exists)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_owner_that_fails_names_rank_bucket_and_cause_for_all_later_buckets(
    world_size: int, tmp_path: Path
) -> None:
    deaths = {1: signal.SIGKILL} if world_size > 1 else {}
    (first, again), order = run_ranks(owner_fails, world_size, args=(str(tmp_path / "told"),), deaths=deaths)[
        0
    ]
    assert re.match(rf"rank 0 of {world_size}: the .+ of bucket \d+ failed: no direction; .*restart", first)
    assert again == first
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


def leaves_while_needed(rank: int, world_size: int) -> list[float]:
    """Rank 0 leaves right after its last step; rank 1's last gradient comes two seconds later."""
    training = Training("decoupled", rank).run(6)
    if rank:
        training.model.module[0].weight.register_hook(lambda _: time.sleep(2))
    training.step()
    if rank:
        training.state.flush()
    else:
        dist.destroy_process_group()
        return []
    return [float(p.detach().sum()) for p in training.model.module.parameters()]


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


def stays(rank: int, world_size: int) -> list[float]:
    training = Training("decoupled", rank).run(7)
    training.state.flush()
    return [float(p.detach().sum()) for p in training.model.module.parameters()]


def test_a_rank_may_leave_while_another_still_needs_its_parts() -> None:
    assert run_ranks(leaves_while_needed, 2)[1] == run_ranks(stays, 2)[1]


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


class SparseBucket:
    """What no hook exchanges, outside of a backward pass."""

    def __getattr__(self, name: str) -> Any:
        value = {
            "index": 0,
            "is_last": True,
            "buffer": torch.zeros(3).to_sparse(),
            "parameters": [torch.zeros(3)],
            "gradients": [],
        }[name]
        return lambda: value


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("way", ["split", "crossover", "int8"])
def test_a_future_carries_the_error_where_no_backward_runs(way: str) -> None:
    """Nobody would look there for what is raised after backward."""
    got: list[Any] = []
    training = Training(way, around=lambda hook: got.append(hook) or hook)
    future = got[0](training.state, SparseBucket())
    with pytest.raises(UnsupportedConfigurationError, match="expected dense gradients"):
        future.wait()
    training.close()


@pytest.mark.usefixtures("process_group")
def test_an_error_of_one_step_does_not_reach_the_next() -> None:
    sparse = hooked(nn.EmbeddingBag(5, 3, mode="sum", sparse=True), reduce_scatter_all_gather_hook)
    for _ in range(2):
        with pytest.raises(UnsupportedConfigurationError, match=r"layout=torch\.sparse_coo"):
            sparse(torch.tensor([[1, 2]])).sum().backward()
        assert Training("split").run(2).model.module[0].weight.grad is None
