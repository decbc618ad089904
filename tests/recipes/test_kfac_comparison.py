"""The comparison with kfac-pytorch, but for the package itself, which is not to be had from a registry."""

from pathlib import Path
from typing import Any

import pytest

from studies import kfac_comparison


def answers(*, kfac_s: float, losses: list[float]) -> dict[str, list[dict[str, Any]]]:
    def rank(step_s: float) -> dict[str, Any]:
        return {"step_s": step_s, "core_busy_s": 0.5, "wire_bytes": 1e6, "losses": losses}

    return {
        "sgd": [rank(1.0)] * 2,
        "kfac-pytorch": [rank(4.0)] * 2,
        "kfac": [rank(kfac_s), rank(kfac_s - 0.5)],
        "decoupled": [rank(kfac_s - 1.0)] * 2,
    }


def test_ratios_are_of_one_round_and_of_its_slowest_rank() -> None:
    rounds = [answers(kfac_s=seconds, losses=[1.0]) for seconds in (2.0, 3.0, 4.0)]
    row = kfac_comparison.summarize("cnn", (10, 100), rounds)
    assert row["over_peer"] == [0.5, 0.75, 1.0]
    assert row["decoupled_over_peer"] == [0.25, 0.5, 0.75]
    assert row["over_sgd"] == 3.0
    assert row["step_s"] == {"sgd": 1.0, "kfac-pytorch": 4.0, "kfac": 3.0, "decoupled": 2.0}


class FakeRanks:
    """Answers with other losses for one of our ways."""

    def __init__(self, difference: float, parts: str = "kfac") -> None:
        self._difference = difference
        self._parts = parts

    def run(self, way: str, steps: int, periods: tuple[int, int]) -> list[dict[str, Any]]:
        losses = [2.0 + (self._difference if way == self._parts else 0.0)] * steps
        return answers(kfac_s=1.0, losses=losses)[way]


@pytest.mark.parametrize("parts", kfac_comparison.OURS)
def test_losses_that_part_end_the_comparison(parts: str) -> None:
    near: Any = FakeRanks(1e-4, parts)
    far: Any = FakeRanks(0.1, parts)
    assert set(kfac_comparison.measure_round(near, 12, (1, 1), 0)) == set(kfac_comparison.WAYS)
    with pytest.raises(RuntimeError, match=r"expected both K-FACs to follow the same losses, got 5\.0e-02"):
        kfac_comparison.measure_round(far, 12, (1, 1), 0)


def test_a_directory_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kfac_comparison.main(["--peer", str(tmp_path)])
    assert "expected a checkout of kfac-pytorch" in capsys.readouterr().err
