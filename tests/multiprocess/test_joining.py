"""Jobs of several ranks that join their siblings on all ranks, or on none; a process is one job."""

import datetime
import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from crossover_ddp import (
    CrossoverState,
    crossover_hook,
    crossover_wrapper,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp._turns import joining
from crossover_ddp._turns.channel import TurnChannel
from crossover_ddp._turns.rules import SIDE_STEPS, Member, Word
from crossover_ddp._turns.segment import TurnSegment, lock_slots
from crossover_ddp._turns.turns import Turns
from crossover_ddp.errors import SegmentError, TurnError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, in_ranks, inside, run_jobs
from tests.harness.groups import files_of, join_over, new_group
from tests.harness.oracles import heard
from tests.harness.training import WIDTH, Training, same
from tests.unit.turns.mutexes import membership_of

STEPS = 5
DEVICES = [{"CROSSOVER_DEVICE": f"device{rank}"} for rank in range(4)]


@pytest.fixture(autouse=True)
def _group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())


def training_of(seed: int, rank: int, hooked: bool, group: Any = None) -> Training:
    """Return a model with BatchNorm and its hook: with turns, or the split, which adds alike."""
    torch.manual_seed(seed)
    layers = (nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    return Training(
        lambda *_: (
            (CrossoverState(group), crossover_hook)
            if hooked
            else (group, reduce_scatter_all_gather_hook)
        ),
        rank,
        module=nn.Sequential(*layers),
        process_group=group,
        bucket_cap_mb=0.001,
    )


def _fails(error: Exception) -> Callable[..., None]:
    def failing(*_: Any, **__: Any) -> None:
        # A new error each time, since its traceback keeps the frames alive that it passes.
        raise type(error)(*error.args)

    return failing


def _late(*arguments: Any, gather: Callable[..., Any] = TurnChannel.gather) -> Any:
    """Answer after the other ranks have given up, so that the verdict is theirs."""
    time.sleep(1.5)
    return gather(*arguments)


WING = "crossover_ddp._turns"
# For each problem: the attribute that rank 1 finds replaced, its value, and the job's message.
SPOILERS: dict[str, tuple[str, Any, str]] = {
    "missing": (
        f"{WING}.segment.TurnSegment.__init__.__kwdefaults__",
        {"base": "/missing"},
        "expected Linux with",
    ),
    "locked": (
        f"{WING}.segment.lock_slots",
        lambda fd, start, length, *kind: length > 1 and lock_slots(fd, start, length, *kind),
        "expected a free slot",
    ),
    # Ranks of one machine share the file: the rank that comes too late finds no room for its slot.
    "full": (
        f"{WING}.segment.os.posix_fallocate",
        _fails(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        "got No space left on device; make room there",
    ),
    "broken store": (f"{WING}.channel.TurnChannel._meet", _fails(RuntimeError("refused")), ""),
    "late rank": (
        f"{WING}.channel.TurnChannel.gather",
        _late,
        "not all 2 ranks joined within",
    ),
}


@pytest.mark.parametrize(
    ("world_size", "spoil"),
    [(2, "missing"), (2, "locked"), (4, "full"), (2, "broken store"), (2, "late rank")],
)
@in_ranks()
def test_a_job_whose_rank_cannot_join_trains_without_turns(
    rank: int, world_size: int, spoil: str
) -> None:
    """One rank warns of the reason. If ranks cannot exchange it, each warns of its own, in time."""
    place, found, cause = SPOILERS[spoil]
    is_alone = spoil in ("broken store", "late rank")
    plain = training_of(1, rank, hooked=False)
    losses = [plain.step() for _ in range(STEPS)]
    with pytest.MonkeyPatch.context() as patch, heard() as warnings:
        patch.setenv("CROSSOVER_DEVICE", f"device{rank}")
        patch.setattr(f"{WING}.segment._SLOT_PATIENCE_S", 0.5)
        if is_alone:
            patch.setattr("crossover_ddp.gpu_mutex._HOOK_JOIN_TIMEOUT_S", 1.0)
        if rank == 1:
            patch.setattr(place, found)
        training = training_of(1, rank, hooked=True)
        assert [training.step() for _ in range(STEPS)] == losses
        assert same(training, plain)
        stats = training.state.stats()
        training.close()
    assert stats["turns"] == 0
    assert cause in stats["disabled_because"]
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, warnings)
    if not is_alone:
        ((message,),) = filter(None, of_ranks)
        assert cause in message and "trains on without" in message
    elif spoil == "broken store":
        assert [len(each) for each in of_ranks] == [1, 1]


@in_ranks(2)
def test_a_lead_rank_that_cannot_start_its_thread_ends_its_peers_turns(rank: int) -> None:
    """Else they would wait for its grants for half the group's timeout."""
    device = f"device{rank}"
    message = "cannot start the thread for turns: can't start new thread; raise ulimit -u"
    for is_lead in (True, False):
        dist.barrier()
        if (rank == 0) == is_lead:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(TurnError, match=message):
                patch.setattr(Turns, "__init__", _fails(RuntimeError("can't start new thread")))
                GPUMutex(device=device)
            assert joining._claims == set()
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


def _alternate(
    rank: int, hooked: bool, groups: Sequence[Any], together: bool
) -> tuple[list[Training], list[float]]:
    trainings = [training_of(seed, rank, hooked, group) for seed, group in enumerate(groups, 1)]
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
    return trainings, losses


def _are_one_job(rank: int, world_size: int, ranks: Sequence[int], together: bool) -> list[str]:
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
        assert stats["siblings"] in (0, 1), "the job's own models are not siblings"
        assert stats["turns"] >= 2 * STEPS - 1
        for training in hooked:
            training.close()
    return warnings


@pytest.mark.parametrize(
    ("world_size", "ranks", "together"), [(2, (0, 1), True), (4, (0, 2), False)], ids=str
)
def test_models_on_several_groups_are_one_job(world_size: int, ranks: Any, together: bool) -> None:
    """No job waits a lease for itself. It has a sibling of the same kind."""
    own = DEVICES[:world_size]
    jobs = [
        Job(_are_one_job, world_size, (ranks, together), environment=own, name=name)
        for name in "ab"
    ]
    for job in run_jobs(jobs, timeout_s=90.0):
        messages = [message for warnings in job for message in warnings]
        assert len(messages) == (len(ranks) < world_size), messages
        assert all(f"{len(ranks)} of the job's {world_size} ranks" in each for each in messages)


@in_ranks(2, environment=DEVICES[:2])
def test_the_wrapper_on_a_part_of_the_ranks_has_the_wrapped_hooks_result(rank: int) -> None:
    group = dist.new_group([1])
    found = []
    state = CrossoverState(group, hook_state=group)
    hooks = (
        (group, default_hooks.allreduce_hook),
        (state, crossover_wrapper(default_hooks.allreduce_hook)),
    )
    for hook in hooks if rank else ():
        training = Training(lambda *_, hook=hook: hook, rank, process_group=group)
        training.backward()
        found.append(
            [float(p.grad.sum()) for p in training.model.parameters() if p.grad is not None]
        )
        assert found[0] == found[-1] != []


@in_ranks(2, environment=DEVICES[:2])
def test_all_ranks_of_a_closed_state_join_again_after_turns_had_failed_on_one(rank: int) -> None:
    """If only the ranks without a failure joined again, they would wait for half an hour."""
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


LEASE_S = 100.0  # longer than any test, so that no lease excuses turns that overlap
TIMEOUT_S = 60.0


def take_turns(mutex: GPUMutex, count: int, group: dist.ProcessGroup | None = None) -> float:
    """Take turns with a collective inside, like DDP's broadcast of buffers.

    Return the longest wait for a turn.
    """
    longest_s = 0.0
    for _ in range(count):
        begin_s = time.monotonic()
        mutex.acquire()
        longest_s = max(longest_s, time.monotonic() - begin_s)
        dist.barrier(group)
        mutex.release()
    return longest_s


@in_ranks(2)
def test_a_job_that_stays_side_by_side_draws_one_turn_for_several_steps(
    rank: int,
) -> tuple[int, int]:
    """All ranks draw the same ones, even if one requests early or receives the verdict late."""
    mutex = GPUMutex(device=f"dev{rank}", trial=True)
    segment = membership_of(mutex).segment

    def run_steps(steps: int, turns: int, word: Word | None = None) -> None:
        """Write a word and run some steps. Check that ``turns`` turns are drawn for them."""
        if rank == 0 and word is not None:
            segment.write_word(word)
        dist.barrier()
        expected = segment.drawn() + turns
        dist.barrier()
        for step in range(steps):
            if step % 3 == rank:
                mutex.request()
            take_turns(mutex, 1)
            time.sleep(0.001 * (step % 4 * rank))
        ends_s = time.monotonic() + TIMEOUT_S
        while mutex.stats()["turn"] < expected and time.monotonic() < ends_s:
            time.sleep(0.001)
        dist.barrier()
        found = segment.drawn(), mutex.stats()["turn"]
        dist.barrier()
        assert found == (expected, expected)

    run_steps(4, 4)
    run_steps(20 * SIDE_STEPS + 1, 21, Word.SIDE_BY_SIDE)
    assert mutex.mode == "side by side"
    run_steps(SIDE_STEPS - 1 + 3, 3, Word.TAKE_TURNS)
    assert mutex.mode == "turns"
    # Beside a sibling, all numbers must be known.
    sibling = TurnSegment(os.environ["CROSSOVER_GROUP"], f"dev{rank}")
    sibling.join(Member(job=9, lead=sibling.machine, rank=rank, world_size=2, lease_s=1.0))
    dist.barrier()
    run_steps(10, 10)
    assert mutex.shared
    sibling.leave()
    found = mutex.stats()
    dist.barrier()
    mutex.close()
    return found["turns"], found["turn"]


@in_ranks(2)
def test_a_rank_waits_a_quarter_of_its_groups_timeout_whatever_the_siblings_lease(
    rank: int,
) -> None:
    """Rank 1's sibling never gives its turn back, and has published a lease of an hour."""
    with heard() as warnings:
        own = dist.new_group(timeout=datetime.timedelta(seconds=12))
        sibling = TurnSegment(os.environ["CROSSOVER_GROUP"], f"dev{rank}")
        sibling.join(Member(job=9, lead=sibling.machine, rank=rank, world_size=2, lease_s=3600.0))
        if rank == 0:
            sibling.publish_returned(sibling.draw_turn())
        dist.barrier()
        mutex = GPUMutex(device=f"dev{rank}", process_group=own)
        longest_s = take_turns(mutex, 3, own)
        expired = mutex.stats()["leases_expired"]
        dist.barrier()
        mutex.close()
        sibling.leave()
    assert (expired, len(warnings)) == (rank, rank), "once"
    if rank:
        assert 2.9 <= longest_s < 10.0, "a quarter of the timeout"
        assert "a quarter of its process group's timeout" in warnings[0]


@in_ranks(2)
def test_all_ranks_raise_if_one_cannot_join(rank: int) -> str:
    """The malformed file stays, and the job's own files are removed."""
    group = f"{os.environ['CROSSOVER_GROUP']}-broken"
    segment = TurnSegment(group, "dev1")
    segment.forget()
    dist.barrier()
    if rank == 0:
        os.truncate(segment.path, 100)
    dist.barrier()
    begin_s = time.monotonic()
    with pytest.raises(SegmentError, match="rank 0 cannot take turns: expected slots of") as caught:
        GPUMutex(group, device=f"dev{rank}")
    assert time.monotonic() - begin_s < TIMEOUT_S / 2
    dist.barrier()
    assert files_of(group) == [Path(segment.path)]
    dist.barrier()
    if rank == 0:
        os.unlink(segment.path)
    return str(caught.value)


@pytest.mark.parametrize("bad_rank", [0, 1])
@in_ranks(2)
def test_a_job_whose_turns_fail_on_one_device_trains_on_without(rank: int, bad_rank: int) -> None:
    with heard() as warnings:
        mutex = GPUMutex(device=f"dev{rank}", lease=LEASE_S)
        take_turns(mutex, 5)
        if rank == bad_rank:
            os.truncate(membership_of(mutex).segment.path, 100)
        longest_s = take_turns(mutex, 5)
        dist.barrier()
        mutex.close()
    assert longest_s < LEASE_S / 2
    assert len(warnings) <= 1
    assert rank != bad_rank or "trains on without" in warnings[0]


@pytest.mark.defect("turns-5", "strangers-21")
# Gloo itself finds addresses of the life before in the store. With lazy initialization it connects
# only with the first collective.
@in_ranks(2, environment={"TORCH_GLOO_LAZY_INIT": "1"})
def test_a_group_made_again_on_the_same_store_is_one_job_on_all_ranks(rank: int) -> list[str]:
    """No rank takes an answer of an earlier life, although rank 0 comes last and answers last."""
    store = None
    jobs = []
    for _ in range(3):
        store = join_over(rank, 2, store)
        time.sleep(0.0 if rank else 0.3)
        mutex = GPUMutex(device=f"dev{rank}")
        jobs.append(mutex.stats()["job"])
        for _ in range(2):
            with mutex:
                assert mutex.holding
        mutex.close()
    assert len(set(jobs)) == 3
    return jobs
