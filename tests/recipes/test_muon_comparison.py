"""The comparison with other Muons, but for their packages, which are not to be had from a registry."""

from pathlib import Path
from typing import Any

import pytest

from studies import muon_comparison


def answers(owners_s: float, losses: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
    def ranks(way: str, step_s: float) -> list[dict[str, Any]]:
        sent = 1.5e6 if way == "keller" else 1e6
        one = {"step_s": step_s, "core_busy_s": 0.5, "wire_bytes": sent, "losses": [losses.get(way, 2.0)] * 9}
        return [one, {**one, "step_s": step_s - 0.1}]

    return {
        "ddp": ranks("ddp", 3.0),
        "owners": ranks("owners", owners_s),
        "layers": ranks("layers", 1.5),
        "keller": ranks("keller", 6.0),
    }


def test_ratios_are_of_one_round_and_of_its_slowest_rank() -> None:
    row = muon_comparison.summarize("vit", 1.0, 8.0, [answers(seconds, {}) for seconds in (1.0, 2.0, 3.0)])
    assert row["owners_over"] == {"ddp": [1.0, 1.5, 3.0], "keller": [2.0, 3.0, 6.0]}
    assert row["bytes_over_ddp"] == {"ddp": 1.0, "owners": 1.0, "layers": 1.0, "keller": 1.5}
    assert row["m_s"] == pytest.approx(1.0, rel=0.1)


def test_losses_that_part_end_the_comparison() -> None:
    muon_comparison.check_losses(answers(1.0, {"keller": 2.001}))
    with pytest.raises(RuntimeError, match="the same losses"):
        muon_comparison.check_losses(answers(1.0, {"keller": 2.1}))
    with pytest.raises(RuntimeError, match="to the last bit from layers"):
        muon_comparison.check_losses(answers(1.0, {"layers": 2.0000001}))


def test_a_directory_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        muon_comparison.main(["--keller", str(tmp_path)])
    assert "expected a checkout with muon.py" in capsys.readouterr().err
