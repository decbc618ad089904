"""Runs ``pair_worker.py`` on the emulated cluster and reads what it measured."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import Cluster, Job, why_not_shaped

__all__ = ["MTU", "Pair", "measure_pairs", "why_not_shaped"]

WORKER = Path(__file__).with_name("pair_worker.py")
# Headers are 4.5 % of the wire at an MTU of 1500 and less than 1 % at 9000. Wire bytes are counted with
# their headers and nothing is subtracted, so the jumbo frames are part of the claim.
MTU = 9000


@dataclass(frozen=True)
class Pair:
    """The split's pair of halves against all-reduce, one size, one rank; lists in alternating order."""

    size_bytes: int
    world_size: int
    pair: Sequence[Mapping[str, float]]
    all_reduce: Sequence[Mapping[str, float]]

    @property
    def payload_bytes(self) -> float:
        """What any all-reduce must send per rank."""
        return 2 * (self.world_size - 1) / self.world_size * self.size_bytes

    @property
    def wire_per_payload(self) -> float:
        return statistics.fmean(each["wire_bytes"] for each in self.pair) / self.payload_bytes

    @property
    def time_ratio(self) -> float:
        return self.median("pair", "time_s") / self.median("all_reduce", "time_s")

    @property
    def cpu_ratio(self) -> float:
        return self.median("pair", "cpu_s") / self.median("all_reduce", "cpu_s")

    def median(self, way: str, figure: str) -> float:
        return statistics.median(each[figure] for each in getattr(self, way))


def measure_pairs(
    directory: Path, *, world_size: int, rate_mbit: float, repeats: Mapping[int, int]
) -> list[list[Pair]]:
    """Return for each rank what it measured; ``repeats`` maps sizes in bytes to numbers of repetitions."""
    sizes = [f"{size_bytes}:{count}" for size_bytes, count in repeats.items()]
    with Cluster(nodes=world_size, rate_mbit=rate_mbit, mtu=MTU) as cluster:
        result = cluster.run([Job("pair", ["python", str(WORKER), *sizes])], timeout_s=280, out=directory)
        assert result.dropped == 0
    files = [directory / "pair" / f"pair-{rank}.json" for rank in range(world_size)]
    return [[Pair(world_size=world_size, **size) for size in json.loads(file.read_text())] for file in files]
