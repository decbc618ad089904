"""What the hooks cost a lone job, and what turns bring two siblings, on the emulated cluster."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Cluster, why_not_shaped
from studies import siblings
from tests.benchmarks.conftest import BenchForm

REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(REASON is not None, reason=f"no emulated network: {REASON}"),
]
SPLIT_LIMIT = 1 / 0.97
LONE_LIMIT = 1.01
OF_BOUND_LIMIT = 0.90
RATE_MBIT = 150.0
PRESET = {"smoke": "tiny", "full": "vit"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, rate_mbit=RATE_MBIT) as made:
        yield made


def step_ratio(
    cluster: Cluster, out: Path, form: BenchForm, hooks: tuple[str, str], repeats: int
) -> dict[str, Any]:
    """Alternate a lone job under two hooks; return how the second one's steps compare with the first one's."""
    steps = 12 if form == "full" else 1
    pair = siblings.Siblings(cluster, PRESET[form], out)
    ratios, wires, results = [], [], set()
    for repeat in range(repeats if form == "full" else 1):
        runs = {hook: pair.run(hook, steps, ["a"]) for hook in (hooks if repeat % 2 else hooks[::-1])}
        ratios.append(runs[hooks[1]].mean("step_s") / runs[hooks[0]].mean("step_s"))
        wires.append(runs[hooks[1]].mean("wire_bytes") / runs[hooks[0]].mean("wire_bytes"))
        results |= {str(run.results("a")) for run in runs.values()}
    pair.close()
    assert len(results) == 1, "both hooks must give the same losses and parameters"
    return {"time_ratio": statistics.median(ratios), "wire_ratio": statistics.median(wires), "ratios": ratios}


def test_split_hook_against_plain_ddp(
    cluster: Cluster, tmp_path: Path, bench_form: BenchForm, benchmark: Any
) -> None:
    if bench_form == "smoke":
        pytest.skip("the smoke form runs the next test, of the same code; `make bench` runs both")
    found = benchmark.pedantic(
        step_ratio, (cluster, tmp_path, bench_form, ("none", "rsag"), 10), rounds=1, iterations=1
    )
    benchmark.extra_info.update(found)
    assert found["wire_ratio"] == pytest.approx(1.0, abs=0.02)
    assert found["time_ratio"] <= SPLIT_LIMIT


@pytest.mark.usefixtures("forked_lab")
def test_lone_job_with_crossover_hook_against_split_hook(
    cluster: Cluster, tmp_path: Path, bench_form: BenchForm, benchmark: Any
) -> None:
    found = benchmark.pedantic(
        step_ratio, (cluster, tmp_path, bench_form, ("rsag", "crossover"), 10), rounds=1, iterations=1
    )
    benchmark.extra_info.update(found)
    if bench_form == "full":
        assert found["time_ratio"] <= LONE_LIMIT


@pytest.mark.usefixtures("forked_lab")
@pytest.mark.parametrize("preset", ["convnet", "vit", "gpt", "tiny"])
@pytest.mark.timeout(1800)
def test_two_siblings_against_one_after_the_other(
    preset: str, tmp_path: Path, bench_form: BenchForm, benchmark: Any
) -> None:
    if (bench_form == "smoke") != (preset == "tiny"):
        pytest.skip("the smoke form runs the tiny model alone; `make bench` runs the three others")
    full = ["--ratio", "0.5", "0.75", "1.0", "--repeats", "5", "--steps", "12"]
    smoke = ["--ratio", "1.0", "--repeats", "1", "--steps", "1"]
    arguments = ["--preset", preset, "--out", str(tmp_path), *(full if bench_form == "full" else smoke)]
    rows = benchmark.pedantic(siblings.main, (arguments,), rounds=1, iterations=1)
    for row in rows:
        benchmark.extra_info[str(row["ratio"])] = {key: value for key, value in row.items() if key != "runs"}
    if bench_form == "full":
        assert all(row["of_bound"] >= OF_BOUND_LIMIT for row in rows)
        assert all(row["over_unmanaged"] >= 1.0 for row in rows)
