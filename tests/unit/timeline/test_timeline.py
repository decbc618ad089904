"""The recorder of spans: what is in the file, and that it never disturbs the job."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp._timeline import record
from crossover_ddp._timeline.record import Timeline


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_directory_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSOVER_TIMELINE", raising=False)
    assert Timeline.from_environment(rank=0, device="d0") is None


def test_header_then_spans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CROSSOVER_TIMELINE", str(tmp_path / "deep" / "er"))
    timeline = Timeline.from_environment(rank=3, device="node0/device0", job="5ca1ab1e")
    assert timeline is not None
    timeline.span("compute", 1.0, 2.5)
    timeline.span("reduce_scatter", 2.0, 2.25, bucket=1, bytes=4096, dtype="float32")
    timeline.close()
    assert timeline.path.name == f"rank3-{os.getpid()}.jsonl"
    header, *spans = _lines(timeline.path)
    assert header.keys() == {
        *("version", "job", "rank", "device"),
        *("host", "pid", "clock", "monotonic_s", "wall_s"),
    }
    assert (header["rank"], header["device"], header["version"]) == (3, "node0/device0", 2)
    assert header["job"] == "5ca1ab1e"
    # Another process of this boot reads the same clock.
    code = "from crossover_ddp._timeline.record import _clock_name; print(_clock_name())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert header["clock"] == other.stdout.strip()
    assert spans == [
        {"kind": "compute", "begin_s": 1.0, "end_s": 2.5},
        {
            "kind": "reduce_scatter",
            "begin_s": 2.0,
            "end_s": 2.25,
            "bucket": 1,
            "bytes": 4096,
            "dtype": "float32",
        },
    ]


def test_nothing_is_written_until_some_hundreds_wait(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")
    for _ in range(record._FLUSH_SPANS - 1):
        timeline.span("compute", 0, 1)
    assert len(_lines(timeline.path)) == 1
    timeline.span("compute", 0, 1)
    assert len(_lines(timeline.path)) == 1 + record._FLUSH_SPANS
    timeline.close()


def test_a_second_after_the_last_time_it_is_written(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")
    now_s = time.monotonic()
    timeline.span("compute", now_s, now_s + record._FLUSH_S / 2)
    assert len(_lines(timeline.path)) == 1
    timeline.span("compute", now_s, now_s + record._FLUSH_S)
    assert len(_lines(timeline.path)) == 3
    timeline.span("compute", now_s, now_s + record._FLUSH_S)
    assert len(_lines(timeline.path)) == 3
    timeline.close()


def test_spans_after_close_are_dropped_and_close_may_be_repeated(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")
    timeline.close()
    timeline.span("compute", 0, 1)
    timeline.close()
    assert len(_lines(timeline.path)) == 1


def test_every_recorder_has_a_file_and_a_header_of_its_own(tmp_path: Path) -> None:
    # As with two states in one process, or a process that has the number of one long gone.
    recorders = [Timeline(tmp_path, rank=0, device="d") for _ in range(3)]
    for place, recorder in enumerate(recorders):
        recorder.span(f"kind{place}", 0, 1)
        recorder.close()
    name = f"rank0-{os.getpid()}"
    assert [each.path.name for each in recorders] == [f"{name}.jsonl", f"{name}-2.jsonl", f"{name}-3.jsonl"]
    assert [[line.get("kind") for line in _lines(each.path)] for each in recorders] == [
        [None, f"kind{place}"] for place in range(3)
    ]


def test_threads_lose_and_mix_nothing(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")

    def record(thread: int) -> None:
        for index in range(1000):
            timeline.span("compute", index, index + 1, thread=thread)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    spans = _lines(timeline.path)[1:]
    for number in range(4):
        assert [span["begin_s"] for span in spans if span["thread"] == number] == list(range(1000))


def test_a_process_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from crossover_ddp._timeline.record import Timeline\n"
        "def main():\n    Timeline(sys.argv[1], rank=0, device='d').span('compute', 0, 1)\n"
        "main()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    assert [line.get("kind") for line in _lines(path)] == [None, "compute"]


def test_a_forked_child_does_not_repeat_its_parents_spans(tmp_path: Path) -> None:
    script = (
        "import os, sys; from crossover_ddp._timeline.record import Timeline\n"
        "timeline = Timeline(sys.argv[1], rank=0, device='d'); timeline.span('compute', 0, 1)\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    assert len(_lines(path)) == 2


def test_unwritable_directory_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        timeline = Timeline(tmp_path / "file" / "below", rank=0, device="d")
        timeline.span("compute", 0, 1)
        timeline.close()
    assert len(caplog.records) == 1
    assert "no timeline is recorded" in caplog.text
