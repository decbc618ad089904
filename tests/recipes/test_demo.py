"""The demo: its figures from made-up logs, and a complete run with few steps and small images."""

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

import demo
import lab
from demo_figures import (
    AFTER,
    CROSSOVER,
    UNMANAGED,
    Outcome,
    differences,
    outcome_of,
    summarize,
    verdict,
)

SMALL = ("--image-size", "16", "--batch-size", "32")


def log(begin_s: float = 10.0) -> list[Any]:
    """Return the log of a rank whose steps take one second each."""
    steps = [
        {
            "event": "step",
            "step": i,
            "loss": 2.0 - i,
            "begin_s": begin_s + i,
            "end_s": begin_s + i + 1,
        }
        for i in range(2)
    ]
    end = [{"event": "eval", "accuracy": 0.9}, {"event": "end", "parameters_sha256": "d"}]
    return [{"event": "start", "at_s": begin_s - 7}, *steps, *end]


def outcome(begin_s: float, end_s: float) -> Outcome:
    return Outcome(begin_s, end_s, [(2.0, 1.0)], ["d"], 0.9)


def summary(crossover_s: float, unmanaged_s: float = 20.0) -> dict[str, Any]:
    """Return the figures of two jobs of 10 s each, with C and M of 0.8 of the time."""
    alone = {"a": outcome(0, 10), "b": outcome(20, 30)}
    together = {
        UNMANAGED: {"a": outcome(50, 50 + unmanaged_s), "b": outcome(50.5, 49 + unmanaged_s)},
        CROSSOVER: {"a": outcome(80, 80 + crossover_s), "b": outcome(80.5, 80 + crossover_s - 1)},
    }
    cost = {"step_s": 0.1, "compute_s": 0.08, "exposed_s": 0.02, "wire_s": 0.08}
    return summarize(alone, together, dict.fromkeys("ab", cost))


def test_outcome_leaves_out_start_up_and_evaluation() -> None:
    found = outcome_of([log(10.0), log(10.5)])
    assert found == Outcome(10.0, 12.5, [[2.0, 1.0], [2.0, 1.0]], ["d", "d"], 0.9)
    with pytest.raises(ValueError, match="expected steps, an evaluation and an end"):
        outcome_of([log()[:-1]])


@pytest.mark.parametrize(
    ("second", "digest", "found"),
    [
        ((2.0, float("nan")), "d", []),
        ((2.0, 1.0), "d", ["job a, rank 1: other losses from step 1 on"]),
        ((2.0,), "d", ["job a, rank 1: other losses from step 1 on"]),
        (
            (math.nextafter(2.0, 3), float("nan")),
            "d",
            ["job a, rank 1: other losses from step 0 on"],
        ),
        ((2.0, float("nan")), "e", ["job a: other parameters at the end"]),
    ],
)
def test_differences_name_job_rank_and_step(
    second: tuple[float, ...], digest: str, found: list[str]
) -> None:
    expected = Outcome(0, 1, [(2.0, 1.0), (2.0, float("nan"))], ["d", "d"], 0.9)
    got = Outcome(0, 1, [(2.0, 1.0), second], ["d", digest], 0.9)
    assert differences({"a": expected}, {"a": got}) == found


@pytest.mark.parametrize(
    ("crossover_s", "unmanaged_s", "meaning"),
    [
        (
            16.0,
            20.0,
            r"16\.0 s instead of 20\.0 s .*1\.25× as fast .* and 1\.25× as fast as .*unmanaged",
        ),
        (14.0, 20.0, r"above the bound of 1\.25×: something has slowed the runs alone"),
        (17.6, 16.0, "0.91× as fast as side by side unmanaged"),
        (20.0, 20.0, r"did not pay here: 20\.0 s .* 1\.25× was possible"),
    ],
)
def test_verdict_follows_the_figures(crossover_s: float, unmanaged_s: float, meaning: str) -> None:
    sentence = verdict(summary(crossover_s, unmanaged_s), shaped=True)
    assert re.search(meaning, sentence), sentence
    assert "bit for bit" in sentence


def test_different_losses_are_shown_in_verdict_and_table() -> None:
    figures = summary(16.0)
    figures["variants"][CROSSOVER]["differences"] = ["job a, rank 0: other losses from step 3 on"]
    figures |= {"identical": False, "dropped_packets": 0, "load_before": 2.5}
    assert verdict(figures, shaped=True).startswith("Something is wrong")
    assert list(demo.warnings(figures)) == [
        "crossover: job a, rank 0: other losses from step 3 on than alone",
        "Other processes used the machine before (load 2.5): all times are rough.",
    ]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(demo.make_table(figures))
    lines = [line.split("│") for line in captured.get().splitlines() if "×" in line]
    assert [cells[1].strip() for cells in lines] == [
        AFTER,
        UNMANAGED,
        CROSSOVER,
        "at best (bound S)",
    ]
    assert "DIFFERENT" in captured.get()


@pytest.mark.usefixtures("forked_lab")
def test_the_whole_demo_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an emulated network if this machine can have one."""
    is_shaped = lab.why_not_shaped() is None
    options = ["--ratio", "0.5"] if is_shaped else ["--unshaped"]
    with mock.patch.object(demo, "CALIBRATION_STEPS", 5):
        assert demo.main(["--out", str(tmp_path), "--steps", "5", *options, *SMALL]) == 0
    figures: dict[str, Any] = json.loads((tmp_path / "demo.json").read_text())
    assert figures["identical"]
    assert list(figures["variants"]) == [AFTER, UNMANAGED, CROSSOVER]
    assert all(set(each["accuracy"]) == {"a", "b"} for each in figures["variants"].values())
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert (figures["rate_mbit"] is not None) == is_shaped
    assert figures["bound"] >= 1
    assert figures["crossover_run"]["jobs"]["a"]["turns"] > 0
    assert ("at best (bound S)" if is_shaped else "no wire time to fill") in printed


def test_a_failing_job_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(lab.Cluster, "run", side_effect=lab.JobFailedError("my own words")):
        assert demo.main(["--out", str(tmp_path), "--unshaped", "--steps", "5"]) == 1
    shown = capsys.readouterr().out
    assert "my own words" in shown
    assert "No network is emulated: --unshaped was given." in shown
    assert "no speed-up" in shown
