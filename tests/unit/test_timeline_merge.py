"""Recordings in whatever state are read, named and merged."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._timeline.files import FoundTimelines, read, read_file
from crossover_ddp._timeline.merge import Merged, describe, job_names, merge
from crossover_ddp._timeline.spans import TimelineSpan
from tests.unit.made_up_recordings import HEADER, compute, exchange, two_hosts, write


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
        (json.dumps({**HEADER, "version": 3}), "expected a timeline of version 2 or less, got version 3"),
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


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    header = {name: HEADER[name] for name in ("rank", "device", "host", "pid", "monotonic_s", "wall_s")}
    (tmp_path / "rank0-1.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(compute(1, 2))}\n")
    found = merged(tmp_path)
    assert found.jobs == [tmp_path.name]
    assert found.spans == [TimelineSpan(tmp_path.name, 0, "d0", "compute", 1, 2, {"step": 3})]


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


def test_a_wrong_wall_clock_does_not_change_the_order_of_jobs(tmp_path: Path) -> None:
    """The first job's rank on the second host began first of all, whatever that host's wall clock says."""
    ahead_s = 500.0
    begins_s = {("first", 0): 103.0, ("first", 1): 100.0, ("second", 0): 102.0, ("second", 1): 104.0}
    for wall_error_s in (0.0, 7.0, -7.0):
        home = tmp_path / str(wall_error_s) / "d"
        for pid, ((job, rank), begin_s) in enumerate(begins_s.items()):
            on_s = begin_s + rank * ahead_s
            wall_s = 1000 + begin_s + rank * wall_error_s
            spans = [exchange(at + rank * ahead_s, at + rank * ahead_s + 1e-3, at) for at in range(110, 120)]
            host = {"host": f"h{rank}", "clock": f"c{rank}", "device": f"d{rank}"}
            write(home, spans, job=job, rank=rank, pid=pid, monotonic_s=on_s, wall_s=wall_s, **host)
        reading = read([home])
        names = job_names(reading.recordings, merge(reading.recordings).alignment)
        assert names == {"first": "d.1", "second": "d.2"}


def test_one_job_in_several_directories_is_one_job(tmp_path: Path) -> None:
    """As when every host has written to a disk of its own."""
    write(tmp_path / "host0", [compute(1, 2)], rank=0)
    write(tmp_path / "host1", [compute(1, 2)], rank=1, host="h1", clock="c1", device="d1")
    assert merged(tmp_path).jobs == ["j1"]


def test_a_rank_that_was_restarted_keeps_its_lane(tmp_path: Path) -> None:
    """Without a job's identity, as in version 1, its processes are told apart by their files only."""
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


def test_hosts_are_aligned_by_their_exchanges(tmp_path: Path) -> None:
    two_hosts(tmp_path, ahead_s=-70.0)
    found = merged(tmp_path)
    assert found.alignment.uncertainty_s is not None
    own, other = ([span for span in found.spans if span.rank == rank] for rank in (0, 1))
    error_s = max(abs(a.begin_s + 0.001 - b.begin_s) for a, b in zip(own, other, strict=True))
    assert error_s <= found.alignment.uncertainty_s < 0.003
    # An exchange ends 1 ms after the one began and 2 ms after the other did: 3 ms of leeway.
    assert describe(found) == [
        "2 hosts aligned to within 1.5 ms by 50 exchanges",
        "h1: its wall clock was 5 s ahead of that of h0; corrected",
    ]


def test_what_proves_nothing_does_not_bound_clocks(tmp_path: Path) -> None:
    """Ends of ranks that own nothing; spans without a number; jobs without a name."""
    two_hosts(tmp_path, ahead_s=-70.0)
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace('"owned_bytes": 8', '"owned_bytes": 0'))
    assert merged(tmp_path).alignment.uncertainty_s is None
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace('"owned_bytes": 0', '"owned_bytes": 8'))
    assert merged(tmp_path).alignment.uncertainty_s is not None
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace('"job": "j1"', '"job": null'))
    found = merged(tmp_path)
    assert found.alignment.exchanges == 0
    assert describe(found) == [
        "h1: no exchange in common with other hosts; placed by its wall clock, whose error is not known"
    ]


def test_groups_and_kinds_are_counted_apart_and_a_second_round_too(tmp_path: Path) -> None:
    spans = [
        exchange(1, 2, 0),
        exchange(3, 4, 0),  # the group was made anew
        exchange(1, 2, 0, group="inner"),
        {"kind": "exchange", "begin_s": 1, "end_s": 2, "sequence": 0},
        {"kind": "all_gather", "begin_s": 1, "end_s": 2},
    ]
    write(tmp_path, spans)
    write(tmp_path, spans, rank=1, pid=2, clock="c1", host="h1", device="d1")
    assert merged(tmp_path).alignment.exchanges == 4


def test_a_wall_clock_set_under_way_is_a_contradiction(tmp_path: Path) -> None:
    two_hosts(tmp_path, ahead_s=0.0)
    path = tmp_path / "rank1-2.jsonl"
    header, *lines = path.read_text().splitlines()
    late = [json.loads(line) for line in lines]
    moved = [
        {**span, "begin_s": span["begin_s"] + 0.5, "end_s": span["end_s"] + 0.5} if place > 25 else span
        for place, span in enumerate(late)
    ]
    path.write_text("\n".join([header, *map(json.dumps, moved)]) + "\n")
    found = merged(tmp_path)
    assert any("h1: the exchanges contradict a steady clock by" in line for line in describe(found))


def test_files_of_two_runs_in_one_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, [exchange(1, 2, 0)])
    write(tmp_path, [exchange(5, 6, 0)], rank=1, pid=2)
    assert describe(merged(tmp_path))[1].startswith("1 exchanges ended before they began on the same clock")


def test_nothing_recorded_is_nothing_merged(tmp_path: Path) -> None:
    found = merged(tmp_path)
    assert (found.spans, found.jobs, describe(found)) == ([], [], [])
    write(tmp_path, [])
    assert merged(tmp_path).spans == []
