"""The study of time to target: what counts as reached, whose seconds count, and that the picture can be drawn."""

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

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


class RanksThatLearn:
    """Answers as two ranks do: the loss falls with the steps, and faster with a rate of 0.12."""

    orders: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, *_: Any) -> None: ...

    def run(self, **order: Any) -> list[dict[str, Any]]:
        self.orders.append(order)
        judged = order["steps"] // order["judge_every"]
        losses = [2.0 - n * (0.2 if order["rate"] == 0.12 else 0.1) for n in range(1, judged + 1)]
        losses = [loss for loss in losses if loss > order.get("target", 0.0) - 0.2]
        return [
            {"losses": losses, "times_s": [1.0] * len(losses), "core_busy_s": 0.01, "wire_bytes": 1e6}
        ] * 2

    def close(self) -> None: ...


def test_all_ways_are_tuned_alike_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging_target, "Ranks", RanksThatLearn)
    monkeypatch.setattr(averaging_target, "Cluster", MagicMock())
    RanksThatLearn.orders.clear()
    words = ["--way", "delayed", "powersgd", "--repeats", "2", "--out", str(tmp_path)]
    (row,) = averaging_target.main(words)
    tuned = json.loads((tmp_path / "mlp" / "tuned.json").read_text())
    assert {way: each["rate"] for way, each in tuned.items()} == dict.fromkeys(
        ["ddp", "delayed", "powersgd"], 0.12
    )
    tuning = [order for order in RanksThatLearn.orders if order["seed"] == averaging_target.TUNING_SEED]
    assert Counter(order["way"] for order in tuning) == dict.fromkeys(tuned, len(averaging_target.RATES))
    assert row["repeats"] == 2
    assert row["over_best_plain"] == pytest.approx(1.0)
    RanksThatLearn.orders.clear()
    averaging_target.main([*words, "--whole", "--slow", "3", "--picture", str(tmp_path / "loss.png")])
    assert not [order for order in RanksThatLearn.orders if order["seed"] == averaging_target.TUNING_SEED]
    assert (tmp_path / "loss.png").exists()
