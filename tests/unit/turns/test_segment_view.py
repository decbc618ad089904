"""Looking at segments from outside: what is seen, that nobody notices, and that nothing makes it raise."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossover_ddp._turns import view as segment_view
from crossover_ddp._turns.segment import FILE_BYTES, JOINED, SLOT_BYTES, SLOT_COUNT
from crossover_ddp._turns.view import look
from crossover_ddp.cli.status import rows
from tests.unit.turns.joined_segments import Join, home, join_at


def jobs_seen(base: Path) -> list[int]:
    return [place.slot.job for place in look(str(base)).places]


def test_a_slot_left_while_it_is_looked_at_is_no_dead_one(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(job=1)
    leaving = join(job=2)
    tested = segment_view.slots_are_locked
    monkeypatch.setattr(segment_view, "slots_are_locked", lambda *what: (leaving.leave(), tested(*what))[1])
    assert jobs_seen(tmp_path) == [1]


# --- nobody notices ------------------------------------------------------------------------------------------------


def _state(base: Path) -> list[tuple[object, ...]]:
    return [
        (path.name, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        for path in sorted([base, *base.rglob("*")])
        for found in [path.lstat()]
    ]


def test_looking_writes_nothing_takes_no_lock_and_opens_nothing_for_good(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(job=1)
    join(job=2).draw_turn()
    before, descriptors = _state(tmp_path), len(os.listdir("/proc/self/fd"))
    asked, opened = fcntl.fcntl, os.open

    def ask(fd: int, command: int, argument: bytes = b"") -> Any:
        assert command == fcntl.F_OFD_GETLK
        return asked(fd, command, argument)

    def open_for_looking(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        assert not flags & (os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_WRONLY)
        return opened(path, flags, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", ask)
        patched.setattr(os, "open", open_for_looking)
        assert jobs_seen(tmp_path) == [1, 2]
    assert (_state(tmp_path), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


# --- what others have put there; see also test_turn_segment.py ---------------------------------------------------


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "seek"),
        (lambda path: path.rename(path.with_name("foreign.turns")), "not a file of turns"),
    ],
)
def test_what_is_no_segment_is_told_as_a_problem(
    meddle: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    segment = join_at(tmp_path)
    segment.forget()
    meddle(Path(segment.path))
    seen = look(str(tmp_path))
    assert seen.places == seen.abandoned == ()
    assert any(message in what for _, what in seen.problems)


def test_files_may_vanish_between_listing_and_opening(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join()
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: [*listed(fd), "ghost@.turns"])
    seen = look(str(tmp_path))
    assert (len(seen.places), seen.abandoned, seen.problems) == (1, (), ())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.dictionaries(
        st.integers(0, SLOT_COUNT - 1),
        st.binary(min_size=SLOT_BYTES - 8, max_size=SLOT_BYTES - 8),
        max_size=6,
    ),
    cut=st.integers(0, 2 * FILE_BYTES),
)
def test_arbitrary_contents_never_raise(slots: dict[int, bytes], cut: int, tmp_path: Path) -> None:
    """All the way to the terminal."""
    home(tmp_path).mkdir(0o700, exist_ok=True)
    raw = bytearray(FILE_BYTES)
    for index, rest in slots.items():
        raw[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = JOINED.to_bytes(8, "little") + rest
    (home(tmp_path) / "jobs@.turns").write_bytes(raw[:cut])
    seen = look(str(tmp_path))
    found = json.dumps([*rows(seen, seen)])
    if cut >= FILE_BYTES:
        assert found.count("gone") >= bool(slots)
