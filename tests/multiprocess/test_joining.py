"""A job that cannot join its siblings trains on without turns, on all ranks alike; a process is one job."""

import errno
import fcntl
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from crossover_ddp._turns import joining
from crossover_ddp._turns.segment import SLOT_COUNT, TurnSegment, lock_slots
from crossover_ddp._turns.turns import Turns
from crossover_ddp.errors import TurnError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, in_ranks, inside, run_jobs
from tests.harness.groups import new_group
from tests.harness.oracles import heard
from tests.harness.training import WIDTH, Training, same
from tests.unit.turns.mutexes import membership_of

STEPS = 5
TIMEOUT_S = 90.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def environment(world_size: int) -> list[dict[str, str]]:
    return [{"CROSSOVER_DEVICE": f"device{rank}"} for rank in range(world_size)]


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


def train(
    rank: int, world_size: int, spoil: str, base: Path | None
) -> tuple[dict[str, Any], list[list[str]]]:
    """Train as without turns, bit for bit; return the state's stats, and of each rank what was said.

    ``spoil`` names what keeps ranks from joining, ``base`` is in the place of shared memory.
    """
    plain = training_of(1, rank, hooked=False)
    losses = [plain.step() for _ in range(STEPS)]
    with pytest.MonkeyPatch.context() as patch, heard() as warnings:
        patch.setenv("CROSSOVER_DEVICE", f"device{rank}")
        if base is not None:
            patch.setattr(TurnSegment.__init__, "__kwdefaults__", {"base": str(base)})
        for place, found in SPOILERS.get(spoil, ()):
            if rank == 1 or not place.endswith(ON_RANK_1):
                patch.setattr(place, found)
        training = training_of(1, rank, hooked=True)
        assert [training.step() for _ in range(STEPS)] == losses
        assert same(training, plain)
        stats = training.state.stats()
        training.close()
    said: list[Any] = [None] * world_size
    dist.all_gather_object(said, warnings)
    return stats, said


@pytest.fixture(autouse=True)
def group_name(monkeypatch: pytest.MonkeyPatch) -> str:
    name = new_group()
    monkeypatch.setenv("CROSSOVER_GROUP", name)
    return name


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Also what a rootless container's root finds that another user's container has made."""
    directory = tmp_path / "foreign" / f"crossover_ddp-{os.geteuid()}"
    directory.mkdir(mode=0o700, parents=True)
    if os.geteuid() == 0:
        os.chown(directory, 12345, 12345)
    return directory.parent


@pytest.fixture
def locked(group_name: str, tmp_path: Path) -> Iterator[Callable[[], bool]]:
    """Lock all slots, as the last one to leave does while it removes the files; yields what frees them."""
    segment = TurnSegment(group_name, "device0", base=str(tmp_path))
    with open(segment.path, "r+b") as file:
        assert lock_slots(file.fileno(), 0, SLOT_COUNT)
        free = functools.partial(lock_slots, file.fileno(), 0, SLOT_COUNT, fcntl.F_UNLCK)
        yield free
        free()
    segment.forget()


@pytest.fixture
def locked_for_a_moment(locked: Callable[[], bool]) -> Iterator[None]:
    timer = threading.Timer(1.5, locked)
    timer.start()
    yield
    timer.join()


def trains_on(rank: int, world_size: int, spoil: str, base: Path, cause: str) -> None:
    """One rank says that it does."""
    stats, said = train(rank, world_size, spoil, base)
    assert cause in stats["disabled_because"]
    assert stats["turns"] == 0
    ((message,),) = filter(None, said)
    assert cause in message and "trains on without" in message


@pytest.mark.parametrize(
    ("world_size", "spoil", "base", "cause"),
    [
        pytest.param(2, "", "foreign", "to belong to user", marks=needs_root),
        (2, "full", "", "No space left on device"),
        (4, "full on one rank", "", "No space left on device"),
        (2, "", "missing", "expected Linux with"),
    ],
)
@pytest.mark.usefixtures("foreign")
@in_ranks()
def test_shared_memory_that_is_full_missing_or_another_users(
    rank: int, world_size: int, spoil: str, base: str, cause: str, tmp_path: Path
) -> None:
    trains_on(rank, world_size, spoil, tmp_path / base, cause)


@pytest.mark.usefixtures("locked")
@in_ranks(2)
def test_slots_that_stay_locked(rank: int, world_size: int, tmp_path: Path) -> None:
    trains_on(rank, world_size, "impatient", tmp_path, "expected a free slot")


@pytest.mark.usefixtures("locked_for_a_moment")
@in_ranks(2)
def test_slots_that_are_locked_for_a_moment_are_waited_for(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    stats, said = train(rank, world_size, "", tmp_path)
    assert stats["disabled_because"] is None
    assert said == [[], []]


@pytest.mark.parametrize("spoil", ["broken store", "late rank"])
@in_ranks(2)
def test_a_store_that_one_rank_does_not_reach_and_a_rank_that_comes_too_late(
    rank: int, world_size: int, spoil: str
) -> None:
    """Nobody can tell the others why: each rank says what it found, in bounded time. Who is late hears it."""
    stats, said = train(rank, world_size, spoil, None)
    assert stats["turns"] == 0
    if spoil == "broken store":
        assert [len(each) for each in said] == [1, 1]
    else:
        assert "expected all 2 ranks to join within" in stats["disabled_because"]


@in_ranks(2)
def test_a_rank_without_a_thread_for_its_turns_tells_its_peers(rank: int) -> None:
    """They would wait for its grants for half the group's timeout."""
    device, message = (
        f"device{rank}",
        "expected a thread for turns, got: can't start new thread; raise ulimit -u",
    )
    for is_lead in (True, False):
        dist.barrier()
        if (rank == 0) == is_lead:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(TurnError, match=message):
                patch.setattr(Turns, "__init__", _fails(RuntimeError("can't start new thread")))
                GPUMutex(device=device)
            assert joining._places == set()
        else:
            mutex = GPUMutex(device=device)
            channel = membership_of(mutex).channel
            if is_lead:
                channel.ask()
                with pytest.raises(TurnError, match="the job's lead rank takes no more turns"):
                    channel.receive()
            with mutex:
                pass
            mutex.close()


