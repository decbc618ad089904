"""The recorder of spans: its files, and its failures; and the command that merges files."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp import cli
from crossover_ddp._timeline import record
from crossover_ddp._timeline.record import Timeline
from crossover_ddp._timeline.trace import events
from tests.harness.oracles import heard

SPAN = ("compute", 0.0, 1.0)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return a file's events. A viewer also accepts the missing end of the array."""
    found: list[dict[str, Any]] = json.loads(path.read_text().removesuffix(",\n") + "]")
    return found


def _spans(path: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(path) if line["ph"] == "X"]


def recorded(directory: Path, *spans: tuple[str, float, float], **whose: Any) -> Path:
    """Record spans, each a kind and two times. Return the file."""
    timeline = Timeline(directory, **{"rank": 0, "device": "d", "job": "a", **whose})
    for span in spans:
        timeline.span(*span)
    timeline.close()
    return timeline.path


def test_a_recording_is_a_header_and_spans(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "deep" / "er", rank=3, device="node0/device0", job="5ca1ab1e")
    timeline.span("compute", 1.0, 2.5)
    timeline.span("reduce_scatter", 2.0, 2.25, bucket=1, bytes=4096, dtype="float32")
    timeline.close()
    assert timeline.path.name == f"rank3-{os.getpid()}.json"
    whose, device, *lanes = (line for line in _lines(timeline.path) if line["ph"] == "M")
    who = whose["args"]
    assert (whose["name"], who["job"], who["rank"]) == ("recording", "5ca1ab1e", 3)
    assert (device["name"], device["args"]) == ("process_name", {"name": who["device"]})
    names = {lane["tid"]: lane["args"]["name"] for lane in lanes}
    args, shown = {"bucket": 1, "bytes": 4096, "dtype": "float32"}, ("cat", "name", "args", "dur")
    assert [(names[each["tid"]], *map(each.get, shown)) for each in _spans(timeline.path)] == [
        ("5ca1ab1e · rank 3 · turns", "compute", "compute", {}, 1.5e6),
        (
            "5ca1ab1e · rank 3 · reduce-scatter",
            "reduce_scatter",
            "reduce-scatter of bucket 1",
            args,
            0.25e6,
        ),
    ]
    assert _spans(timeline.path)[0]["ts"] / 1e6 - who["wall_s"] == pytest.approx(1.0, abs=1e-5)
    assert who["wall_s"] == pytest.approx(time.time() - time.monotonic(), abs=1.0)


def test_spans_of_a_lane_never_overlap(tmp_path: Path) -> None:
    times_s = ((0, 4), (1, 5), (4, 6), (5, 7), (2, 8), (8, 9))
    lanes: dict[int, list[float]] = {}
    for span in _spans(recorded(tmp_path, *(("all_gather", *each) for each in times_s))):
        lanes.setdefault(span["tid"], []).extend((span["ts"], span["ts"] + span["dur"]))
    assert len(lanes) == 3
    assert all(times == sorted(times) for times in lanes.values())


def test_a_device_is_a_process_and_each_rank_has_its_own_lane(tmp_path: Path) -> None:
    whose = [("a", 0, "d0"), ("a", 1, "d1"), ("b", 0, "d0"), ("b", 1, "d0")]
    first, second, third, fourth = found = [
        _spans(recorded(tmp_path, SPAN, job=job, rank=rank, device=device))[0]
        for job, rank, device in whose
    ]
    assert first["pid"] == third["pid"] == fourth["pid"] != second["pid"]
    assert len({each["tid"] for each in found}) == 4


