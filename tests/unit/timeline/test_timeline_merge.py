"""Recordings in whatever state are read, named and merged."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._timeline.files import FoundTimelines, read, read_file
from crossover_ddp._timeline.merge import Merged, describe, merge
from tests.unit.timeline.made_up_recordings import HEADER, compute, write


def merged(*directories: Path) -> Merged:
    reading = read(directories)
    assert reading.problems == []
    return merge(reading.recordings)


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_last_line_cut_off_an_empty_file_and_bad_times_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, [compute(1, 2), compute(3, 2), compute(float("nan"), 2), {"kind": "wait"}])
    path.write_text(path.read_text() + '{"kind": "compute", "begin_s": 5, "end_s": 1e999}\n{"kind": "comp')
    write(tmp_path, [], pid=2).write_text("")
    reading = read([tmp_path])
    assert [len(each.spans) for each in reading.recordings] == [1]
    assert (reading.unfinished, reading.empty, reading.ignored) == (1, 1, 4)
    assert reading.problems == []


@pytest.mark.parametrize(
    ("first", "meaning"),
    [
        ("step,loss", "expected the header of a timeline, got 'step,loss'; is this file another program's"),
        ("[1, 2]", "expected the header"),
        ('{"event": "start"}', "expected the header"),
        (json.dumps({**HEADER, "version": 3}), "expected a timeline of version 2, got version 3"),
        (json.dumps({**HEADER, "version": 1}), "expected a timeline of version 2, got version 1"),
        (json.dumps({**HEADER, "wall_s": "noon"}), "expected numbers for rank, monotonic_s and wall_s"),
        ("\x00" * 999, "expected the header of a timeline"),
    ],
)
def test_a_foreign_file_is_named_with_its_line_and_left_out(first: str, meaning: str, tmp_path: Path) -> None:
    path = tmp_path / "rank7-7.jsonl"
    path.write_text(f"{first}\n{json.dumps(compute(1, 2))}\n")
    write(tmp_path, [compute(1, 2)])
    reading = read([tmp_path])
    (problem,) = reading.problems
    assert (problem.path, problem.line) == (str(path), 1)
    assert meaning in problem.what
    assert len(reading.recordings) == 1


def test_lines_that_are_no_spans_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = write(tmp_path, [compute(1, 2)])
    path.write_text(path.read_text() + f'hello\n{json.dumps(compute(3, 4))}\n{{"kind": 7}}\n')
    reading = read([tmp_path])
    (problem,) = reading.problems
    assert problem == (str(path), 3, "expected a span, got 'hello', and 1 more such lines")
    assert len(reading.recordings[0].spans) == 2


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_exception(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "rank0-1.jsonl"
    path.write_bytes(json.dumps(HEADER).encode() + b"\n" + data)
    reading = FoundTimelines()
    read_file(path, "x", reading)
    assert len(reading.recordings) == 1


def test_other_files_below_are_not_touched_and_none_is_read_twice(tmp_path: Path) -> None:
    write(tmp_path / "a" / "timeline", [compute(1, 2)])
    (tmp_path / "a" / "rank0.jsonl").write_text("a step log\n")
    reading = read([tmp_path, tmp_path / "a", tmp_path / "a" / "timeline"])
    assert (len(reading.recordings), reading.problems) == (1, [])


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a directory with timelines, got .*nowhere"):
        read([tmp_path / "nowhere"])
    file = write(tmp_path, [])
    with pytest.raises(NotADirectoryError, match="expected a directory with timelines"):
        read([file])


# --- names ---------------------------------------------------------------------------------------------------------


def test_jobs_are_named_after_their_directories(tmp_path: Path) -> None:
    for place, name in enumerate("ab"):
        write(tmp_path / name / "timeline", [compute(1, 2)], job=f"id{place}")
    assert merged(tmp_path).jobs == ["a", "b"]
    assert merged(tmp_path / "b" / "timeline", tmp_path / "a").jobs == ["b", "a"]
    for run in "xy":
        write(tmp_path / run / "c", [compute(1, 2)], job=f"c in {run}")
    assert merged(tmp_path / "x", tmp_path / "y").jobs == ["x/c", "y/c"]


def test_jobs_in_one_directory_are_told_apart_in_order_of_their_begins(tmp_path: Path) -> None:
    write(tmp_path / "d", [compute(1, 2)], job="f00", pid=1, monotonic_s=50.0)
    write(tmp_path / "d", [compute(1, 2)], job="bad", pid=2, monotonic_s=40.0)
    write(tmp_path / "d", [compute(1, 2)], job="bad", pid=3, monotonic_s=60.0, rank=1)
    found = merged(tmp_path / "d")
    assert {(span.job, span.rank) for span in found.spans} == {("d.2", 0), ("d.1", 0), ("d.1", 1)}


def test_one_job_in_several_directories_is_one_job(tmp_path: Path) -> None:
    """As when every host has written to a disk of its own."""
    write(tmp_path / "host0", [compute(1, 2)], rank=0)
    write(tmp_path / "host1", [compute(1, 2)], rank=1, host="h1", clock="c1", device="d1")
    assert merged(tmp_path).jobs == ["j1"]


def test_a_rank_that_was_restarted_keeps_its_lane(tmp_path: Path) -> None:
    """Where the store gave no job's identity, its processes are told apart by their files only."""
    write(tmp_path / "a", [compute(1, 2)], job=None, pid=1)
    write(tmp_path / "a", [compute(5, 6)], job=None, pid=2)
    assert [(s.job, s.rank, s.begin_s) for s in merged(tmp_path).spans] == [("a", 0, 1), ("a", 0, 5)]


