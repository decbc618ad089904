"""Any bytes where a segment and its log should be: read as they are, or refused by name; nobody is made up.

Both readers are fed: the one that takes turns (`TurnSegment`, `TurnLog`) and the one that only looks
(`crossover_ddp._turns.view`).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from crossover_ddp._turns.rules import Blocker, Member, Patience, TurnLog, blockers
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp._turns.slots import (
    FILE_BYTES,
    HEADER_BYTES,
    JOINED,
    LAYOUT,
    MAGIC,
    SLOT_BYTES,
    SLOT_COUNT,
    SegmentHeader,
    Slot,
)
from crossover_ddp._turns.view import Liveness, look
from crossover_ddp.cli.status import rows
from crossover_ddp.errors import SegmentError
from tests.unit.turns.joined_segments import DEVICE, home, join_at

_Found = TypeVar("_Found")

fuzz = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def header() -> bytes:
    return bytes(SegmentHeader(MAGIC, LAYOUT, SLOT_COUNT))


@st.composite
def slots(draw: st.DrawFn) -> bytes:
    """Slots that say they are in use, with any numbers in them."""
    raw = bytearray(FILE_BYTES - HEADER_BYTES)
    for index in draw(st.lists(st.integers(0, SLOT_COUNT - 1), max_size=6)):
        slot = draw(st.binary(min_size=SLOT_BYTES, max_size=SLOT_BYTES))
        raw[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = slot
        state = draw(st.sampled_from([JOINED, JOINED, 2, 1 << 63]))
        raw[index * SLOT_BYTES : index * SLOT_BYTES + 8] = state.to_bytes(8, "little")
    return bytes(raw)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid segment with some bytes changed, then perhaps cut or continued."""
    raw = bytearray(header() + draw(slots()))
    splinters = st.tuples(st.integers(0, FILE_BYTES - 1), st.binary(min_size=1, max_size=64))
    for offset, splinter in draw(st.lists(splinters, max_size=4)):
        raw[offset : offset + len(splinter)] = splinter[: FILE_BYTES - offset]
    size = draw(st.one_of(st.just(FILE_BYTES), st.integers(0, FILE_BYTES + 100)))
    return bytes(raw[:size].ljust(size, b"\xa5"))


contents = st.one_of(st.binary(max_size=400), st.builds(bytes.__add__, st.just(header()), slots()), mutated())
logs = st.one_of(st.none(), st.binary(max_size=300), st.integers(0, 70_000).map(lambda numel: b"\3" * numel))


def put(base: Path, turns: bytes, log: bytes | None) -> tuple[Path, Path]:
    """Lay a segment's files where nobody lives."""
    directory = home(base)
    directory.mkdir(mode=0o700, exist_ok=True)
    for leftover in directory.iterdir():
        leftover.unlink()
    stem = directory / "jobs@"
    paths = Path(f"{stem}.turns"), Path(f"{stem}.log")
    for path, content in zip(paths, (turns, log), strict=True):
        if content is not None:
            path.write_bytes(content)
            path.chmod(0o600)
    return paths


def is_valid(turns: bytes) -> bool:
    return len(turns) == FILE_BYTES and turns[:HEADER_BYTES] == header()


