"""What K-FAC puts on the wire, counted on the interface: the gradient's bytes, and factors only where due."""

import statistics
from functools import cache

import pytest

from tests.benchmarks.kfac_plan import Plan
from tests.benchmarks.kfac_runs import KfacRuns, measure_kfac
from tests.benchmarks.pairs import why_not_shaped

_REASON = why_not_shaped()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}"),
]
LAYERS, WIDTH = 4, 256
SAMPLES = {"columns": 32, "triangles": 256}
HEADERS = 1.009
WIRE, PACKINGS = 0.02, 0.03


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, forked_lab_of_module: None
) -> "dict[str, list[KfacRuns]]":
    @cache
    def measured(form: str) -> list[KfacRuns]:
        plan = Plan(("ddp", "split", "kfac", "early", "local"), LAYERS, WIDTH, SAMPLES[form], cap_mb=1.0)
        return measure_kfac(tmp_path_factory.mktemp(form), plan, rate_mbit=2000)

    return {form: measured(form) for form in SAMPLES}


def mean_bytes(run: KfacRuns, way: str, *kinds: str) -> float:
    return statistics.fmean(value for kind in kinds for value in run.of(way, kind, "wire_bytes"))


def every(run: KfacRuns, way: str) -> float:
    return mean_bytes(run, way, "plain", "factors", "solvers", "both")


def packing_bytes(run: KfacRuns, way: str, form: str) -> int:
    """Return what a rank sends to the other one's layers: how A and G of each come, and either as it is smaller."""
    numel = SAMPLES["columns"] * WIDTH if form == "columns" else WIDTH * (WIDTH + 1) // 2 + 1
    others = [owner for owner in run.owners[way] if owner != run.rank]
    return 4 * len(others) * 2 * (1 + numel)


@pytest.mark.parametrize("form", SAMPLES)
def test_plain_steps_cost_what_the_split_and_plain_ddp_cost(
    form: str, found: "dict[str, list[KfacRuns]]"
) -> None:
    for run in found[form]:
        gradient = 4 * LAYERS * WIDTH**2
        assert every(run, "ddp") / gradient == pytest.approx(HEADERS, abs=WIRE)
        for way in ("kfac", "early"):
            plain = mean_bytes(run, way, "plain")
            assert plain / every(run, "split") == pytest.approx(1, abs=WIRE), way
            assert plain / every(run, "ddp") == pytest.approx(1, abs=WIRE), way


@pytest.mark.parametrize("form", SAMPLES)
@pytest.mark.parametrize("way", ["kfac", "early"])
def test_factors_cost_one_reduction_of_what_they_hold(
    way: str, form: str, found: "dict[str, list[KfacRuns]]"
) -> None:
    for run in found[form]:
        extra = mean_bytes(run, way, "factors") - mean_bytes(run, way, "plain")
        assert extra / packing_bytes(run, way, form) == pytest.approx(HEADERS, abs=PACKINGS)


@pytest.mark.parametrize("form", SAMPLES)
@pytest.mark.parametrize("way", ["kfac", "early"])
def test_new_solvers_cost_nothing(way: str, form: str, found: "dict[str, list[KfacRuns]]") -> None:
    for run in found[form]:
        for without, with_solvers in (("plain", "solvers"), ("factors", "both")):
            ratio = mean_bytes(run, way, with_solvers) / mean_bytes(run, way, without)
            assert ratio == pytest.approx(1, abs=WIRE), (without, with_solvers)


@pytest.mark.parametrize("form", SAMPLES)
def test_local_factors_never_travel(form: str, found: "dict[str, list[KfacRuns]]") -> None:
    for run in found[form]:
        for kind in ("plain", "factors", "solvers", "both"):
            ratio = mean_bytes(run, "local", kind) / every(run, "ddp")
            assert ratio == pytest.approx(1, abs=WIRE), kind
