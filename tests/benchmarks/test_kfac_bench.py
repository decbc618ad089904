"""K-FAC's steps against the split hook's, and factors that leave early against those that ride in the buckets."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import BenchForm
from .kfac_plan import Plan
from .kfac_runs import KfacRuns, measure_kfac
from .pairs import why_not_shaped

_REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}"),
]
# Preconditioning is two products per layer on its owner, a fifth of a step of this model.
PLAIN_LIMIT = 1.3
WIRE_LIMIT = 1.02
RATE_MBIT = 500.0
# Triangles: more samples per rank than half the width.
FULL = {"layers": 8, "width": 768, "samples": 512, "steps": 30}
SMOKE = {"layers": 3, "width": 192, "samples": 96, "steps": 6}


@pytest.mark.usefixtures("forked_lab")
@pytest.mark.timeout(900)
def test_kfac_steps_against_the_split_hook(bench_form: BenchForm, benchmark: Any, tmp_path: Path) -> None:
    plan = Plan(("split", "kfac", "early", "local"), **(FULL if bench_form == "full" else SMOKE))
    options = {"rate_mbit": RATE_MBIT}
    ranks: list[KfacRuns] = benchmark.pedantic(measure_kfac, (tmp_path, plan), options, rounds=1)
    # The slowest rank decides, as in training.
    benchmark.extra_info.update(
        {name: max(figures(run)[name] for run in ranks) for name in figures(ranks[0])}
    )
    found = benchmark.extra_info
    assert found["plain wire ratio"] < (WIRE_LIMIT if bench_form == "full" else 1.1)
    assert found["local wire ratio"] < (WIRE_LIMIT if bench_form == "full" else 1.1)
    assert found["early wire ratio"] == pytest.approx(1, abs=0.1), "the same bytes at another time"
    if bench_form == "full":
        assert found["plain time ratio"] <= PLAIN_LIMIT, found


def figures(run: KfacRuns) -> dict[str, float]:
    """Return ratios of time and of wire bytes: K-FAC to the split hook, early factors to those in the buckets."""
    pairs = {
        "plain": ("kfac", "split", "plain"),
        "factor": ("kfac", "split", "factors"),
        "solver": ("kfac", "split", "solvers"),
        "early": ("early", "kfac", "both"),
        "early factor": ("early", "split", "both"),
        "local": ("local", "split", "factors"),
    }
    return {
        f"{name} {what} ratio": run.ratio(way, of_way, kind, figure)
        for name, (way, of_way, kind) in pairs.items()
        for what, figure in (("time", "time_s"), ("wire", "wire_bytes"))
    }
