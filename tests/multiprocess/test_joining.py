"""A job that cannot join its siblings trains on without turns, on all ranks alike; a process is one job."""

import contextlib
import errno
import fcntl
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from crossover_ddp import (
    CrossoverState,
    crossover_hook,
    crossover_wrapper,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp._turns import channel as turn_channel
from crossover_ddp._turns.segment import SLOT_COUNT, TurnSegment, lock_slots
from tests.harness import Job, in_ranks, inside, run_jobs
from tests.harness.groups import new_group
from tests.harness.oracles import heard
from tests.harness.training import WIDTH, Training

STEPS = 5
TIMEOUT_S = 90.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


class Outcome(NamedTuple):
    """What became of one rank's training."""

    losses: list[float]
    parameters: bytes
    warnings: list[str]
    stats: list[dict[str, Any]]


def training_of(seed: int, rank: int, hooked: bool, group: Any = None) -> Training:
    """Return a model with BatchNorm and its hook; without turns with the split, which adds alike."""
    torch.manual_seed(seed)
    layers = (nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    return Training(
        lambda *_: (
            (CrossoverState(group), crossover_hook) if hooked else (group, reduce_scatter_all_gather_hook)
        ),
        rank,
        module=nn.Sequential(*layers),
        process_group=group,
        bucket_cap_mb=0.001,
    )


def outcome(trainings: Sequence[Training], losses: list[float], warnings: list[str]) -> Outcome:
    parameters = [p.detach().flatten() for training in trainings for p in training.model.parameters()]
    states = [each.state for each in trainings if isinstance(each.state, CrossoverState)]
    stats = [state.stats() for state in states]
    for state in states:
        state.close()
    return Outcome(losses, torch.cat(parameters).numpy().tobytes(), list(warnings), stats)


def train(rank: int, world_size: int, hooked: bool, spoil: str = "", base: str = "") -> Outcome:
    """Train one model; ``spoil`` names what keeps ranks from joining."""
    with pytest.MonkeyPatch.context() as patch, heard() as warnings:
        if base:
            patch.setattr(TurnSegment.__init__, "__kwdefaults__", {"base": base})
        for place, found in SPOILERS.get(spoil, ()):
            if rank == 1 or not place.endswith(ON_RANK_1):
                patch.setattr(place, found)
        training = training_of(1, rank, hooked)
        losses = [training.step() for _ in range(STEPS)]
        return outcome([training], losses, warnings)


def _fails(error: Exception) -> Callable[..., None]:
    def failing(*_: Any, **__: Any) -> None:
        raise type(error)(*error.args)  # a new one: its traceback keeps alive what it passes

    return failing


def _late(original: Callable[..., Any]) -> Callable[..., Any]:
    """A rank that answers when the others have given up on it: the verdict is theirs."""

    def late(*arguments: Any) -> Any:
        time.sleep(1.5)
        return original(*arguments)

    return late


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WING, SHORT = "crossover_ddp._turns", ("crossover_ddp.gpu_mutex._HOOK_JOIN_TIMEOUT_S", 1.0)
# What all ranks find in a place, and what rank 1 finds in another.
SPOILERS: dict[str, list[tuple[str, Any]]] = {
    "impatient": [(f"{WING}.segment._SLOT_PATIENCE_S", 0.5)],
    "full": [(f"{WING}.segment.os.posix_fallocate", _fails(NO_ROOM))],
    # Ranks of one machine share the file: the one that comes too late finds no room for its bell.
    "full on one rank": [(f"{WING}.segment.TurnSegment.reserve", _fails(NO_ROOM))],
    "broken store": [SHORT, (f"{WING}.channel.TurnChannel._met", _fails(RuntimeError("connection refused")))],
    "late rank": [SHORT, (f"{WING}.channel.TurnChannel.gather", _late(turn_channel.TurnChannel.gather))],
}
ON_RANK_1 = ("reserve", "_met", "gather")


def environment(world_size: int) -> list[dict[str, str]]:
    return [{"CROSSOVER_DEVICE": f"device{rank}"} for rank in range(world_size)]


def run(world_size: int, *args: Any) -> list[Outcome]:
    job = Job(train, world_size, args, environment=environment(world_size))
    return run_jobs([job], timeout_s=TIMEOUT_S)[0]


@functools.cache
def plain_run(world_size: int) -> list[Outcome]:
    return run(world_size, False)


def check_trains_on(found: list[Outcome], *, cause: str, warnings: int = 1) -> None:
    """Assert that training was that of a job without turns, bit for bit, and that it was said once."""
    for rank, plain in enumerate(plain_run(len(found))):
        assert found[rank].losses == plain.losses
        assert found[rank].parameters == plain.parameters
        assert cause in found[rank].stats[0]["disabled_because"]
        assert found[rank].stats[0]["turns"] == 0
    said = [message for rank in found for message in rank.warnings]
    assert len(said) == warnings, said
    assert all(cause in message and "trains on without" in message for message in said)


@pytest.fixture(autouse=True)
def group_name(monkeypatch: pytest.MonkeyPatch) -> str:
    name = new_group()
    monkeypatch.setenv("CROSSOVER_GROUP", name)
    return name


def foreign_at(base: Path) -> str:
    """Also what a rootless container's root finds that another user's container has made."""
    foreign = base / f"crossover_ddp-{os.geteuid()}"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    return str(base)


@pytest.mark.parametrize(
    ("world_size", "spoil", "at", "cause"),
    [
        pytest.param(2, "", foreign_at, "to belong to user", marks=needs_root),
        (2, "full", str, "No space left on device"),
        (4, "full on one rank", str, "No space left on device"),
        (2, "", lambda base: f"{base}/missing", "expected Linux with"),
    ],
)
def test_shared_memory_that_is_full_missing_or_another_users(
    world_size: int, spoil: str, at: Callable[[Path], str], cause: str, tmp_path: Path
) -> None:
    check_trains_on(run(world_size, True, spoil, at(tmp_path)), cause=cause)


@contextlib.contextmanager
def all_slots_locked(group: str, base: Path) -> Iterator[Callable[[], bool]]:
    """As the last one to leave holds them while it removes the files; yields what frees them."""
    segment = TurnSegment(group, "device0", base=str(base))
    with open(segment.path, "r+b") as file:
        assert lock_slots(file.fileno(), 0, SLOT_COUNT)
        free = functools.partial(lock_slots, file.fileno(), 0, SLOT_COUNT, fcntl.F_UNLCK)
        yield free
        free()
    segment.forget()


def test_slots_that_stay_locked(group_name: str, tmp_path: Path) -> None:
    with all_slots_locked(group_name, tmp_path):
        check_trains_on(run(2, True, "impatient", str(tmp_path)), cause="expected a free slot")


def test_slots_that_are_locked_for_a_moment_are_waited_for(group_name: str, tmp_path: Path) -> None:
    with all_slots_locked(group_name, tmp_path) as free:
        timer = threading.Timer(1.5, free)
        timer.start()
        found = run(2, True, "", str(tmp_path))
        timer.join()
    assert [rank.stats[0]["disabled_because"] for rank in found] == [None, None]
    assert [rank.warnings for rank in found] == [[], []]


def test_a_store_that_one_rank_does_not_reach_and_a_rank_that_comes_too_late() -> None:
    """Nobody can tell the others why: each rank says what it found, in bounded time. Who is late hears it."""
    begin_s = time.monotonic()
    broken, late = run(2, True, "broken store"), run(2, True, "late rank")
    assert time.monotonic() - begin_s < TIMEOUT_S
    for rank, plain in zip(broken + late, plain_run(2) * 2, strict=True):
        assert (rank.losses, rank.parameters) == (plain.losses, plain.parameters)
        assert rank.stats[0]["turns"] == 0
    assert [len(rank.warnings) for rank in broken] == [1, 1]
    assert all("expected all 2 ranks to join within" in rank.stats[0]["disabled_because"] for rank in late)


# --- one process, one job -----------------------------------------------------------------------------------------


def _alternate(rank: int, world_size: int, hooked: bool, ranks: Sequence[int], together: bool) -> Outcome:
    """Train two models, one on the default group and one on a group of ``ranks``, in turn or in one backward."""
    with heard() as warnings:
        group = dist.new_group(list(ranks))
        trainings = [training_of(1, rank, hooked)]
        if rank in ranks:
            trainings.append(training_of(2, rank, hooked, group))
        losses = []
        for _ in range(2 * STEPS):
            if together:
                loss = torch.stack([training.loss() for training in trainings]).sum()
                loss.backward()
                losses.append(loss.item())
            for training in trainings:
                if not together:
                    losses.append(training.backward())
                training.update()
        dist.barrier()
        return outcome(trainings, losses, warnings)


GROUPS = [
    (2, (0, 1), False),
    (2, (1,), True),
    (4, (0, 1, 2, 3), True),
    (4, (0, 2), False),
]


@pytest.mark.parametrize(("world_size", "ranks", "together"), GROUPS, ids=str)
def test_models_on_several_groups_are_one_job(
    world_size: int, ranks: tuple[int, ...], together: bool
) -> None:
    """Beside a sibling of the same kind: nobody waits a lease for itself."""

    def job(hooked: bool, name: str) -> Job:
        args, own = (hooked, ranks, together), environment(world_size)
        return Job(_alternate, world_size, args, environment=own, name=name)

    found = run_jobs([job(True, "first"), job(True, "second")], timeout_s=TIMEOUT_S)
    plain = run_jobs([job(False, "plain")], timeout_s=TIMEOUT_S)[0]
    partial = len(ranks) < world_size
    for each in found:
        for rank, alone in zip(each, plain, strict=True):
            assert (rank.losses, rank.parameters) == (alone.losses, alone.parameters)
            assert rank.stats[0]["disabled_because"] is None
            assert rank.stats[0]["leases_expired"] == 0
            assert rank.stats[0]["siblings"] in (0, 1), "its own models are none"
            assert rank.stats[0]["turns"] >= 2 * STEPS - 1
        said = [message for rank in each for message in rank.warnings]
        assert len(said) == partial, said
        assert all(f"{len(ranks)} of the job's {world_size} ranks" in message for message in said)


@in_ranks(2, environment=environment(2))
def test_the_wrapper_around_a_hook_of_a_partial_group_is_that_hook(rank: int) -> None:
    group, found = dist.new_group([1]), []
    state = CrossoverState(group, hook_state=group)
    hooks = (group, default_hooks.allreduce_hook), (state, crossover_wrapper(default_hooks.allreduce_hook))
    for way in hooks if rank else ():
        training = Training(lambda *_, way=way: way, rank, process_group=group)
        training.backward()
        found.append([float(p.grad.sum()) for p in training.model.parameters() if p.grad is not None])
        assert found[0] == found[-1] != []


# --- the wrapper around a hook with a state --------------------------------------------------------------------


def _train_by_power_sgd(rank: int, world_size: int, seed: int, wrapped: bool) -> tuple[list[float], bytes]:
    """Return losses and parameters of a model whose buffers DDP broadcasts inside the turn."""
    hook, inner = powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    torch.manual_seed(seed)
    training = Training(
        lambda *_: (CrossoverState(hook_state=inner), crossover_wrapper(hook)) if wrapped else (inner, hook),
        rank,
        module=nn.Sequential(nn.Linear(WIDTH, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128)),
        # PowerSGD's callbacks run collectives on gloo's threads, in no order when several buckets are under way.
        bucket_cap_mb=25.0,
    )
    found = outcome([training], [training.step() for _ in range(12)], [])
    # PowerSGD's last callbacks may still run, and abort a process that ends by then (pytorch#179291).
    time.sleep(0.1)
    return found.losses, found.parameters


def test_a_hook_with_a_state_keeps_its_results_inside_the_wrapper_beside_a_sibling() -> None:
    def jobs(wrapped: bool) -> list[Job]:
        own = environment(2)
        return [Job(_train_by_power_sgd, 2, (seed, wrapped), environment=own) for seed in (1, 2)]

    assert run_jobs(jobs(True), timeout_s=TIMEOUT_S) == [run_jobs([job])[0] for job in jobs(False)]


# --- joining again ------------------------------------------------------------------------------------------------


@in_ranks(2, environment=environment(2))
def test_all_ranks_join_anew_after_one_had_failed_before_it_was_closed(rank: int) -> None:
    """They would wait for each other for half an hour if only those whose mutex had been well did.

    Two trainings in one process group; at the end of the first, peers of rank 0 are quicker to close than it.
    """
    stats = []
    for _ in range(2):
        state = Training("crossover", rank).run(3).state
        if rank == 0 and not stats:
            inside.give_up(state.mutex, RuntimeError("Connection closed by peer"))
        state.close()
        stats.append(state.stats())
    first = "closed" if rank else "RuntimeError: Connection closed by peer"
    assert [each["disabled_because"] for each in stats] == [first, "closed"]
    assert stats[1]["turns"] == 3
