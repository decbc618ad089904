"""Decoupled training against plain DDP, FSDP2 and ZeRO, on the emulated cluster."""

from pathlib import Path
from typing import Any

import pytest

from lab import why_not_shaped
from studies import decoupled
from tests.benchmarks.conftest import BenchForm

REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}"),
]
OF_LIMIT = 0.90
BEST_SPEED_UP = 1.20
UNSHAPED_SPEED_UP = 0.98
SMOKE = ["--preset", "tiny", "--ratio", "1.0", "--repeats", "1", "--other-repeats", "1", "--steps", "4"]
SMOKE += ["--warm-up", "5"]
FULL = ["--preset", "convnet", "deep_vit", "convnext", "--ratio", "0.75", "1.0", "1.25", "1.5", "2.0"]


@pytest.mark.usefixtures("forked_lab")
@pytest.mark.timeout(7200)
def test_decoupled_against_the_others(tmp_path: Path, bench_form: BenchForm, benchmark: Any) -> None:
    arguments = [*(FULL if bench_form == "full" else SMOKE), "--out", str(tmp_path)]
    rows = benchmark.pedantic(decoupled.main, (arguments,), rounds=1, iterations=1)
    for row in rows:
        name = f"{row['preset']} {row['ratio']}"
        benchmark.extra_info[name] = {key: value for key, value in row.items() if key != "runs"}
        assert row["wire_ratio"] == pytest.approx(1.0, abs=0.05 if bench_form == "full" else 0.5)
    if bench_form == "full":
        assert all(row["of_limit"] >= OF_LIMIT for row in rows if row["ratio"] >= 1.0)
        assert max(row["speed_up"]["ddp"] for row in rows) >= BEST_SPEED_UP
        assert all(row["speed_up"][way] > 1.0 for row in rows for way in ("fsdp", "zero"))


@pytest.mark.timeout(3600)
def test_decoupled_on_a_fast_link(tmp_path: Path, bench_form: BenchForm, benchmark: Any) -> None:
    if bench_form == "smoke":
        pytest.skip("one run says nothing of a difference of 2 %; `make bench` takes five")
    arguments = ["--preset", "deep_vit", "--ratio", "0", "--way", "ddp", "decoupled", "--out", str(tmp_path)]
    [row] = benchmark.pedantic(decoupled.main, (arguments,), rounds=1, iterations=1)
    benchmark.extra_info.update({key: value for key, value in row.items() if key != "runs"})
    assert row["speed_up"]["ddp"] >= UNSHAPED_SPEED_UP
