"""The study of what averaging costs in loss: ways of training on copies, intervals, and that it runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from studies._loss_tasks import STUDENT, ShiftedDigits, SmallGPT, interval
from tests.benchmarks import averaging_loss
from tests.benchmarks.averaging_loss import WAYS, EveryStep, WildWalk
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.replicas import Copies, flat

# Ways that differ in their interval alone are tried with the least and the greatest.
CHOSEN = [way for way in WAYS if IN_CAMPAIGN or way not in ("local-4", "local-8", "local-16", "local-32")]
STEPS = 12  # every interval but those of 16 and more has ended


def copies_of_a_line(ranks: int, rate: float = 0.1) -> Copies:
    """Each copy has one number, and its own target: gradients are known."""
    torch.manual_seed(0)
    models = [nn.Linear(1, 1, bias=False) for _ in range(ranks)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def gradients(rank: int) -> None:
        (models[rank].weight - float(rank)).pow(2).sum().mul(0.5).backward()

    return Copies(models, [torch.optim.SGD(model.parameters(), rate) for model in models], gradients)


def values(copies: Copies) -> list[float]:
    return [float(flat(model)) for model in copies.models]


def test_accumulated_batches_make_one_update_with_their_mean() -> None:
    copies = copies_of_a_line(2)
    start = values(copies)[0]
    walk = EveryStep(copies, batches=4)
    for _ in range(3):
        walk.step()
        assert values(copies) == [start, start]
    walk.step()
    assert values(copies) == pytest.approx([start - 0.1 * (start - 0.5)] * 2)


def test_a_slow_copy_makes_fewer_steps_and_pulls_are_conserved() -> None:
    copies = copies_of_a_line(3, rate=0.0)
    for rank, model in enumerate(copies.models):
        nn.init.constant_(model.weight, float(rank))
    walk = WildWalk(copies, 2, [1, 1, 3])
    before = sum(values(copies)) + float(walk._centre)
    for _ in range(12):
        walk.step()
    assert walk._done == [12, 12, 4]
    assert sum(values(copies)) + float(walk._centre) == pytest.approx(before, abs=1e-5)
    assert max(values(copies)) - min(values(copies)) < 1.5, "copies have not come closer"


def test_the_interval_is_students() -> None:
    mean, half = interval([0.01, 0.02, 0.03])
    assert mean == pytest.approx(0.02)
    assert half == pytest.approx(STUDENT[1] * 0.01 / 3**0.5)
    assert interval([0.5])[1] == float("inf")


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(averaging_loss, "TUNING_SEEDS", 1)  # each task has one learning rate here
    short = ["--seeds", "2", "--steps", str(STEPS), "--ranks", "2", "--points", "2", "--out", str(tmp_path)]
    return averaging_loss.main([*short, *words])


def test_all_ways_train_on_as_many_samples_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShiftedDigits, "rates", (0.1,))
    rows = run(tmp_path, monkeypatch, "--way", *CHOSEN)
    assert [row["way"] for row in rows] == CHOSEN
    assert rows[0]["relative"] == 0.0
    for row in rows:
        assert row["samples"] == STEPS * 2 * 16
        assert len(row["curves"]) == 2 and len(row["curves"][0]) == 2
        # All steps are in the warm-up of 64, which is plain DDP.
        as_ddp = row["way"] == "ddp" or row["way"].startswith("warmed")
        assert (row["relative"] == 0.0) == as_ddp, f"{row['way']} against plain DDP"
    times = {"c_s": 0.1, "m_s": 0.3, "ratio": 3.0, "slow": 1.0}
    times |= {"step_s": {way.timed_as: 0.1 for way in WAYS.values()}, "fastest_s": {"wild": 0.1}}
    (tmp_path / "averaging.json").write_text(json.dumps([times]))
    averaging_loss.draw_losses(rows, averaging_loss.times_of(tmp_path), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_the_gpt_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallGPT, "rates", (3e-3,))
    ddp, streamed = run(tmp_path, monkeypatch, "--task", "gpt", "--way", "streamed-8", "--steps", "24")
    for row in (ddp, streamed):
        for curve in row["curves"]:
            assert curve[-1] < curve[0] < 7.0
