"""A job that cannot join its siblings trains on without turns, on all ranks alike; a process is one job."""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, crossover_hook, gpu_mutex, reduce_scatter_all_gather_hook
from crossover_ddp._turns import channel as turn_channel
from crossover_ddp._turns import segment as turn_segment
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp._turns.slots import SLOT_COUNT, lock_slots
from tests.harness import Job, run_jobs
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import new_group
from tests.harness.oracles import heard
from tests.harness.training import WIDTH, Training
from tests.harness.waiting import eventually

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


def train(
    rank: int,
    world_size: int,
    hooked: bool,
    spoil: str = "",
    base: str = "",
    seed: int = 1,
    meeting: str = "",
) -> Outcome:
    """Train one model; ``spoil`` names what keeps ranks from joining, ``meeting`` where two jobs meet at the end."""
    with pytest.MonkeyPatch.context() as patch, heard() as warnings:
        if base:
            patch.setattr(TurnSegment.__init__, "__kwdefaults__", {"base": base})
        if spoil:
            SPOILERS[spoil](rank, patch)
        training = training_of(seed, rank, hooked)
        losses = [training.step() for _ in range(STEPS)]
        if meeting:  # whoever has joined stays until the other job has tried to
            Path(meeting, f"job{seed}-rank{rank}").touch()
            assert eventually(lambda: len(os.listdir(meeting)) == 2 * world_size, TIMEOUT_S)
        return outcome([training], losses, warnings)


