"""The home of turns in shared memory: slots, bells and the log, and whoever meddles with them.

Two segments of one process behave as two processes do, since locks and bells belong to open files; real
processes are used where one of them has to die.
"""

import os
import stat
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp._system.shared_memory import outer_user
from crossover_ddp._turns import segment as turn_segment
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.errors import SegmentError
from tests.unit.turns.joined_segments import (
    DEVICE,
    Join,
    Process,
    context,
    files,
    home,
    jobs,
    join_at,
    member,
)

AT_ONCE_S = 60.0  # far less than the waits that would go on, and enough on a busy machine


def join_slot(join: Join, slot: int, *, job: int) -> TurnSegment:
    """Join in a certain slot, whose lock the kernel may drop a moment after its owner's bell."""
    deadline_s = time.monotonic() + 2.0
    while (segment := join(job=job)).slot != slot and time.monotonic() < deadline_s:
        segment.leave()
    return segment


def time_of(action: Callable[[], object]) -> float:
    begin_s = time.monotonic()
    action()
    return time.monotonic() - begin_s


# --- joining and leaving ------------------------------------------------------------------------------------------


def test_a_process_alone_sees_itself_and_leaves_nothing(tmp_path: Path) -> None:
    segment = join_at(tmp_path, job=5, lease_s=2.5)
    assert [(m.slot, m.job, m.joined_at, m.returned, m.lease_s) for m in segment.members()] == [
        (segment.slot, 5, 0, 0, 2.5)
    ]
    segment.draw_turn()
    segment.leave()
    assert files(tmp_path) == []


def test_a_slot_is_used_again_with_another_incarnation(join: Join) -> None:
    staying, leaving = join(job=1), join(job=2)
    before = member(staying, 2)
    leaving.publish_returned(9)
    leaving.leave()
    join(job=2)
    after = member(staying, 2)
    assert after.slot == before.slot
    assert after.incarnation != before.incarnation
    assert after.returned == 0, "what the earlier owner gave back is not the new owner's"


def test_files_and_directory_are_private(join: Join, tmp_path: Path) -> None:
    join().draw_turn()
    assert stat.S_IMODE(home(tmp_path).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home(tmp_path).iterdir()} == {0o600}
    assert [name.rsplit(".", 1)[1] for name in files(tmp_path)] == ["bell", "log", "turns"]


def test_groups_and_devices_do_not_meet(join: Join) -> None:
    segments = [join(), join(group="others"), join(device="dev1")]
    assert all(len(segment.members()) == 1 for segment in segments)


def test_the_last_one_of_a_group_leaves_the_files_of_other_groups(join: Join) -> None:
    one = join(group="jobs")
    other = join(group="jobs.turns")  # as like as a name can be
    one.leave()
    assert os.path.exists(other.path)
    assert len(other.members()) == 1
    assert other.draw_turn() == 1


def test_more_processes_than_slots_are_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_segment, "_SLOT_PATIENCE_S", 0.2)  # nobody removes the files
    lock = turn_segment.lock_slots
    monkeypatch.setattr(turn_segment, "lock_slots", lambda fd, slot, *how: slot < 8 and lock(fd, slot, *how))
    for _ in range(8):
        join()
    with pytest.raises(
        SegmentError, match=r"expected a free slot, got all 253 taken in .*; use another group"
    ):
        join()


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a\n", "ä", "x" * 65, "a\0"])
def test_invalid_group_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a group name of 1-64 letters"):
        TurnSegment(name, DEVICE, base=str(tmp_path))
    assert files(tmp_path) == []


# --- bells --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "ring",
    [
        lambda join, giving, waiting: giving.publish_returned(3),
        lambda join, giving, waiting: waiting.bells.ring_own(),
        # Who waits may have taken the new owner of a slot for the old one.
        lambda join, giving, waiting: join(job=3),
    ],
)
def test_a_bell_ends_a_wait_rung_before_it_or_meanwhile(
    ring: Callable[..., object], before: bool, join: Join
) -> None:
    giving, waiting = join(job=1), join(job=2)
    waiting.wait([], 0.0)
    watched = [member(waiting, 1)]
    timer = threading.Timer(0.0 if before else 0.1, ring, [join, giving, waiting])
    timer.start()
    if before:
        timer.join()
    elapsed_s = time_of(lambda: waiting.wait(watched, 300.0))
    timer.join()
    assert (0.0 if before else 0.05) < elapsed_s < AT_ONCE_S


