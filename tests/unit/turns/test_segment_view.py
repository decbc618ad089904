"""Looking at segments from outside: what is seen, that nobody notices, and that nothing makes it raise."""

import contextlib
import fcntl
import json
import os
import re
import select
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover_ddp._turns import view as segment_view
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp._turns.slots import FILE_BYTES, HEADER_BYTES, SLOT_BYTES, SLOT_COUNT, Slot
from crossover_ddp._turns.view import Liveness, LogEnd, Look, Segment, look, printable, sweep
from crossover_ddp.cli.status import rows
from tests.unit.turns.joined_segments import DEVICE, Join, Process, files, home, jobs, join_at, joining

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    with joining(tmp_path) as join:
        yield join


def only(seen: Look) -> Segment:
    (segment,) = seen.segments
    return segment


def problems(base: Path) -> list[str]:
    return [problem.what for problem in look(str(base)).problems]


# --- what is seen --------------------------------------------------------------------------------------------------


def test_nothing_is_seen_and_nothing_made_where_nobody_has_joined(tmp_path: Path) -> None:
    seen = look(str(tmp_path))
    assert (seen.segments, seen.problems) == ((), ())
    assert list(tmp_path.iterdir()) == []


def test_no_shared_memory_is_a_problem_told(tmp_path: Path) -> None:
    assert "expected Linux with" in problems(tmp_path / "missing")[0]


def test_slots_and_log_are_seen_as_they_were_published(join: Join, tmp_path: Path) -> None:
    first, second = join(job=10, lease_s=2.5), join(job=11)
    assert first.draw_turn() == 1
    first.publish_started(1)
    segment = only(look(str(tmp_path)))
    assert (segment.group, segment.device, segment.path) == ("jobs", DEVICE, first.path)
    assert segment.held
    assert segment.log == LogEnd(1, bytes([first.slot]))
    place = segment.places[0]
    assert (place.job, place.started, place.returned, place.lease_s) == (10, 1, 0, 2.5)
    assert (place.pid, place.rank, place.world_size) == (os.getpid(), 0, 1)
    assert [place.liveness for place in segment.places] == [Liveness.ALIVE] * 2
    second.leave()
    assert [place.job for place in only(look(str(tmp_path))).places] == [10]


def test_groups_and_devices_are_told_apart(join: Join, tmp_path: Path) -> None:
    join(group="a")
    join(group="a", device="dev1")
    join(group="a.b-c")
    seen = look(str(tmp_path))
    assert [(found.group, found.device) for found in seen.segments if found.group == "a.b-c"] == [
        ("a.b-c", DEVICE)
    ]
    assert {found.device for found in look(str(tmp_path), group="a").segments} == {DEVICE, "dev1"}
    assert look(str(tmp_path), group="none").segments == ()


def test_a_killed_process_is_gone_and_a_living_one_is_not(join: Join, tmp_path: Path) -> None:
    join(job=1)
    with Process(tmp_path, job=2) as sibling:
        assert {place.liveness for place in only(look(str(tmp_path))).places} == {Liveness.ALIVE}
        sibling.kill()
    found = {place.job: place.liveness for place in only(look(str(tmp_path))).places}
    assert found == {1: Liveness.ALIVE, 2: Liveness.GONE}


def test_a_segment_of_the_dead_is_held_by_nobody(tmp_path: Path) -> None:
    with Process(tmp_path, job=2) as sibling:
        assert only(look(str(tmp_path))).held
        sibling.kill()
    assert not only(look(str(tmp_path))).held


def test_a_process_whose_bell_is_no_more_is_deaf(join: Join, tmp_path: Path) -> None:
    segment = join(job=1)
    bell = Path(segment.path.removesuffix(".turns") + f".{segment.slot}.bell")
    bell.unlink()
    assert [place.liveness for place in only(look(str(tmp_path))).places] == [Liveness.DEAF]
    assert jobs(join(job=2)) == [2], "its siblings judge alike"
    bell.write_bytes(b"")
    assert only(look(str(tmp_path))).places[0].liveness is Liveness.DEAF


