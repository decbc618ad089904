"""Runs ``kfac_worker.py`` on the emulated cluster and reads what it measured."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab import Cluster, Job
from tests.benchmarks.kfac_plan import Plan
from tests.benchmarks.pairs import MTU

WORKER = Path(__file__).with_name("kfac_worker.py")


@dataclass(frozen=True)
class KfacRuns:
    """What one rank measured. A step is "plain", takes "factors", makes "solvers", or does "both"."""

    plan: Plan
    rank: int
    taken: dict[str, list[dict[str, Any]]]
    owners: dict[str, Sequence[int]]

    def of(self, way: str, kind: str, figure: str) -> list[float]:
        """Return the figures of the steps of a kind in order."""
        return [each[figure] for each in self.taken[way] if self.kind(each["step"]) == kind]

    def kind(self, step: int) -> str:
        """Say what a step of K-FAC does beyond the gradient."""
        factors = step % self.plan.factor_update_steps == 0
        solvers = step % self.plan.inv_update_steps == 0
        return {(0, 0): "plain", (1, 0): "factors", (0, 1): "solvers", (1, 1): "both"}[factors, solvers]

    def ratio(self, way: str, of_way: str, kind: str, figure: str) -> float:
        """Return the median of the ratios of steps that were taken one right after the other."""
        pairs = zip(self.of(way, kind, figure), self.of(of_way, kind, figure), strict=True)
        return statistics.median(one / other for one, other in pairs)


def measure_kfac(directory: Path, plan: Plan, *, rate_mbit: float, world_size: int = 2) -> list[KfacRuns]:
    """Return what each rank measured."""
    with Cluster(nodes=world_size, rate_mbit=rate_mbit, mtu=MTU) as cluster:
        job = Job("kfac", ["python", str(WORKER), json.dumps(asdict(plan))])
        result = cluster.run([job], timeout_s=280, out=directory)
        assert result.dropped == 0
    files = [directory / "kfac" / f"kfac-{rank}.json" for rank in range(world_size)]
    return [KfacRuns(plan, rank, **json.loads(file.read_text())) for rank, file in enumerate(files)]