def test_a_full_bell_blocks_nobody(join: Join) -> None:
    giving, deaf = join(job=1), join(job=2)
    bell = giving.bells._reader((deaf.slot, member(giving, 2).incarnation))
    assert bell is not None
    with pytest.raises(BlockingIOError):
        while True:
            os.write(bell, b"\0" * 4096)
    giving.publish_returned(1)
    assert member(deaf, 1).returned == 1


# --- death --------------------------------------------------------------------------------------------------------


def test_death_of_a_sibling_ends_the_wait_at_once(join: Join, tmp_path: Path) -> None:
    waiting = join(job=1)
    with Process(tmp_path, job=2) as sibling:
        waiting.wait([], 0.0)  # its joining rang
        timer = threading.Timer(0.2, sibling.kill)
        timer.start()
        assert 0.1 < time_of(lambda: waiting.wait([member(waiting, 2)], 300.0)) < 0.2 + AT_ONCE_S
        timer.join()
        assert jobs(waiting) == [1]


def test_the_slot_of_a_dead_process_is_used_again(join: Join, tmp_path: Path) -> None:
    staying = join(job=1)
    with Process(tmp_path, job=2) as sibling:
        sibling.call("publish_returned", 9)
        sibling.kill()
    following = join_slot(join, sibling.slot, job=3)
    assert following.slot == sibling.slot
    assert jobs(staying) == [1, 3]
    assert member(staying, 3).returned == 0


def test_a_forked_child_leaves_the_slot_of_its_living_parent_alone(join: Join) -> None:
    segment = join(job=1)
    watching = join(job=2)
    child = os.fork()
    if child == 0:
        segment.leave()
        os._exit(0)
    os.waitpid(child, 0)
    assert jobs(watching) == [1, 2]
    segment.publish_returned(4)
    assert member(watching, 1).returned == 4


# --- the log --------------------------------------------------------------------------------------------------------


def test_siblings_see_each_other_and_their_turns_are_numbered_by_places_in_the_log(join: Join) -> None:
    first, second = join(job=1), join(job=2)
    assert [first.draw_turn(), second.draw_turn(), second.draw_turn(), first.draw_turn()] == [1, 2, 3, 4]
    assert first.read_log(0, 4) == bytes([first.slot, second.slot, second.slot, first.slot])
    assert first.read_log(1, 3) == bytes([second.slot] * 2)
    third = join(job=3)
    assert member(third, 3).joined_at == 4
    assert len({each.slot for each in (first, second, third)}) == 3
    assert jobs(first) == jobs(second) == jobs(third) == [1, 2, 3]


# --- joining races with leaving -----------------------------------------------------------------------------------


def _come_and_go(orders: "Connection[Any, Any]", base: str, job: int, rounds: int) -> None:
    try:
        for _ in range(rounds):
            segment = join_at(base, job=job)
            turn = segment.draw_turn()
            # A log that another one has removed and made anew would not hold what was drawn.
            assert segment.read_log(turn - 1, turn) == bytes([segment.slot])
            assert segment.drawn() >= turn
            assert job in jobs(segment)
            assert segment.is_current()
            segment.leave()
        orders.send("")
    except BaseException as error:
        orders.send(f"{type(error).__name__}: {error}")


def test_joining_races_with_the_last_one_leaving(tmp_path: Path) -> None:
    pipes = [context.Pipe() for _ in range(4)]
    processes = [
        context.Process(target=_come_and_go, args=(theirs, str(tmp_path), job, 150))
        for job, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    problems = [orders.recv() for orders, _ in pipes]
    for process in processes:
        process.join(60.0)
    assert problems == [""] * len(pipes)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("user", "uid_map", "outside"),
    [
        (0, "         0          0 4294967295\n", 0),
        (0, "0 1000 1\n", 1000),
        (0, "0 1000 1\n1 100000 65536\n", 1000),
        (33, "0 1000 1\n1 100000 65536\n", 100032),
        (65534, "0 1000 1\n", 65534),
        (5, "", 5),
    ],
)
def test_users_of_containers_are_known_by_their_number_outside(user: int, uid_map: str, outside: int) -> None:
    assert outer_user(user, uid_map) == outside
