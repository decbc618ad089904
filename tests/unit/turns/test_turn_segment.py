"""The home of turns in shared memory: slots, bells and the log.

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
from crossover_ddp._turns.segment import TurnSegment
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


# --- joining and leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["leave", "kill"])
def test_a_slot_is_used_again_with_another_incarnation(way: str, join: Join, tmp_path: Path) -> None:
    staying = join(job=1)
    with Process(tmp_path, job=2) as sibling:
        before = member(staying, 2)
        sibling.call("publish_returned", 9)
        getattr(sibling, way)()
    deadline_s = time.monotonic() + 2.0  # the kernel may drop a lock a moment after its owner's bell
    while (segment := join(job=3)).slot != sibling.slot and time.monotonic() < deadline_s:
        segment.leave()
    assert jobs(staying) == [1, 3]
    after = member(staying, 3)
    assert after.slot == before.slot
    assert after.incarnation != before.incarnation
    assert after.returned == 0, "what the earlier owner gave back is not the new owner's"


def test_files_and_directory_are_private(join: Join, tmp_path: Path) -> None:
    join().draw_turn()
    assert stat.S_IMODE(home(tmp_path).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home(tmp_path).iterdir()} == {0o600}
    assert [name.rsplit(".", 1)[1] for name in files(tmp_path)] == ["bell", "log", "turns"]


def test_groups_and_devices_do_not_meet_and_leave_each_other_alone(join: Join) -> None:
    one, other, device = join(), join(group="jobs.turns"), join(device="dev1")  # as like as a name can be
    assert [len(each.members()) for each in (one, other, device)] == [1, 1, 1]
    one.leave()
    device.leave()
    assert not os.path.exists(one.path)
    assert (len(other.members()), other.draw_turn()) == (1, 1)


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
    begin_s = time.monotonic()
    waiting.wait(watched, 300.0)
    assert (0.0 if before else 0.05) < time.monotonic() - begin_s < AT_ONCE_S
    timer.join()


def test_a_full_bell_blocks_nobody(join: Join) -> None:
    giving, deaf = join(job=1), join(job=2)
    bell = giving.bells._reader((deaf.slot, member(giving, 2).incarnation))
    assert bell is not None
    with pytest.raises(BlockingIOError):
        while True:
            os.write(bell, b"\0" * 4096)
    giving.publish_returned(1)
    assert member(deaf, 1).returned == 1


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
        (33, "0 1000 1\n1 100000 65536\n", 100032),
        (65534, "0 1000 1\n", 65534),
        (5, "", 5),
    ],
)
def test_users_of_containers_are_known_by_their_number_outside(user: int, uid_map: str, outside: int) -> None:
    assert outer_user(user, uid_map) == outside
