"""Turns in shared memory: slots, bells, forks, malformed files, and the view from outside."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover_ddp._system.shared_memory import outer_user
from crossover_ddp._turns import segment as segments
from crossover_ddp._turns import view as segment_view
from crossover_ddp._turns.rules import Member
from crossover_ddp._turns.segment import (
    FILE_BYTES,
    SLOT_BYTES,
    SLOT_COUNT,
    GroupFiles,
    SlotState,
    TurnSegment,
    no_fork,
)
from crossover_ddp._turns.view import look
from crossover_ddp.cli.status import rows
from crossover_ddp.errors import SegmentError
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.unit.turns.mutexes import DEVICE, Join, files, home, jobs, join_at, member, state

REST = SLOT_BYTES - 8  # of a slot behind its state
AT_ONCE_S = 60.0  # far less than the waits that must end, and enough on a busy machine
GAP_S = 0.3  # how long a gap is held open: far longer than a fork takes, also on a busy machine
NOBODY = 65534


def test_the_format_of_a_slot_is_pinned() -> None:
    """Jobs of other versions read it. After a change, change `SlotState.JOINED` and this test."""
    member = Member(
        slot=77,  # the slot's position, which is not stored
        job=0x0101,
        incarnation=0x0202,
        joined_at=0x0303,
        started=0x0404,
        returned=0x0505,
        lease_s=1.0,
        device=0x0606,
        trial=True,
        tried=0x0707,
        pairs=0x0808,
        turns_s=2.0,
        side_s=-2.0,
        lead=0x0909,
        returned_at_ns=0x0A0A,
        queued=0x0B0B,
        turns=0x0C0C,
        mode=4,
        rank=0x0D0D,
        world_size=0x0E0E,
        pid=0x0F0F,
        device_name=b"cpu",
    )
    integers = [
        *(0x0101, 0x0202, 0x0303, 0x0404, 0x0505),
        *(0x3FF0 << 48, 0x0606, 1, 0x0707, 0x0808),
        *(0x4000 << 48, 0xC000 << 48, 0x0909, 0x0A0A, 0x0B0B),
        *(0x0C0C, 4, 0x0D0D, 0x0E0E, 0x0F0F),
    ]
    numbers = b"".join(number.to_bytes(8, sys.byteorder) for number in integers)
    state = int.from_bytes(b"XDDPTU12", "little").to_bytes(8, sys.byteorder)
    assert segments.pack_slot(SlotState.JOINED, member) == state + numbers + b"cpu" + bytes(61)
    assert (SLOT_BYTES, FILE_BYTES) == (232, 253 * 232)


def test_each_field_is_published_and_read_at_its_offset(join: Join) -> None:
    segment = join()
    fields = {name: offset for name, (offset, code) in segments._SLOT_FORMAT.items()}
    numbers = [name for name in fields if name not in ("state", "device_name", "device", "job")]
    for value, name in enumerate(numbers, start=2):
        segment.publish(**{name: value})
        raw = Path(segment.path).read_bytes()
        code = "d" if name.endswith("_s") else "Q"
        assert struct.unpack_from(code, raw, fields[name]) == (value,)
    (found,) = look(str(Path(segment.path).parents[1])).processes
    assert [getattr(found.slot, name) for name in numbers] == [*range(2, 2 + len(numbers))]


def test_a_late_publication_goes_into_no_slot_that_was_given_up(join: Join) -> None:
    leaving = join(job=1)
    lock_slots = segments.lock_slots
    numbers = []

    def locked(fd: int, first: int, count: int, *how: int) -> bool:
        if how:  # this call unlocks the slots
            with contextlib.suppress(OSError):
                leaving.publish(returned=9)
            numbers.append(leaving.slot)
        return lock_slots(fd, first, count, *how)

    with mock.patch.object(segments, "lock_slots", locked):
        leaving.leave()
    assert numbers == [-1]


def test_a_slot_is_used_again_with_another_incarnation(join: Join) -> None:
    staying = join(job=1)
    used = []
    for job, end in enumerate((TurnSegment.forget, TurnSegment.leave, TurnSegment.leave), 2):
        segment = join(job=job)
        used.append(member(staying, job))
        segment.publish_returned(9)
        end(segment)
    assert jobs(staying) == [1]
    assert [len({each.slot for each in used}), len({each.incarnation for each in used})] == [1, 3]
    assert not any(each.returned for each in used), "an earlier owner's turns are not shown"


def test_groups_and_devices_do_not_meet_and_leave_each_other_alone(
    join: Join, tmp_path: Path
) -> None:
    one = join()
    other = join(group="jobs.turns")  # as similar as a name can be
    device = join(device="dev1")
    assert [len(each.members()) for each in (one, other, device)] == [1, 1, 1]
    one.leave()
    device.leave()
    assert not os.path.exists(one.path)
    assert (len(other.members()), other.draw_turn()) == (1, 1)
    # All files are private.
    assert [name.rsplit(".", 1)[1] for name in files(tmp_path)] == ["bell", "log", "turns"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in home(tmp_path).iterdir()} == {0o600}
    assert stat.S_IMODE(home(tmp_path).stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a\n", "ä", "x" * 65, "a\0"])
def test_invalid_group_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a group name of 1-64 letters"):
        TurnSegment(name, DEVICE, base=str(tmp_path))
    assert files(tmp_path) == []


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "ring",
    [
        lambda join, giving, waiting: giving.publish_returned(3),
        lambda join, giving, waiting: waiting.bells.ring_own(),
        # The waiting process may have taken the new owner of a slot for the old one.
        lambda join, giving, waiting: join(job=3),
    ],
)
def test_a_bell_ends_a_wait(ring: Callable[..., object], before: bool, join: Join) -> None:
    giving, waiting = join(job=1), join(job=2)
    waiting.bells.wait([], 0.0)
    watched = [member(waiting, 1).process]
    timer = threading.Timer(0.0 if before else 0.1, ring, [join, giving, waiting])
    timer.start()
    if before:
        timer.join()
    begin_s = time.monotonic()
    waiting.bells.wait(watched, 300.0)
    assert (0.0 if before else 0.05) < time.monotonic() - begin_s < AT_ONCE_S
    timer.join()


def test_ringing_a_full_bell_does_not_block(join: Join) -> None:
    giving = join(job=1)
    deaf = join(job=2)
    bell = giving.bells._open_for_writing(member(giving, 2).process)
    assert bell is not None
    with pytest.raises(BlockingIOError):
        while True:
            os.write(bell, b"\0" * 4096)
    giving.publish_returned(1)
    assert member(deaf, 1).returned == 1


@in_ranks(4)
def test_a_process_can_join_while_the_last_one_leaves(rank: int, tmp_path: Path) -> None:
    for _ in range(150 if IN_CAMPAIGN else 50):
        segment = join_at(tmp_path, job=rank)
        turn = segment.draw_turn()
        # If another process had removed the log and made a new one, the record would be missing.
        assert segment.read_log(turn - 1, turn) == bytes([segment.slot])
        assert segment.drawn() >= turn
        assert rank in jobs(segment)
        assert not segment.slots_file.is_removed()
        segment.leave()
    dist.barrier()
    assert files(tmp_path) == []


# --- groups whose processes have all ended without leaving --------------------------------------


def killed_in(base: Path, *, group: str, reserves: bool = False) -> None:
    """Kill a child process that has joined and drawn a turn, or has only reserved a slot."""
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        segment = TurnSegment(group, DEVICE, base=str(base))
        if reserves:
            segment.reserve()
        else:
            segment.join(Member(job=7, lead=5, world_size=1, lease_s=1.0))
            segment.draw_turn()
        os.write(writable, b"joined")
        signal.pause()
    os.read(readable, 6)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(readable)
    os.close(writable)


@pytest.mark.parametrize("reserves", [False, True])
def test_files_of_a_dead_group_are_removed_when_a_job_of_another_group_joins(
    join: Join, tmp_path: Path, reserves: bool
) -> None:
    killed_in(tmp_path, group="dead", reserves=reserves)
    assert "dead@.turns" in files(tmp_path)
    living = join(group="living")
    living.draw_turn()
    join(group="alive").leave()
    assert files(tmp_path) == ["living@.0.bell", "living@.log", "living@.turns"]
    assert living.members(), "nothing of a living group was removed"


def test_a_group_that_reserves_or_lives_keeps_its_files(join: Join, tmp_path: Path) -> None:
    living = join(group="living")
    reserving = TurnSegment("reserving", DEVICE, base=str(tmp_path))
    reserving.reserve()
    killed_in(tmp_path, group="living")  # one of the group's processes is dead
    join(group="other", job=3)
    assert not any(each.slots_file.is_removed() for each in (living, reserving))
    reserving.join(Member(job=4, lead=5, world_size=1, lease_s=1.0))
    assert (jobs(living), jobs(reserving)) == ([1], [4])
    reserving.leave()


def test_foreign_and_malformed_files_of_other_groups_stay(join: Join, tmp_path: Path) -> None:
    join(group="first").leave()
    directory = home(tmp_path)
    contents = {
        "a@.turns": b"x",
        "b@.turns": b"y" * SLOT_BYTES,
        "c.turns": b"",
        "@.turns": b"",
        "d@.log": b"z",
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    (directory / "link@.turns").symlink_to(directory / "c.turns")
    os.mkfifo(directory / "pipe@.turns")
    before = {*files(tmp_path)}
    join(group="second").leave()
    assert {*files(tmp_path)} == before


def test_a_job_that_is_just_joining_finds_its_siblings(join: Join, tmp_path: Path) -> None:
    """A job of another group removes the files after this job has opened them."""
    killed_in(tmp_path, group="jobs")
    late = TurnSegment("jobs", DEVICE, base=str(tmp_path))  # opens the files, locks no slot
    join(group="other")
    assert late.slots_file.is_removed()
    late.join(Member(job=2, lead=5, world_size=1, lease_s=1.0))
    sibling = join(group="jobs", job=3)
    assert jobs(late) == jobs(sibling) == [2, 3]
    late.leave()


@in_ranks(4)
def test_groups_that_come_and_go_keep_the_files_of_living_ones(rank: int, tmp_path: Path) -> None:
    """Two processes of each of two groups; one in five deaths is a kill."""
    group = "a" if rank % 2 else "b"
    for attempt in range(150 if IN_CAMPAIGN else 40):
        segment = join_at(tmp_path, job=rank, group=group)
        turn = segment.draw_turn()
        assert segment.read_log(turn - 1, turn) == bytes([segment.slot])
        assert rank in jobs(segment)
        assert not segment.slots_file.is_removed()
        if attempt % 5 == 0:
            segment.forget()  # like a kill: locks and bells are gone, files stay
        else:
            segment.leave()
    dist.barrier()
    if rank == 0:
        join_at(tmp_path, group="last").leave()
        assert files(tmp_path) == []
    dist.barrier()


def test_users_of_containers_are_known_by_their_number_outside() -> None:
    assert outer_user(0, "         0          0 4294967295\n") == 0
    assert outer_user(0, "0 1000 1\n") == 1000
    assert outer_user(33, "0 1000 1\n1 100000 65536\n") == 100032
    assert outer_user(65534, "0 1000 1\n") == 65534
    assert outer_user(5, "") == 5


def _held_by_fork(below: Path) -> int:
    """Fork. Return how many files of a directory the child has open."""
    if not (child := os.fork()):
        held = 99
        try:
            links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            held = sum(link.startswith(str(below)) for link in links)
        finally:
            os._exit(held)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("during", [".turns", ".bell", "leave", "forget"])
def test_a_child_forked_while_files_are_opened_or_closed_holds_none_of_them(
    during: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entered = threading.Event()
    joined: list[TurnSegment] = []
    opened = GroupFiles.open_file
    closed = os.close

    def gap() -> None:
        """Make the moment long, so that the fork falls into it."""
        if threading.current_thread() is thread and not entered.is_set():
            entered.set()
            time.sleep(GAP_S)

    def slow(self: GroupFiles, name: str, flags: int) -> int:
        fd = opened(self, name, flags)
        if name.endswith(during):
            gap()
        return fd

    if during.startswith("."):
        monkeypatch.setattr(GroupFiles, "open_file", slow)
        thread = threading.Thread(target=lambda: joined.append(join_at(tmp_path)))
    else:
        thread = threading.Thread(target=getattr(join_at(tmp_path), during))
        monkeypatch.setattr(os, "close", lambda fd: (gap(), closed(fd)))
    thread.start()
    assert entered.wait(60.0)
    assert _held_by_fork(tmp_path) == 0
    thread.join()
    for segment in joined:
        assert jobs(segment) == [1]
        segment.leave()
        assert files(tmp_path) == []


def test_a_thread_that_forks_in_its_own_gap_does_not_wait_for_itself(
    join: Join, tmp_path: Path
) -> None:
    """A signal handler or a finalizer may fork there."""
    segment, owned = join(job=1), cast(Any, no_fork)
    with no_fork:
        assert _held_by_fork(tmp_path) == 0
    assert not owned._is_owned()
    assert jobs(segment) == [1]


def test_a_file_that_does_not_open_is_named_with_the_remedy(tmp_path: Path) -> None:
    files = GroupFiles("jobs", str(tmp_path))
    remedies = {errno.EMFILE: "ulimit -n", errno.ENOSPC: "make room", errno.EACCES: "let this user"}
    for number, remedy in remedies.items():
        refused = mock.patch.object(
            segments.os, "open", side_effect=OSError(number, os.strerror(number))
        )
        message = (
            rf"expected a file of turns at .*jobs@\.log, got {os.strerror(number)}; .*{remedy}"
        )
        with refused, pytest.raises(SegmentError, match=message):
            files.open_file(".log", os.O_RDWR)
    files.close()


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    """The path of the slots of a process that has ended without leaving."""
    segment = join_at(tmp_path)
    segment.draw_turn()
    segment.forget()
    return Path(segment.path)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


OLD = b"XDDPTURN"  # as an earlier version wrote
SIZE = r"slots of \d+ bytes.*; remove it", "expected slots of"


@pytest.mark.parametrize(
    ("what", "meddle", "message", "problem"),
    [
        (".turns", lambda path: os.truncate(path, 100), *SIZE),
        (".turns", lambda path: os.truncate(path, 1 << 20), *SIZE),
        (
            ".turns",
            lambda path: path.write_bytes(OLD.ljust(path.stat().st_size)),
            "another version",
            "",
        ),
        (".turns", _link, "got a symbolic link; remove it", "symbolic links"),
        (
            ".turns",
            lambda path: (path.unlink(), path.mkdir(0o700)),
            "Is a directory; remove it",
            "directory",
        ),
        ("", lambda path: path.chmod(0o755), "got mode 0755; chmod 0700 it", ""),
        ("", _link, "a directory of this user, got .*; if it is a symbolic link or a file", ""),
        (
            "",
            lambda path: (path.rename(f"{path}-old"), path.touch(0o600)),
            "a directory of this user",
            "",
        ),
        # Only root can give files to another user.
        *[("", lambda path: os.chown(path, NOBODY, NOBODY), "got owner 65534", "")]
        * (os.geteuid() == 0),
    ],
)
def test_foreign_files_are_refused_by_name_shown_as_problems_and_not_changed(
    what: str,
    meddle: Callable[[Path], object],
    message: str,
    problem: str,
    leftover: Path,
    tmp_path: Path,
) -> None:
    path = leftover if what else leftover.parent
    meddle(path)
    before = state(tmp_path)
    with pytest.raises(SegmentError, match=message) as caught:
        TurnSegment("jobs", DEVICE, base=str(tmp_path))
    assert str(path) in str(caught.value)
    seen = look(str(tmp_path))
    assert seen.processes == seen.abandoned == ()
    assert any(problem in what for _, what in seen.problems)
    assert state(tmp_path) == before


def test_a_log_that_is_a_link_is_refused(leftover: Path, join: Join) -> None:
    segment = join()
    _link(leftover.with_suffix(".log"))
    with pytest.raises(SegmentError, match=r"@\.log, got a symbolic link"):
        segment.draw_turn()


def test_a_late_publication_goes_into_no_other_file(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor of a closed file is reused by the next file that the process opens."""
    segment = join()
    other = tmp_path / "a user's"
    write = os.pwrite
    opened: list[int] = []

    def leave() -> None:
        segment.forget()
        opened.extend(os.open(other, os.O_RDWR | os.O_CREAT) for _ in range(10))

    leaving = threading.Thread(target=leave)

    def late(fd: int, raw: bytes, place: int) -> int:
        leaving.start()
        leaving.join(GAP_S)
        return write(fd, raw, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", late)
        segment.publish(started=1)
    leaving.join()
    for fd in opened:
        os.close(fd)
    assert not other.stat().st_size
    with pytest.raises(OSError, match="Invalid argument"):  # the process has no slot
        segment.publish(started=2)


@pytest.mark.parametrize("suffix", ["turns", "log", "*.bell", "*"])
def test_a_member_notices_that_files_were_removed(suffix: str, join: Join, tmp_path: Path) -> None:
    """Else a job that joins later would make new ones, and neither would see the other."""
    segment = join()
    segment.draw_turn()
    for path in home(tmp_path).glob(f"*.{suffix}"):
        path.unlink()
    with pytest.raises(SegmentError, match="removed while jobs"):
        segment.members()
    following = join(job=2)
    segment.leave()
    assert jobs(following) == [2], "the first one removed files that are not its own"


def test_a_member_whose_slot_was_cut_off_notices_it(join: Join) -> None:
    """Siblings do not wait for it, and a process that joins later has a slot of its own."""
    first = join(job=1)
    second = join(job=2)
    os.truncate(first.path, SLOT_BYTES)
    assert jobs(first) == [1]
    third = join(job=3)
    assert (third.slot, jobs(first)) == (2, [1, 3])
    with pytest.raises(SegmentError, match="or cut short; where logind"):
        second.members()


@pytest.mark.parametrize("kept", [0, 2])
def test_no_turn_is_drawn_from_a_log_that_was_cut_short(kept: int, join: Join) -> None:
    """Its number would be one of an earlier turn, for which no sibling waits."""
    first = join(job=1)
    for _ in range(5):
        first.draw_turn()
    late = join(job=2)
    os.truncate(first.path.removesuffix(".turns") + ".log", kept)
    for segment in (late, first):
        with pytest.raises(SegmentError, match=r"cut short while .* after turn 5; start"):
            segment.draw_turn()


def test_a_process_that_leaves_while_the_view_reads_is_not_shown(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(job=1)
    leaving = join(job=2)
    slots_are_locked = segment_view.slots_are_locked
    listed = os.listdir

    def leave_and_test(*arguments: int) -> bool:
        leaving.leave()
        return slots_are_locked(*arguments)

    monkeypatch.setattr(segment_view, "slots_are_locked", leave_and_test)
    monkeypatch.setattr(os, "listdir", lambda fd: [*listed(fd), "ghost@.turns"])
    seen = look(str(tmp_path))
    assert ([each.slot.job for each in seen.processes], seen.abandoned, seen.problems) == (
        [1],
        (),
        (),
    )


def test_the_view_writes_nothing_takes_no_lock_and_leaves_no_file_open(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(job=1)
    join(job=2).draw_turn()
    before, descriptors, asked = state(tmp_path), len(os.listdir("/proc/self/fd")), fcntl.fcntl

    def ask(fd: int, command: int, argument: bytes = b"") -> Any:
        assert command == fcntl.F_OFD_GETLK
        return asked(fd, command, argument)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", ask)
        assert [each.slot.job for each in look(str(tmp_path)).processes] == [1, 2]
    assert (state(tmp_path), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


def test_a_pipe_in_place_of_slots_is_shown_as_a_problem(leftover: Path, tmp_path: Path) -> None:
    """Files with other names: tests/unit/cli/test_doctor.py."""
    leftover.unlink()
    os.mkfifo(leftover, 0o600)
    seen = look(str(tmp_path))
    assert seen.processes == seen.abandoned == ()
    assert any("seek" in what for _, what in seen.problems)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        st.integers(0, SLOT_COUNT - 1), st.binary(min_size=REST, max_size=REST), max_size=6
    ),
    st.integers(0, 2 * FILE_BYTES),
)
def test_arbitrary_contents_never_raise(tmp_path: Path, slots: dict[int, bytes], cut: int) -> None:
    """Neither in `look` nor in the table of `crossover-ddp status`."""
    home(tmp_path).mkdir(0o700, exist_ok=True)
    raw = bytearray(FILE_BYTES)
    for index, rest in slots.items():
        raw[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = (
            SlotState.JOINED.to_bytes(8, "little") + rest
        )
    (home(tmp_path) / "jobs@.turns").write_bytes(raw[:cut])
    seen = look(str(tmp_path))
    found = json.dumps([*rows(seen, seen)])
    if cut >= FILE_BYTES:
        assert found.count("gone") >= bool(slots)