def _full(rank: int, patch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(turn_segment.os, "posix_fallocate", no_room)


def _full_on_one_rank(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine share the file: the one that comes too late finds no room for its bell."""

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        patch.setattr(turn_segment.TurnSegment, "reserve", no_room)


def _broken_store(rank: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu_mutex, "_HOOK_JOIN_TIMEOUT_S", 1.0)
    if rank == 1:

        def unreachable(*_: Any) -> None:
            raise RuntimeError("connection refused")

        patch.setattr(turn_channel.TurnChannel, "_met", unreachable)


def _late_rank(rank: int, patch: pytest.MonkeyPatch) -> None:
    """One rank answers when the others have given up on it: the verdict is theirs."""
    patch.setattr(gpu_mutex, "_HOOK_JOIN_TIMEOUT_S", 0.5)
    gather = turn_channel.TurnChannel.gather
    if rank == 1:

        def late(self: Any, value: Any) -> Any:
            time.sleep(1.5)
            return gather(self, value)

        patch.setattr(turn_channel.TurnChannel, "gather", late)


def _impatient(rank: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(turn_segment, "_SLOT_PATIENCE_S", 0.5)


SPOILERS: dict[str, Callable[[int, pytest.MonkeyPatch], None]] = {
    "impatient": _impatient,
    "full": _full,
    "full on one rank": _full_on_one_rank,
    "broken store": _broken_store,
    "late rank": _late_rank,
}


def environment(world_size: int, first: int = 0) -> list[dict[str, str]]:
    return [{"CROSSOVER_DEVICE": f"device{first + rank}"} for rank in range(world_size)]


def run(world_size: int, *args: Any) -> list[Outcome]:
    return run_jobs([Job(train, world_size, args, environment=environment(world_size))], timeout_s=TIMEOUT_S)[
        0
    ]


@cache
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


both_sizes = pytest.mark.parametrize("world_size", [2, 4])
# Where every rank meets the same by itself, four of them only in the campaign.
sizes_alike = pytest.mark.parametrize("world_size", [2, 4] if IN_CAMPAIGN else [2])


@needs_root
@both_sizes
def test_a_directory_that_another_user_made_first(world_size: int, tmp_path: Path) -> None:
    """Also what a rootless container's root finds that another user's container has made."""
    foreign = tmp_path / f"crossover_ddp-{os.geteuid()}"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    check_trains_on(run(world_size, True, "", str(tmp_path)), cause="to belong to user")


@both_sizes
@pytest.mark.parametrize("spoil", ["full", "full on one rank"])
def test_shared_memory_that_is_full(world_size: int, spoil: str, tmp_path: Path) -> None:
    check_trains_on(run(world_size, True, spoil, str(tmp_path)), cause="No space left on device")


@sizes_alike
def test_shared_memory_that_is_missing(world_size: int, tmp_path: Path) -> None:
    check_trains_on(run(world_size, True, "", str(tmp_path / "missing")), cause="expected Linux with")


def test_two_jobs_that_start_together_and_share_some_devices(tmp_path: Path) -> None:
    jobs = [
        Job(
            train,
            2,
            (True, "", "", seed, str(tmp_path)),
            environment=environment(2, first=seed),
            name=f"job {seed}",
        )
        for seed in (1, 2)
    ]
    plain = [
        Job(train, 2, (False, "", "", seed), environment=environment(2), name=f"plain {seed}")
        for seed in (1, 2)
    ]
    found = run_jobs(jobs, timeout_s=TIMEOUT_S)
    for job, alone in zip(found, run_jobs(plain, timeout_s=TIMEOUT_S), strict=True):
        assert [(rank.losses, rank.parameters) for rank in job] == [(r.losses, r.parameters) for r in alone]
        assert [rank.stats[0]["disabled_because"] for rank in job] == [None, None]
        assert all(rank.stats[0]["turns"] >= STEPS - 1 for rank in job)


@contextlib.contextmanager
def all_slots_locked(group: str, base: Path) -> Iterator[TurnSegment]:
    """As the last one to leave holds them while it removes the files."""
    segment = TurnSegment(group, "device0", base=str(base))
    fd = os.open(segment.path, os.O_RDWR)
    assert lock_slots(fd, 0, SLOT_COUNT)
    try:
        yield segment
    finally:
        with contextlib.suppress(OSError):
            lock_slots(fd, 0, SLOT_COUNT, fcntl.F_UNLCK)
            os.close(fd)
        segment.forget()


@sizes_alike
def test_slots_that_stay_locked(
    world_size: int, group_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with all_slots_locked(group_name, tmp_path):
        check_trains_on(run(world_size, True, "impatient", str(tmp_path)), cause="expected a free slot")


def test_slots_that_are_locked_for_a_moment_are_waited_for(group_name: str, tmp_path: Path) -> None:
    with all_slots_locked(group_name, tmp_path) as segment:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        holder = next(fd for fd in fds if fd != segment.slots_file.fd and _path_of(fd) == segment.path)
        timer = threading.Timer(1.5, lambda: lock_slots(holder, 0, SLOT_COUNT, fcntl.F_UNLCK))
        timer.start()
        found = run(2, True, "", str(tmp_path))
        timer.join()
    assert [rank.stats[0]["disabled_because"] for rank in found] == [None, None]
    assert [rank.warnings for rank in found] == [[], []]


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@both_sizes
def test_a_store_that_one_rank_does_not_reach(world_size: int) -> None:
    """Nobody can tell the others why: each rank says what it found, in bounded time."""
    begin_s = time.monotonic()
    found = run(world_size, True, "broken store")
    assert time.monotonic() - begin_s < TIMEOUT_S / 2
    for rank, plain in enumerate(plain_run(world_size)):
        assert (found[rank].losses, found[rank].parameters) == (plain.losses, plain.parameters)
        assert len(found[rank].warnings) == 1
        assert found[rank].stats[0]["turns"] == 0


def test_a_rank_that_comes_too_late_accepts_the_others_verdict() -> None:
    found = run(2, True, "late rank")
    for rank in found:
        assert "expected all 2 ranks to join within" in rank.stats[0]["disabled_because"]
        assert rank.stats[0]["turns"] == 0
        assert len(rank.losses) == STEPS


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


PAIR, ONE, ALL, SOME = (2, (0, 1)), (2, (1,)), (4, (0, 1, 2, 3)), (4, (0, 2))
GROUPS = [
    *((size, ranks, together) for size, ranks in (PAIR, ONE) for together in (False, True)),
    *((*ALL, True), (*SOME, False)),
    *([(*ALL, False), (*SOME, True)] if IN_CAMPAIGN else []),
]


@pytest.mark.parametrize(("world_size", "ranks", "together"), GROUPS, ids=str)
def test_models_on_several_groups_are_one_job(
    world_size: int, ranks: tuple[int, ...], together: bool
) -> None:
    """Beside a sibling of the same kind: nobody waits a lease for itself."""

    def job(hooked: bool, name: str) -> Job:
        return Job(
            _alternate,
            world_size,
            (hooked, ranks, together),
            environment=environment(world_size),
            name=name,
        )

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


def test_the_wrapper_around_a_hook_of_a_partial_group_is_that_hook() -> None:
    found = run_jobs([Job(_wrapped_on_one_rank, 2, environment=environment(2))], timeout_s=TIMEOUT_S)[0]
    wrapped, bare = found[1]
    assert wrapped == bare
    assert wrapped


def _wrapped_on_one_rank(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    from crossover_ddp import crossover_wrapper

    group = dist.new_group([1])
    if rank != 1:
        return [], []
    results = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
        if wrapped:
            state = CrossoverState(group, hook_state=group)
            model.register_comm_hook(state, crossover_wrapper(default_hooks.allreduce_hook))
        else:
            model.register_comm_hook(group, default_hooks.allreduce_hook)
        model(torch.ones(4, 8)).pow(2).mean().backward()
        results.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    return results[0], results[1]


# --- how the ranks agree ------------------------------------------------------------------------------------------


def _train_without_gloo_for_turns(rank: int, world_size: int, directory: str) -> Outcome:
    """The job's store is a `TCPStore`, as with torchrun, and no second gloo group can be made."""
    port_file = Path(directory, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        Path(directory, "new").write_text(str(store.port))
        Path(directory, "new").rename(port_file)
    else:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not port_file.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("no address of this host can be reached")

        patch.setattr(dist, "ProcessGroupGloo", refuse)
        patch.setattr(dist, "new_group", refuse)
        return train(rank, world_size, True)


def test_turns_need_no_gloo_group_and_no_host_name(tmp_path: Path) -> None:
    job = Job(
        _train_without_gloo_for_turns,
        2,
        (str(tmp_path),),
        backend=None,
        environment=environment(2),
    )
    found = run_jobs([job], timeout_s=TIMEOUT_S)[0]
    for rank, plain in zip(found, plain_run(2), strict=True):
        assert rank.stats[0]["disabled_because"] is None
        assert rank.stats[0]["turns"] == STEPS
        assert rank.losses == plain.losses
        assert rank.warnings == []