def test_spans_are_written_once_a_second_and_at_close(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")
    now_s = time.monotonic()
    timeline.span("compute", now_s, now_s + record._FLUSH_S / 2)
    assert _spans(timeline.path) == []
    for _ in range(2):
        timeline.span("compute", now_s, now_s + record._FLUSH_S)
        assert len(_spans(timeline.path)) == 2
    for _ in range(2):
        timeline.close()
        timeline.span("compute", now_s, now_s + 2 * record._FLUSH_S)
    assert len(_spans(timeline.path)) == 3, "spans after close() are dropped"


def test_a_script_may_change_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    timeline = record.Timeline("runs", rank=0, device="dev0")
    monkeypatch.chdir("else")
    timeline.span(*SPAN)
    timeline.close()
    assert len(_spans(timeline.path)) == 1


def test_every_timeline_has_its_own_file(tmp_path: Path) -> None:
    """There may be two states in one process, or an earlier process with the same id."""
    kinds, name = [f"kind{place}" for place in range(3)], f"rank0-{os.getpid()}"
    paths = [recorded(tmp_path, (kind, 0, 1)) for kind in kinds]
    assert [path.name for path in paths] == [f"{name}.json", f"{name}-2.json", f"{name}-3.json"]
    assert [[span["cat"] for span in _spans(path)] for path in paths] == [[kind] for kind in kinds]


def test_spans_of_all_threads_are_written_in_order(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")

    def record(thread: int) -> None:
        for index in range(1000):
            timeline.span("compute", index, index + 1, thread=thread, index=index)

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(record, range(4))]
    timeline.close()
    spans = [span["args"] for span in _spans(timeline.path)]
    for number in range(4):
        assert [each["index"] for each in spans if each["thread"] == number] == [*range(1000)]


def script(directory: Path, *lines: str) -> str:
    """Run a script that makes a timeline, then executes the lines. Return its errors."""
    made = (
        "from crossover_ddp._timeline.record import Timeline; import os, resource as r, signal, sys"
    )
    text = "\n".join([made, "timeline = Timeline(sys.argv[1], rank=0, device='d')", *lines])
    words = [sys.executable, "-c", text, str(directory)]
    return subprocess.run(words, check=True, timeout=60, capture_output=True, text=True).stderr


def test_spans_are_written_at_exit_without_close_and_not_again_by_a_fork(
    tmp_path: Path,
) -> None:
    script(
        tmp_path,
        "timeline.span('compute', 0, 1)",
        # Another thread may hold the locks at the fork.
        "timeline._lock.acquire(); timeline._write_lock.acquire(); child = os.fork()",
        "if not child: signal.alarm(20); sys.exit()",
        "timeline._lock.release(); timeline._write_lock.release()",
        "sys.exit(os.waitpid(child, 0)[1])",
    )
    (path,) = tmp_path.iterdir()
    assert [span["cat"] for span in _spans(path)] == ["compute"]


def test_a_full_disk_ends_the_recording_with_one_warning(
    tmp_path: Path,
) -> None:
    errors = script(
        tmp_path,
        "def write(): timeline.span('compute', 0, 1); timeline.flush()",
        "write(); soft, hard = r.getrlimit(r.RLIMIT_FSIZE)",
        "r.setrlimit(r.RLIMIT_FSIZE, (os.stat(timeline.path).st_size + 9, hard)); write()",
        "r.setrlimit(r.RLIMIT_FSIZE, (soft, hard)); write()",
    )
    (path,) = tmp_path.iterdir()
    assert [event["ph"] for event in events(path)].count("X") == 1
    assert errors.count("no timeline is recorded") == 1


def test_an_unwritable_directory_causes_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with heard() as warnings:
        recorded(tmp_path / "file" / "below", SPAN)
    assert ["no timeline is recorded" in each for each in warnings] == [True]


def test_recordings_of_all_jobs_are_merged_into_one_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        recorded(tmp_path / "runs" / job, SPAN, job=job, rank=rank)
        for job in "ab"
        for rank in (0, 1)
    ]
    with paths[0].open("a") as file:
        file.write('{"ph": "X", "name": "cut o')  # by a kill
    trace = tmp_path / "deep" / "trace.json"
    words = ["timeline", str(tmp_path / "runs"), str(tmp_path / "runs" / "a"), "-o", str(trace)]
    assert cli.main(words) == 0
    assert "2 jobs, 4 recordings, 4 spans" in capsys.readouterr().out
    events = json.loads(trace.read_text())
    paths[0].write_text(paths[0].read_text().rpartition("\n")[0] + "\n")
    assert events == [event for path in paths for event in _lines(path)]


def test_files_that_are_no_recordings_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["timeline", str(tmp_path), "-o", str(tmp_path / "trace.json")]
    assert cli.main(words) == 1, "nothing there"
    recorded(tmp_path, SPAN)
    (tmp_path / "rank0-1.json").write_text("[\na shopping list,\n")
    (tmp_path / "rank0-2.json").write_text(
        '[\n{"ph": "M", "name": "recording", "args": {"version": 9}},\n'
    )
    (tmp_path / "rank0-3.json").touch()
    (tmp_path / "rank0-4.json").symlink_to("gone")
    assert cli.main(words) == 1
    shown = capfd.readouterr()
    assert "rank0-1.json: expected a recording, got" in shown.err
    assert "gone" in shown.err
    assert "rank0-2.json: expected a recording of version 3, got 9" in shown.err
    assert "1 jobs, 2 recordings, 1 spans" in shown.out
    assert cli.main(["timeline", str(tmp_path / "none")]) == 2
