"""Faults of what hooks tell while they run."""

from typing import Final

from tests.seeded.fault import Fault

_STATS = "tests/multiprocess/test_stats.py"

STATS: Final[tuple[Fault, ...]] = (
    Fault(
        "messages that are passed to other ranks are counted once for two",
        "crossover_ddp/_engine/gloo.py",
        "        self._sent_bytes += piece.numel() * piece.itemsize\n",
        "        self._sent_bytes += piece.numel() * piece.itemsize // 2\n",
        (_STATS, "-k", "same_keys and decoupled"),
    ),
    Fault(
        "factors of K-FAC are not counted",
        "crossover_ddp/_kfac/factor_traffic.py",
        ", meter=self.meter())",
        ")",
        (_STATS, "-k", "same_keys and kfac"),
    ),
    Fault(
        "nobody waits for the last bucket",
        "crossover_ddp/_engine/buckets.py",
        "            self.backward.waits_since_s = self.begun_s\n",
        "            self.backward.waits_since_s = self.begun_s + 3600\n",
        (_STATS, "-k", "slow_link and split"),
    ),
    Fault(
        "waits for late buckets are not counted, so that all is hidden",
        "crossover_ddp/_engine/journeys.py",
        "            self.waits.exposed_s += time.monotonic() - since_s\n",
        "            pass\n",
        (_STATS, "-k", "slow_link and decoupled"),
    ),
    Fault(
        "every rank says what the hook did",
        "crossover_ddp/_engine/buckets.py",
        "        if rank == 0:\n            name, said",
        "        if rank >= 0:\n            name, said",
        (_STATS, "-k", "one_line and split"),
    ),
    Fault(
        "metrics are sums since the beginning",
        "crossover_ddp/metrics.py",
        "        former, before = before, now()\n",
        "        former, before = dict.fromkeys(before, 0), now()\n",
        (_STATS, "-k", "read_last and split"),
    ),
)
