"""Whatever others have put where a segment should be is refused by name and stays as it is."""

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover_ddp._turns import segment as turn_segment
from crossover_ddp._turns.rules import DEFAULT_LEASE_S
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp._turns.slot_table import slot_offset
from crossover_ddp._turns.slots import HEADER_BYTES, SLOT_BYTES, SLOT_COUNT, Slot
from crossover_ddp.errors import SegmentError
from tests.unit.turns.joined_segments import DEVICE, Join, Process, files, home, jobs, join_at, joining

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    with joining(tmp_path) as join:
        yield join


# --- what others have put there --------------------------------------------------------------------------------------


class Left:
    """A file that must stay as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = self._state()

    def _state(self) -> tuple[object, ...]:
        found = self.path.lstat()
        contents = self.path.read_bytes() if stat.S_ISREG(found.st_mode) else b""
        return (
            found.st_ino,
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_size,
            found.st_mtime_ns,
            contents,
        )

    def is_untouched(self) -> bool:
        return self._state() == self.before


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    """The file of a process that has ended without leaving."""
    segment = join_at(tmp_path)
    segment.draw_turn()
    path = Path(segment.path)
    segment.forget()
    return path


def _foreign(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def _permissive(path: Path) -> None:
    path.chmod(0o644)


def _truncated(path: Path) -> None:
    os.truncate(path, 100)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lengthened(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def _garbage(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(64))


def _other_layout(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(8, sys.byteorder))


def _symbolic_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


MEDDLINGS = [
    pytest.param(_foreign, "got owner 65534; .* left alone", marks=needs_root),
    (_permissive, "got mode 0644; chmod 0600 it or remove it"),
    (_truncated, r"expected a segment of \d+ bytes, got 100 .*; remove it"),
    (_empty, r"expected a segment of \d+ bytes, got 0 .*; remove it"),
    (_lengthened, r"expected a segment of \d+ bytes, got \d+ .*; remove it"),
    (_garbage, "got something else .*; remove it"),
    (_other_layout, "expected layout 8 .*, got something else .*; *remove it"),
    (_symbolic_link, "got a symbolic link .*; remove it"),
    (_directory, "got Is a directory .*; remove it"),
    (_fifo, "another kind of file .*; remove it"),
]


@pytest.mark.parametrize(("meddle", "message"), MEDDLINGS)
def test_a_segment_that_is_not_ours_is_refused_and_stays_as_it_is(
    meddle: Callable[[Path], None], message: str, leftover: Path, tmp_path: Path
) -> None:
    meddle(leftover)
    left = [Left(path) for path in home(tmp_path).iterdir()]
    with pytest.raises(SegmentError, match=message) as caught:
        TurnSegment("jobs", DEVICE, base=str(tmp_path))
    assert str(leftover) in str(caught.value)
    assert all(each.is_untouched() for each in left)
    assert len(left) == len(list(home(tmp_path).iterdir()))


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        pytest.param(_foreign, "got owner 65534", marks=needs_root),
        (lambda path: path.chmod(0o755), "got mode 0755; chmod 0700 it"),
        (
            _symbolic_link,
            "to be a directory of this user, got .*; if it is a symbolic link or a file, remove it",
        ),
        (
            lambda path: (path.rename(path.with_name("elsewhere")), path.touch(0o600)),
            "to be a directory of this user",
        ),
    ],
)
def test_a_directory_that_is_not_ours_is_refused_and_stays_as_it_is(
    meddle: Callable[[Path], object], message: str, leftover: Path, tmp_path: Path
) -> None:
    meddle(leftover.parent)
    left = [Left(path) for path in tmp_path.rglob("*")]
    with pytest.raises(SegmentError, match=message) as caught:
        TurnSegment("jobs", DEVICE, base=str(tmp_path))
    assert str(home(tmp_path)) in str(caught.value)
    assert all(each.is_untouched() for each in left)
    assert len(left) == len(list(tmp_path.rglob("*")))


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        pytest.param(_foreign, "got owner 65534", marks=needs_root),
        (_permissive, "got mode 0644"),
        (_symbolic_link, "got a symbolic link"),
        (_fifo, "another kind of file"),
    ],
)
def test_a_log_that_is_not_ours_is_refused_and_stays_as_it_is(
    meddle: Callable[[Path], None], message: str, leftover: Path, join: Join, tmp_path: Path
) -> None:
    log = leftover.with_suffix(".log")
    segment = join()
    meddle(log)
    left = Left(log)
    with pytest.raises(SegmentError, match=message) as caught:
        segment.draw_turn()
    assert str(log) in str(caught.value)
    assert left.is_untouched()


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        pytest.param(_foreign, "got owner 65534", marks=needs_root),
        (_permissive, "got mode 0644"),
        (_symbolic_link, "got a symbolic link"),
        (lambda path: (path.unlink(), path.touch(0o600)), "another kind of file"),
    ],
)
def test_a_bell_that_is_not_ours_is_refused_and_stays_as_it_is(
    meddle: Callable[[Path], object], message: str, join: Join, tmp_path: Path
) -> None:
    with Process(tmp_path, job=2) as sibling:
        bell = next(home(tmp_path).glob(f"*.{sibling.slot}.bell"))
        meddle(bell)
        left = Left(bell)
        segment = TurnSegment("jobs", DEVICE, base=str(tmp_path))
        with pytest.raises(SegmentError, match=message) as caught:
            segment.slots()
        assert str(bell) in str(caught.value)
        assert left.is_untouched()
        segment.forget()


def test_without_shared_memory_there_are_no_turns(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=r"expected Linux with .*/none"):
        TurnSegment("jobs", DEVICE, base=str(tmp_path / "none"))


@needs_root
def test_full_shared_memory_is_told(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k,mode=1777", "crossover-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        (tmp_path / "bulk").write_bytes(b"x" * 4096)
        with pytest.raises(SegmentError, match=r"cannot make .*jobs.*: No space left on device; free some"):
            join_at(tmp_path)
        assert files(tmp_path) == ["bulk"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- under way -------------------------------------------------------------------------------------------------------


def test_a_segment_cut_short_under_way_raises_and_is_left_in_good_order(tmp_path: Path) -> None:
    segment = join_at(tmp_path)
    os.truncate(segment.path, 1000)
    with pytest.raises(SegmentError, match="cut short under way"):
        segment.members()
    with pytest.raises(SegmentError, match="cut short under way"):
        segment.publish_returned(1)
    descriptors = len(os.listdir("/proc/self/fd"))
    segment.leave()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3, "slots, bell, directory"
    assert list(tmp_path.iterdir()) == []


def test_files_removed_under_way_are_noticed(tmp_path: Path) -> None:
    """Or a job that comes later would make new ones, and neither would see the other."""
    segment = join_at(tmp_path)
    segment.draw_turn()
    for path in home(tmp_path).iterdir():
        path.unlink()
    home(tmp_path).rmdir()
    with pytest.raises(SegmentError, match="removed under way"):
        segment.members()
    with pytest.raises(SegmentError, match="removed under way"):
        segment.draw_turn()
    following = join_at(tmp_path, job=2)
    segment.leave()
    assert jobs(following) == [2]
    assert os.path.exists(following.path), "the first one's leaving does not touch what is not its own"
    following.leave()


def test_a_log_cut_short_under_way_raises(join: Join) -> None:
    segment = join()
    for _ in range(5):
        segment.draw_turn()
    os.truncate(segment.path.removesuffix(".turns") + ".log", 2)
    with pytest.raises(SegmentError, match="cut short under way"):
        segment.read_log(0, 5)


def test_slots_alone_removed_under_way_leave_no_bells_and_no_log(tmp_path: Path) -> None:
    segments = [join_at(tmp_path, job=1), join_at(tmp_path, job=2)]
    segments[0].draw_turn()
    os.unlink(segments[0].path)
    for segment in segments:
        with pytest.raises(SegmentError, match="removed under way"):
            segment.members()
        segment.leave()
    assert list(tmp_path.iterdir()) == []


def test_who_leaves_a_removed_segment_keeps_away_from_the_new_one(tmp_path: Path) -> None:
    old = join_at(tmp_path, job=1)
    os.unlink(old.path)
    new, newer = join_at(tmp_path, job=2), join_at(tmp_path, job=3)
    old.leave()
    assert jobs(new) == jobs(newer) == [2, 3]
    assert newer.draw_turn() == 1
    for segment in (new, newer):
        segment.leave()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", turn_segment._LASTING_FIELDS)
@pytest.mark.parametrize("value", [b"\0" * 8, b"\xff" * 8, b"\x12\x34" * 4])
def test_an_own_slot_overwritten_under_way_is_noticed(field: str, value: bytes, join: Join) -> None:
    """Siblings would pass the job over, and nobody would be told."""
    segment, sibling = join(job=1), join(job=2)
    segment.draw_turn()
    segment = join(job=3)  # one whose `joined_at` is not 0
    with open(segment.path, "r+b") as file:
        file.seek(slot_offset(segment.slot) + getattr(Slot, field).offset)
        file.write(value)
    with pytest.raises(SegmentError, match=r"own slot of .*\.turns to stay, got it overwritten under way"):
        segment.members()
    sibling.members()


@pytest.mark.parametrize("value", [struct.pack("=d", 1e300), b"\0" * 16, b"\xff" * 16, b"\x12\x34" * 8])
def test_an_overwritten_lease_of_a_sibling_counts_as_the_default(value: bytes, join: Join) -> None:
    """It may be stopped, and cannot tell; whoever believed the bytes might wait for ever, or not at all."""
    segment, sibling = join(job=1), join(job=2, lease_s=1.5)
    with open(segment.path, "r+b") as file:
        file.seek(slot_offset(sibling.slot) + Slot.lease_s.offset)
        file.write(value)
    assert {found.job: found.lease_s for found in segment.members()} == {1: 1.0, 2: DEFAULT_LEASE_S}


def test_a_lease_that_the_owner_has_changed_is_not_taken_for_meddling(join: Join) -> None:
    segment = join()
    segment.publish_lease(17.5)
    assert [found.lease_s for found in segment.members()] == [17.5]


def test_an_own_bell_removed_under_way_is_noticed(join: Join) -> None:
    segment = join()
    os.unlink(segment.path.removesuffix(".turns") + f".{segment.slot}.bell")
    with pytest.raises(SegmentError, match=r"own bell beside .* to stay, got it removed under way"):
        segment.members()


@pytest.mark.parametrize("kept", [0, 2])
def test_no_turn_is_drawn_from_a_log_that_was_cut_short(kept: int, join: Join) -> None:
    """Its number would be one of long ago, for which no sibling waits."""
    first = join(job=1)
    for _ in range(5):
        first.draw_turn()
    late = join(job=2)
    os.truncate(first.path.removesuffix(".turns") + ".log", kept)
    for segment in (late, first):
        with pytest.raises(SegmentError, match=r"expected a turn after 5, got the log beside .* cut short"):
            segment.draw_turn()


SLOT_AREA_BYTES = SLOT_COUNT * SLOT_BYTES


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.integers(0, SLOT_AREA_BYTES - 1),
            st.one_of(
                st.binary(min_size=1, max_size=600), st.just(b"\1" + b"\0" * 7), st.just(b"\xff" * 264)
            ),
        ),
        max_size=8,
    )
)
def test_arbitrary_bytes_in_the_slots_crash_nothing(join: Join, splinters: list[tuple[int, bytes]]) -> None:
    segment, sibling = join(job=1), join(job=2)
    slot = segment.slot
    with open(segment.path, "r+b") as file:
        for offset, splinter in splinters:
            file.seek(HEADER_BYTES + offset)
            file.write(splinter[: SLOT_AREA_BYTES - offset])
    for each in (segment, sibling):
        assert all(isinstance(found, Slot) for found in each.slots().values())
        try:
            each.wait(each.members(), 0.0)
        except SegmentError as error:
            assert "own slot" in str(error)
        each.publish_started(3)
        each.publish_returned(3)
    assert segment.slot == slot
    third = join(job=3)
    assert third.slot not in (segment.slot, sibling.slot), "a slot is whoever's holds its lock"
    for each in (third, sibling, segment):
        each.leave()