def test_devices_of_one_name_on_two_hosts_are_two(tmp_path: Path) -> None:
    write(tmp_path / "a", [compute(1, 2)], rank=0, device="gpu")
    write(tmp_path / "a", [compute(1, 2)], rank=1, device="gpu", host="h1", clock="c1")
    found = merged(tmp_path)
    assert {span.device for span in found.spans} == {"gpu@h0", "gpu@h1"}
    assert found.hosts == {"gpu@h0": "h0", "gpu@h1": "h1"}


# --- clocks --------------------------------------------------------------------------------------------------------


def test_hosts_are_placed_by_their_wall_clocks(tmp_path: Path) -> None:
    """The second host's clock is 70 s behind that of the first, and both wall clocks agree."""
    write(tmp_path, [compute(100, 101)])
    other = {"rank": 1, "device": "d1", "host": "h1", "clock": "c1", "pid": 2}
    write(tmp_path, [compute(30.5, 31.5)], **other, monotonic_s=30.0)
    found = merged(tmp_path)
    assert [(span.rank, span.begin_s, span.end_s) for span in found.spans] == [
        (0, 100, 101),
        (1, 100.5, 101.5),
    ]
    assert found.wall_s == 900
    assert describe(found).startswith("2 hosts, placed by their wall clocks")


def test_ranks_of_one_machine_need_no_wall_clock(tmp_path: Path) -> None:
    """It may have been set while they ran; the clock of all of them was not."""
    for pid, wall_s in enumerate((1000.0, 1007.0, 1000.0), start=1):
        write(tmp_path, [compute(100 + pid, 200)], rank=pid, pid=pid, wall_s=wall_s)
    found = merged(tmp_path)
    assert [span.begin_s for span in found.spans] == [101, 102, 103]
    assert (found.wall_s, describe(found)) == (900, "one clock, nothing to align")


def test_nothing_recorded_is_nothing_merged(tmp_path: Path) -> None:
    found = merged(tmp_path)
    assert (found.spans, found.jobs, describe(found)) == ([], [], "")
    write(tmp_path, [])
    assert merged(tmp_path).spans == []