def test_a_slot_left_while_it_is_looked_at_is_no_dead_one(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(job=1)
    leaving = join(job=2)
    tested = segment_view._Reader._has_reader

    def leave_first(self: Any, bell: str) -> bool:
        leaving.leave()
        return tested(self, bell)

    monkeypatch.setattr(segment_view._Reader, "_has_reader", leave_first)
    assert [place.job for place in only(look(str(tmp_path))).places] == [1]


def test_only_the_end_of_a_long_log_is_read(join: Join, tmp_path: Path) -> None:
    segment = join()
    segment.draw_turn()
    numel = 5 * segment_view.LOG_WINDOW_BYTES
    os.truncate(segment.path.replace(".turns", ".log"), numel)
    log = only(look(str(tmp_path))).log
    assert log is not None
    assert (log.numel, len(log.records)) == (numel, segment_view.LOG_WINDOW_BYTES)
    assert only(look(str(tmp_path), with_log=False)).log is None


@pytest.mark.parametrize(
    ("records", "slot", "expected"), [(b"\1\2\1", 1, 10), (b"\1\2\1", 2, 9), (b"\1\2\1", 3, 0), (b"", 0, 0)]
)
def test_the_last_turn_of_a_slot_is_its_place_in_the_log(records: bytes, slot: int, expected: int) -> None:
    assert LogEnd(10, records).last_turn(slot) == expected


@pytest.mark.parametrize(
    ("since", "expected"), [(10, b""), (9, b"c"), (7, b"abc"), (6, None), (11, None), (0, None)]
)
def test_records_since_are_known_within_the_window(since: int, expected: bytes | None) -> None:
    assert LogEnd(10, b"abc").drawn_since(since) == expected


# --- nobody notices: see [Note: looking] ---------------------------------------------------------------------------


def _state(base: Path) -> list[tuple[object, ...]]:
    return [
        (path.name, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        for path in sorted([base, *base.rglob("*")])
        for found in [path.lstat()]
    ]


def _locks(path: str) -> list[str]:
    """List the kernel's locks on a file, without the numbers of lines."""
    inode = f":{os.stat(path).st_ino} "
    return sorted(
        line.partition(": ")[2] for line in Path("/proc/locks").read_text().splitlines() if inode in line
    )


def test_looking_writes_nothing_and_takes_no_lock(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, _ = join(job=1), join(job=2)
    holder.draw_turn()
    with Process(tmp_path, job=3) as dead:
        dead.kill()
    before, locks = _state(tmp_path), _locks(holder.path)
    assert len(locks) == 2, "the kernel's table shows the locks of both"
    asked, locks_while = fcntl.fcntl, []

    def ask(fd: int, command: int, argument: bytes = b"") -> Any:
        assert command == fcntl.F_OFD_GETLK
        answer = asked(fd, command, argument)
        locks_while.append(_locks(holder.path))
        return answer

    monkeypatch.setattr(fcntl, "fcntl", ask)
    opened = os.open

    def open_for_looking(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        assert not flags & (os.O_CREAT | os.O_TRUNC | os.O_RDWR)
        assert not flags & os.O_WRONLY or str(path).endswith(".bell")
        return opened(path, flags, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_for_looking)
        for name in ("write", "pwrite", "mkdir", "mkfifo", "unlink", "link", "rename", "rmdir", "truncate"):
            patched.setattr(os, name, lambda *_, _name=name, **__: pytest.fail(f"{_name} while looking"))
        seen = look(str(tmp_path))
    assert len(only(seen).places) == 3
    assert locks_while
    assert all(found == locks for found in locks_while)
    assert (_state(tmp_path), _locks(holder.path)) == (before, locks)


def test_looking_rings_no_bell_and_wakes_nobody(join: Join, tmp_path: Path) -> None:
    first, second = join(job=1), join(job=2)
    first.wait([], 0.0)  # the second one's joining rang
    watch = select.poll()
    for fd in (first.bells.own_fd, second.bells.own_fd):
        watch.register(fd, select.POLLIN)
    bell = second.bells._reader((first.slot, next(m.incarnation for m in second.members() if m.job == 1)))
    assert bell is not None
    watch.register(bell, 0)
    for _ in range(50):
        look(str(tmp_path))
        assert watch.poll(0) == []


def test_looking_never_makes_a_slot_seem_taken_or_keeps_files(tmp_path: Path) -> None:
    ended = threading.Event()

    def looking() -> None:
        while not ended.is_set():
            look(str(tmp_path))

    thread = threading.Thread(target=looking)
    thread.start()
    try:
        for _ in range(300):
            segment = join_at(tmp_path)
            assert segment.slot == 0
            segment.leave()
            assert not os.path.exists(segment.path)
    finally:
        ended.set()
        thread.join()


def test_looking_leaves_no_file_open(join: Join, tmp_path: Path) -> None:
    join().draw_turn()
    (home(tmp_path) / "foreign").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        look(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


# --- what others have put there ------------------------------------------------------------------------------------


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


def _flip(path: Path, offset: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 0xFF
    path.write_bytes(contents)


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (_link, "expected a file, got another kind"),
        (_fifo, "expected a file, got another kind"),
        (_folder, "expected a file, got another kind"),
        (lambda path: path.chmod(0o644), "expected .* to be private, got mode 0644"),
        (lambda path: os.truncate(path, FILE_BYTES - 1), "expected a segment of .* bytes, got"),
        (lambda path: os.truncate(path, 0), "expected a segment of .* bytes, got 0"),
        (lambda path: os.truncate(path, 1 << 40), "expected a segment of .* bytes, got"),
        (lambda path: _flip(path, 0), "expected layout 8"),
        (lambda path: _flip(path, 8), "expected layout 8"),
        pytest.param(lambda path: os.chown(path, NOBODY, -1), "to belong to user", marks=needs_root),
    ],
)
def test_what_is_no_segment_is_told_as_a_problem(
    meddle: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    segment = join_at(tmp_path)
    segment.forget()
    path = Path(segment.path)
    meddle(path)
    seen = look(str(tmp_path))
    assert seen.segments == ()
    found = {problem.path: problem.what for problem in seen.problems}
    assert re.search(message, found[str(path)])
    before = _state(tmp_path)
    assert sweep(str(tmp_path)) == []
    assert _state(tmp_path) == before, "what is no segment is not swept"


@pytest.mark.parametrize(
    "meddle",
    [
        lambda path: path.symlink_to("/tmp"),
        lambda path: path.write_bytes(b"x"),
        lambda path: path.mkdir(0o755),
    ],
)
def test_a_directory_that_is_not_ours_is_told(meddle: Callable[[Path], object], tmp_path: Path) -> None:
    meddle(home(tmp_path))
    assert len(problems(tmp_path)) == 1
    assert sweep(str(tmp_path)) == []


def test_files_that_belong_to_nothing_are_told(join: Join, tmp_path: Path) -> None:
    join(group="jobs")
    (home(tmp_path) / "a\nb\x1b[31m\udcff").write_bytes(b"")
    (home(tmp_path) / "lost@.log").write_bytes(b"\0")
    (home(tmp_path) / "lost@.3.bell").write_bytes(b"")
    seen = look(str(tmp_path))
    assert len(seen.segments) == 1
    assert sorted(problem.what.split(";")[0] for problem in seen.problems) == [
        "left over without its slots",
        "left over without its slots",
        "not a file of turns",
    ]
    assert all(problem.path.isprintable() for problem in seen.problems)
    assert look(str(tmp_path), group="jobs").problems == ()


def test_any_number_of_problems_is_bounded(tmp_path: Path) -> None:
    home(tmp_path).mkdir(0o700)
    for index in range(300):
        (home(tmp_path) / f"foreign{index}").write_bytes(b"")
    found = problems(tmp_path)
    assert len(found) == 101
    assert found[-1] == "200 more files that are no segments"


def test_files_may_vanish_between_listing_and_opening(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join()
    ghosts = ["ghost@.turns", "ghost@.log", "spook@.0.bell"]
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: [*listed(fd), *ghosts])
    seen = look(str(tmp_path))
    assert (len(seen.segments), seen.problems) == (1, ())


def test_a_log_that_is_no_file_costs_the_log_alone(join: Join, tmp_path: Path) -> None:
    segment = join()
    os.mkfifo(segment.path.replace(".turns", ".log"), 0o600)
    seen = look(str(tmp_path))
    assert only(seen).log is None
    assert len(seen.problems) == 1


def test_a_name_is_made_fit_for_a_terminal() -> None:
    assert (
        printable("GPU-1 ä\x1b[2J\n\udcff")
        == "GPU-1 ä\N{REPLACEMENT CHARACTER}[2J" + 2 * "\N{REPLACEMENT CHARACTER}"
    )


# --- arbitrary bytes -----------------------------------------------------------------------------------------------

_PATCHES = st.lists(st.tuples(st.integers(0, FILE_BYTES - 1), st.binary(min_size=1, max_size=64)), max_size=8)
_NUMBERS = st.integers(0, 2**64 - 1)
_SLOTS = st.lists(
    st.tuples(st.integers(0, SLOT_COUNT - 1), st.lists(_NUMBERS, min_size=8, max_size=8), st.floats()),
    max_size=6,
)


def _scribble(contents: bytearray, slots: list[tuple[int, list[int], float]]) -> None:
    """Write slots that say they are in use, with numbers that no job writes."""
    for index, numbers, lease_s in slots:
        slot = Slot(
            1,
            *numbers[1:8],
            numbers[0],
            lease_s,
            -lease_s,
            0xFFFFFFFF,
            0,
            numbers[0] & 0xFFFFFFFF,
            7,
        )
        start = HEADER_BYTES + index * SLOT_BYTES
        contents[start : start + SLOT_BYTES] = bytes(slot)


def _show(looks: list[Look]) -> str:
    """Carry looks all the way to the terminal."""
    return json.dumps([*rows(looks[0], looks[-1])])


@settings(
    max_examples=150,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(slots=_SLOTS, patches=_PATCHES, log=st.binary(max_size=300), later=st.binary(max_size=300))
def test_arbitrary_contents_never_raise(
    slots: list[tuple[int, list[int], float]],
    patches: list[tuple[int, bytes]],
    log: bytes,
    later: bytes,
    tmp_path: Path,
) -> None:
    with contextlib.closing(_Living(tmp_path)) as living:
        path = Path(living.segment.path)
        log_path = path.with_suffix(".log")
        log_path.write_bytes(log)
        log_path.chmod(0o600)
        before = look(str(tmp_path))
        contents = bytearray(path.read_bytes())
        _scribble(contents, slots)
        for offset, patch in patches:
            contents[offset : offset + len(patch)] = patch
        path.write_bytes(contents[:FILE_BYTES])
        log_path.write_bytes(later)
        between = look(str(tmp_path), with_log=False)
        _show([before, *[between] * 5, look(str(tmp_path))])


class _Living:
    """A segment with one living slot, whatever is written over it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.segment = join_at(base)

    def close(self) -> None:
        self.segment.forget()
        for path in home(self.base).iterdir():
            path.unlink()
        home(self.base).rmdir()


@settings(max_examples=60, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.binary(max_size=FILE_BYTES + 10),
    name=st.text("ab0.-_/ \n\0é\ud800", max_size=40),
    log=st.binary(max_size=50),
)
def test_arbitrary_files_never_raise(contents: bytes, name: str, log: bytes, tmp_path: Path) -> None:
    home(tmp_path).mkdir(0o700, exist_ok=True)
    stem = "jobs@"
    for each, written in ((f"{stem}.turns", contents), (f"{stem}.log", log), (name, b"")):
        with contextlib.suppress(OSError, ValueError, UnicodeError):  # not every text names a file
            descriptor = os.open(home(tmp_path) / each, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(descriptor, written)
            os.close(descriptor)
    _show([look(str(tmp_path))])


# --- sweeping ------------------------------------------------------------------------------------------------------


def test_what_dead_jobs_have_left_is_swept_and_the_living_stay(join: Join, tmp_path: Path) -> None:
    with Process(tmp_path, job=2) as sibling:
        sibling.call("draw_turn")
        dead = only(look(str(tmp_path))).path
        sibling.kill()
    living = join(group="others")
    assert sweep(str(tmp_path)) == [dead]
    assert [name for name in files(tmp_path) if name.startswith("jobs")] == []
    assert [found.group for found in look(str(tmp_path)).segments] == ["others"]
    assert living.draw_turn() == 1
    assert sweep(str(tmp_path)) == []


def test_the_directory_is_swept_with_its_last_segment(tmp_path: Path) -> None:
    join_at(tmp_path).forget()
    assert len(sweep(str(tmp_path))) == 1
    assert list(tmp_path.iterdir()) == []
    assert sweep(str(tmp_path)) == []


def test_a_segment_joined_after_it_was_looked_at_is_not_swept(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join()
    seen = look(str(tmp_path))
    unheld = seen._replace(segments=(only(seen)._replace(held=False),))
    monkeypatch.setattr(segment_view, "look", lambda *_, **__: unheld)
    before = _state(tmp_path)
    assert sweep(str(tmp_path)) == []
    assert _state(tmp_path) == before


def test_sweeping_races_with_joining(tmp_path: Path) -> None:
    ended = threading.Event()
    swept: list[str] = []

    def sweeping() -> None:
        while not ended.is_set():
            swept.extend(sweep(str(tmp_path)))

    thread = threading.Thread(target=sweeping)
    thread.start()
    try:
        for job in range(200):
            segment: TurnSegment = join_at(tmp_path, job=job)
            assert segment.table.is_current()
            turn = segment.draw_turn()  # beyond 1 where the one before has not been swept yet
            assert segment.read_log(turn - 1, turn) == bytes([segment.slot])
            assert stat.S_ISREG(os.stat(segment.path).st_mode)
            segment.forget()  # as a process that is killed
    finally:
        ended.set()
        thread.join()
    assert swept
    sweep(str(tmp_path))
