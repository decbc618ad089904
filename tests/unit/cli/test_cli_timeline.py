"""``crossover-ddp timeline``: what it prints, writes and returns."""

import builtins
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp import cli
from tests.unit.timeline.made_up_recordings import compute, write
from tests.unit.timeline.made_up_spans import siblings


def record(directory: Path) -> Path:
    """Write what two jobs that take turns on two devices of one host would have recorded."""
    for job in "ab":
        for rank in (0, 1):
            spans = [
                {"kind": s.kind, "begin_s": s.begin_s, "end_s": s.end_s, "step": 1}
                for s in siblings(20)
                if (s.job, s.rank) == (job, rank)
            ]
            write(directory / job, spans, job=f"id-{job}", rank=rank, device=f"device{rank}")
    return directory


def test_table_trace_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = record(tmp_path / "runs")
    trace, picture = tmp_path / "out" / "trace.json", tmp_path / "out" / "x.svg"
    arguments = ["timeline", str(runs), "--trace", str(trace), "--picture", str(picture)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "2 jobs on 2 devices, 4 recordings, 240 spans, 41.0 s" in printed
    assert "one clock, nothing to align" in printed
    row = next(line.split() for line in printed.splitlines() if "device0" in line)
    assert row == ["device0", "100%", "0%", "50%", "39", "1", "ms"]
    row = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["a"])
    assert row == ["a", "49%", "26%", "26%", "19", "1", "ms"]
    assert str(trace) in printed.replace("\n", "") and str(picture) in printed.replace("\n", "")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 240
    assert "<svg" in picture.read_text()


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["timeline", "--json", *arguments]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_says_the_same_and_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, str(record(tmp_path)))
    assert (document["jobs"], document["recordings"], document["spans"]) == (["a", "b"], 4, 240)
    assert document["clocks"]["says"] == "one clock, nothing to align"
    device = document["devices"][0]
    assert (device["device"], device["host"], device["turns"]) == ("device0", "h0", 39)
    assert device["idle"] == pytest.approx(0.001)
    assert device["busy"] + device["idle"] == pytest.approx(1)
    assert device["window_s"] == [1.0, 40.0]
    assert device["handover"]["median_s"] == pytest.approx(0.001)
    assert [job["turns"] for job in device["jobs"]] == [19, 20]
    assert (document["problems"], document["trace"], document["picture"]) == ([], None, None)


def test_a_chosen_window_is_that_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(record(tmp_path))
    document = as_json(capsys, directory, "--from", "10", "--to", "12")
    assert document["devices"][0]["window_s"] == [10.0, 12.0]
    assert document["devices"][0]["turns"] == 2
    assert as_json(capsys, directory, "--from", "30")["devices"][0]["window_s"] == [30.0, 41.0]


def test_hosts_clocks_are_part_of_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [compute(100, 101)])
    write(tmp_path, [compute(30, 31)], rank=1, pid=2, clock="c1", host="h1", device="d1", monotonic_s=30.0)
    clocks = as_json(capsys, str(tmp_path))["clocks"]
    assert clocks["shifts_s"] == {"c0": 0, "c1": 70}
    assert "placed by their wall clocks" in clocks["says"]


def test_a_foreign_file_costs_the_exit_code_and_not_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path) / "a" / "rank9-9.jsonl"
    path.write_text("epoch 1\n")
    document = as_json(capsys, str(tmp_path), code=1)
    assert document["spans"] == 240
    assert (document["problems"][0]["path"], document["problems"][0]["line"]) == (str(path), 1)
    assert cli.main(["timeline", str(tmp_path)]) == 1
    words = "".join(capsys.readouterr().out.split())  # lines break where the directory's length makes them
    assert "rank9-9.jsonl:1:expectedtheheaderofatimeline" in words


def test_no_spans_says_how_to_record_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(tmp_path)]) == 1
    assert "no spans found; start the jobs with CROSSOVER_TIMELINE=DIR" in capsys.readouterr().out
    assert as_json(capsys, str(tmp_path), code=1)["spans"] == 0


@pytest.mark.parametrize(
    ("arguments", "meaning"),
    [
        (
            ["--from", "9", "--to", "5"],
            "expected 0 <= --from < --to, and --from before the end of the run at 41.000 s",
        ),
        (["--from", "-1"], "expected 0 <= --from"),
        (["--from", "99"], "got 99.000 to 41.000 s"),
        (["--trace", "/proc/no/trace.json"], "/proc/no"),
    ],
)
def test_wrong_usage_is_told(
    arguments: list[str], meaning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["timeline", str(record(tmp_path)), *arguments]) == 2
    assert meaning in capsys.readouterr().err


def test_a_missing_directory_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(tmp_path / "nowhere")]) == 2
    assert "expected a directory with timelines" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--picture", "x.gif"], ["--from", "noon"], ["--to", "nan"]])
def test_arguments_that_cannot_be_read(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["timeline", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert "expected a" in capsys.readouterr().err


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    arguments = ["timeline", "--json", str(record(tmp_path))]
    assert cli.main([*arguments, "--picture", "x.png"]) == 2
    assert "pip install 'crossover_ddp[picture]'" in capsys.readouterr().err
    assert cli.main(arguments) == 0


def test_json_needs_neither_rich_nor_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] in ("rich", "matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert as_json(capsys, str(record(tmp_path)), "--trace", str(tmp_path / "t.json"))["spans"] == 240
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "rich" in capsys.readouterr().err