@fuzz
@given(turns=contents, log=logs)
@example(turns=b"", log=None)
@example(turns=header(), log=b"")
@example(turns=header() + bytes(FILE_BYTES - HEADER_BYTES), log=b"\xff" * 10)
def test_looking_at_any_bytes_finds_nobody_alive(turns: bytes, log: bytes | None, tmp_path: Path) -> None:
    turns_path, log_path = put(tmp_path, turns, log)
    seen = look(str(tmp_path))
    if is_valid(turns):
        places = [place for segment in seen.segments for place in segment.places]
        assert {place.liveness for place in places} <= {Liveness.GONE}
        states = memoryview(turns[HEADER_BYTES:]).cast("Q")[:: SLOT_BYTES // 8].tolist()
        assert sorted(place.slot for place in places) == [k for k, s in enumerate(states) if s == JOINED]
        numels = {segment.log.numel if segment.log else None for segment in seen.segments}
        assert numels == {len(log) if log is not None else None}
    elif not seen.segments:
        assert any(problem.path == str(turns_path) for problem in seen.problems)
    list(rows(seen, seen))
    assert turns_path.read_bytes() == turns, "looking changes nothing"
    assert log is None or log_path.read_bytes() == log


@fuzz
@given(turns=contents, log=logs)
@example(turns=header() + bytes(FILE_BYTES - HEADER_BYTES), log=b"\0" * 10)
def test_joining_any_bytes_is_refused_by_name_or_meets_nobody(
    turns: bytes, log: bytes | None, tmp_path: Path
) -> None:
    turns_path, _ = put(tmp_path, turns, log)
    try:
        segment = join_at(tmp_path, job=5)
    except SegmentError as error:
        assert not is_valid(turns)
        assert str(turns_path) in str(error)
        assert "remove it while no job runs" in str(error).replace("\n", " ")
        assert turns_path.read_bytes() == turns
        return
    drawn = len(log or b"")
    assert [(found.slot, found.job) for found in segment.members()] == [(segment.slot, 5)]
    assert segment.draw_turn() == drawn + 1
    reading = TurnLog()
    reading.read(segment.read_log(0, drawn))
    grant = reading.grant(drawn + 1, 5, segment.members())
    assert grant.after == (), "what the dead have left holds nobody up"
    segment.leave()
    assert list(tmp_path.iterdir()) == []


def attempt(call: Callable[[], _Found]) -> _Found | None:
    """Call what may find out that the segment is not what it was; it says so in words."""
    try:
        return call()
    except SegmentError as error:
        assert "under way" in str(error)
        return None


@fuzz
@given(turns=contents, whole=st.booleans())
@example(turns=bytes(FILE_BYTES), whole=True)
@example(turns=b"\xff" * FILE_BYTES, whole=True)
def test_any_bytes_under_way_make_up_no_sibling(turns: bytes, whole: bool, tmp_path: Path) -> None:
    segments = [join_at(tmp_path, job=job) for job in (1, 2)]
    living = {segment.slot for segment in segments}
    with open(segments[0].path, "r+b") as file:
        file.write(turns)
        if whole:
            file.truncate()
    for segment in segments:
        members = attempt(segment.members)
        if members is not None:
            assert {member.slot for member in members} <= living
            attempt(lambda segment=segment, members=members: segment.wait(members, 0.0))
        attempt(lambda segment=segment: segment.publish_started(1))
        attempt(lambda segment=segment: segment.publish_returned(1))
    for found in look(str(tmp_path)).segments:
        alive = {place.slot for place in found.places if place.liveness is Liveness.ALIVE}
        assert alive <= living
    third = None
    try:
        third = TurnSegment("jobs", DEVICE, base=str(tmp_path))
        third.join(job=3, rank=0, world_size=1, lease_s=1.0)
        assert third.slot not in living, "a slot is whoever's holds its lock"
    except SegmentError as error:
        assert segments[0].path in str(error)
    for segment in [*segments, *([third] if third else [])]:
        segment.leave()
    assert list(tmp_path.iterdir()) == []


numbers = st.integers(0, 2**64 - 1)
leases = st.one_of(
    st.floats(),
    st.binary(min_size=8, max_size=8).map(
        lambda raw: (
            Slot.from_buffer_copy(raw.rjust(Slot.lease_s.offset + 8, b"\0").ljust(SLOT_BYTES, b"\0")).lease_s
        )
    ),
)
members = st.lists(st.builds(Member, st.integers(0, SLOT_COUNT - 1), *[numbers] * 5, leases), max_size=6)


@fuzz
@given(st.binary(max_size=300), members, numbers)
def test_a_grant_from_any_bytes_names_members_and_turns_before_it(
    log: bytes, found: list[Member], own_job: int
) -> None:
    reading = TurnLog()
    reading.read(log)
    turn = len(log) + 1
    grant = reading.grant(turn, own_job, found)
    for job, last in grant.after:
        slots = [member.slot for member in found if member.job == job]
        assert job != own_job
        assert 0 < last < turn
        assert log[last - 1] in slots, "the log says that somebody of this job drew it"
    patience, now_s, waited = Patience(), 0.0, 0
    while (waiting := blockers(grant, own_job, found)) and waited <= len(found):
        assert all(isinstance(each, Blocker) and each.turn < turn for each in waiting)
        left_s = patience.remaining(waiting, found, now_s)
        if left_s is None:
            break
        assert left_s > 0
        now_s, waited = now_s + left_s + 1.0, waited + 1
    assert waited <= len({member.job for member in found}), "each job costs one lease at most"


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, FILE_BYTES - 1, FILE_BYTES + 1])
def test_every_other_size_is_refused(size: int, tmp_path: Path) -> None:
    turns_path, _ = put(tmp_path, (header() + bytes(FILE_BYTES))[:size], None)
    with pytest.raises(SegmentError, match=rf"expected a segment of {FILE_BYTES} bytes, got {size} at"):
        join_at(tmp_path)
    assert os.path.getsize(turns_path) == size
