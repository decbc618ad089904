"""Whatever others have put where a segment should be is refused by name and stays as it is; see also the campaign."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp._turns.view import look
from crossover_ddp.errors import SegmentError
from tests.unit.turns.joined_segments import DEVICE, Join, home, jobs, join_at

NOBODY = 65534


def state(base: Path) -> dict[Path, tuple[object, ...]]:
    """Return all that a change of any file would change."""
    paths = {path: path.lstat() for path in base.rglob("*")}
    return {
        path: (found.st_ino, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns)
        + ((path.read_bytes(),) if stat.S_ISREG(found.st_mode) else ())
        for path, found in paths.items()
    }


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    """The slots of a process that has ended without leaving."""
    segment = join_at(tmp_path)
    segment.draw_turn()
    segment.forget()
    return Path(segment.path)


def _garbage(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"XDDPTURN" * 8)  # as an earlier version wrote


def _symbolic_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize(
    ("meddle", "message", "problem"),
    [
        (lambda path: os.truncate(path, 100), r"slots of \d+ bytes.*; remove it", "expected slots of"),
        (lambda path: os.truncate(path, 1 << 20), r"slots of \d+ bytes.*; remove it", "expected slots of"),
        (_garbage, "another version of crossover_ddp.*; remove it", "another version"),
        (_symbolic_link, "got a symbolic link; remove it", "symbolic links"),
        (_directory, "got Is a directory; remove it", "directory"),
    ],
)
def test_a_segment_that_is_not_ours_is_refused_seen_and_stays_as_it_is(
    meddle: Callable[[Path], None], message: str, problem: str, leftover: Path, tmp_path: Path
) -> None:
    meddle(leftover)
    before = state(tmp_path)
    with pytest.raises(SegmentError, match=message) as caught:
        TurnSegment("jobs", DEVICE, base=str(tmp_path))
    assert str(leftover) in str(caught.value)
    seen = look(str(tmp_path))
    assert seen.segments == ()
    assert any(problem in each.what for each in seen.problems)
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        pytest.param(
            lambda path: os.chown(path, NOBODY, NOBODY),
            "got owner 65534",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user"),
        ),
        (lambda path: path.chmod(0o755), "got mode 0755; chmod 0700 it"),
        (_symbolic_link, "to be a directory of this user, got .*; if it is a symbolic link or a file"),
        (lambda path: (path.rename(f"{path}-old"), path.touch(0o600)), "to be a directory of this user"),
    ],
)
def test_a_directory_that_is_not_ours_is_refused_and_stays_as_it_is(
    meddle: Callable[[Path], object], message: str, leftover: Path, tmp_path: Path
) -> None:
    meddle(leftover.parent)
    before = state(tmp_path)
    with pytest.raises(SegmentError, match=message) as caught:
        TurnSegment("jobs", DEVICE, base=str(tmp_path))
    assert str(home(tmp_path)) in str(caught.value)
    assert len(look(str(tmp_path)).problems) == 1
    assert state(tmp_path) == before


def test_a_log_that_is_a_link_is_refused_and_stays_as_it_is(
    leftover: Path, join: Join, tmp_path: Path
) -> None:
    segment = join()
    _symbolic_link(leftover.with_suffix(".log"))
    before = state(tmp_path)
    with pytest.raises(SegmentError, match=r"@\.log, got a symbolic link"):
        segment.draw_turn()
    assert state(tmp_path) == before


# --- under way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["turns", "log", "*.bell", "*"])
def test_files_removed_under_way_are_noticed(suffix: str, join: Join, tmp_path: Path) -> None:
    """Or a job that comes later would make new ones, and neither would see the other."""
    segment = join()
    segment.draw_turn()
    for path in home(tmp_path).glob(f"*.{suffix}"):
        path.unlink()
    with pytest.raises(SegmentError, match="removed under way"):
        segment.members()
    following = join(job=2)
    segment.leave()
    assert jobs(following) == [2], "the first one's leaving does not touch what is not its own"


@pytest.mark.parametrize("kept", [0, 2])
def test_no_turn_is_drawn_from_a_log_that_was_cut_short(kept: int, join: Join) -> None:
    """Its number would be one of long ago, for which no sibling waits."""
    first = join(job=1)
    for _ in range(5):
        first.draw_turn()
    late = join(job=2)
    os.truncate(first.path.removesuffix(".turns") + ".log", kept)
    for segment in (late, first):
        with pytest.raises(SegmentError, match=r"expected a turn after 5, got .* cut short"):
            segment.draw_turn()