# --- one process, one job -----------------------------------------------------------------------------------------


def _alternate(
    rank: int, hooked: bool, groups: Sequence[Any], together: bool
) -> tuple[list[Training], list[float]]:
    """Train a model on each group, in turn or in one backward; return the losses, too."""
    trainings, losses = [training_of(seed, rank, hooked, group) for seed, group in enumerate(groups, 1)], []
    for _ in range(2 * STEPS):
        if together:
            loss = torch.stack([training.loss() for training in trainings]).sum()
            loss.backward()
            losses.append(loss.item())
        for training in trainings:
            if not together:
                losses.append(training.backward())
            training.update()
    return trainings, losses


def _are_one_job(rank: int, world_size: int, ranks: Sequence[int], together: bool) -> list[str]:
    """Train two models, one on the default group and one on a group of ``ranks``; return what was said."""
    with heard() as warnings:
        group = dist.new_group(list(ranks))
        groups = [None, group] if rank in ranks else [None]
        plain, losses = _alternate(rank, False, groups, together)
        hooked, found = _alternate(rank, True, groups, together)
        dist.barrier()
        assert found == losses
        assert all(map(same, hooked, plain))
        stats = hooked[0].state.stats()
        assert stats["disabled_because"] is None
        assert stats["leases_expired"] == 0
        assert stats["siblings"] in (0, 1), "its own models are none"
        assert stats["turns"] >= 2 * STEPS - 1
        for training in hooked:
            training.close()
    return warnings


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
    own = environment(world_size)
    jobs = [Job(_are_one_job, world_size, (ranks, together), environment=own, name=name) for name in "ab"]
    for job in run_jobs(jobs, timeout_s=TIMEOUT_S):
        said = [message for warnings in job for message in warnings]
        assert len(said) == (len(ranks) < world_size), said
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
    losses = [training.step() for _ in range(12)]
    training.close()
    # PowerSGD's last callbacks may still run, and abort a process that ends by then (pytorch#179291).
    time.sleep(0.1)
    return losses, torch.cat([p.detach().flatten() for p in training.held]).numpy().tobytes()


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
