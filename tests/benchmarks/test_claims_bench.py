"""The cost of hooks for a lone job, and the gain of turns and decoupled training, in the lab."""

from pathlib import Path
from typing import Any

import pytest

from lab import why_not_shaped
from studies import run

REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}"),
]
SMOKE = ["--preset", "tiny", "--ratio", "1.0", "--repeats", "1", "--steps", "2"]
# The factor that each way must reach, and below the part of its bound.
LEAST = {
    "split": {"split": 0.97},
    "lone": {"turns": 0.99},
    "siblings": {"turns": 1.0},
    "decoupled": {"decoupled": 0.98},
}
LEAST_OF_BOUND = 0.90
IN_SMOKE = ("lone",)  # the others run the same code


@pytest.mark.usefixtures("forked_lab")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("claim", LEAST)
def test_a_claim_holds(claim: str, tmp_path: Path, is_full: bool, benchmark: Any) -> None:
    if not is_full and claim not in IN_SMOKE:
        pytest.skip("the smoke form runs one claim; `make bench` runs all")
    arguments = ["--claim", claim, "--out", str(tmp_path), *([] if is_full else SMOKE)]
    rows = benchmark.pedantic(run.main, (arguments,), rounds=1, iterations=1)
    benchmark.extra_info["rows"] = rows
    for row in rows:
        assert row["bytes"] == pytest.approx(
            dict.fromkeys(row["bytes"], 1.0), abs=0.05 if is_full else 0.5
        )
        for way, least in LEAST[claim].items() if is_full else ():
            assert row["factor"][way] >= least, row
            bound = LEAST_OF_BOUND * (row["bound"] or 0)
            assert row["m_s"] < row["c_s"] or row["factor"][way] >= bound, row
