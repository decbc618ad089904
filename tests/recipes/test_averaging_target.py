"""The study of time to target: what counts as reached, whose seconds count, and that the picture can be drawn."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from studies import averaging_target
from studies.averaging_target import seconds_to, steps_to, summarize


def answers(losses: list[float], *times_s: list[float]) -> list[dict[str, Any]]:
    return [{"losses": losses, "times_s": each} for each in times_s]


def test_the_first_judgement_at_the_target_counts() -> None:
    assert steps_to([2.0, 1.0, 0.5, 0.7], 1.0, 10) == 20
    assert math.isinf(steps_to([2.0, math.nan], 1.0, 10))


def test_the_slowest_rank_between_two_judgements_counts() -> None:
    assert seconds_to(answers([2.0, 1.0, 0.5], [1.0, 2.0, 9.0], [3.0, 1.0, 9.0]), 1.0) == 5.0
    assert math.isinf(seconds_to(answers([2.0], [1.0], [1.0]), 1.0))


def row_of(seconds: dict[str, float]) -> dict[str, Any]:
    runs = [
        {way: answers([2.0, 0.5], [each, each], [each, each]) for way, each in seconds.items()}
        for _ in range(3)
    ]
    tuned = {way: {"rate": 0.1} for way in seconds}
    return summarize(runs, 3.0, 0.1, tuned, argparse.Namespace(task="mlp", slow=1.0, judge_every=10), 1.0)


def test_the_best_of_ours_is_compared_with_ddp_and_with_the_best_of_the_plain_ways() -> None:
    row = row_of({"ddp": 4.0, "fp16": 3.0, "accumulation": 2.0, "delayed": 1.0, "wild": 1.5})
    assert row["over_ddp"] == pytest.approx(4.0)
    assert row["over_best_plain"] == pytest.approx(2.0)
    assert row["steps"]["ddp"] == 20
    assert row["step_s"]["fp16"] == pytest.approx(0.3)


def test_the_picture_has_a_panel_for_each_row(tmp_path: Path) -> None:
    averaging_target.draw([row_of({"ddp": 2.0, "delayed": 1.0})] * 2, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
