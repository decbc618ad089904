"""Measure what an exchange costs on this link, by a few exchanges of buffers of our own."""

import statistics
import time
from typing import Final, cast

import torch
import torch.distributed as dist

from crossover_ddp._planning import Link

from .exchange import Exchange

_SIZES_BYTES: Final = (16 * 1024, 64 * 1024, 256 * 1024, 512 * 1024)
_REPEATS: Final = 3


class _ProbeBucket:
    """What the engine wants to know of a bucket."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[torch.Tensor]:
        return [self._tensor]


def measure_link(process_group: dist.ProcessGroup) -> Link:
    """Return what one half of an exchange costs: five megabytes travel, in a dozen exchanges.

    **Collective**: all ranks of the group, with nothing else on the wire. The ranks' figures differ a little.
    """
    engine = Exchange.of(process_group)
    samples = []
    for size_bytes in _SIZES_BYTES:
        tensor = torch.zeros(size_bytes // 4)
        took_s = [_timed(engine, tensor) for _ in range(1 + _REPEATS)][1:]
        samples.append((float(size_bytes), statistics.median(took_s) / 2))
    return Link.fitted(samples)


def _timed(engine: Exchange, tensor: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    engine.submit(cast(dist.GradBucket, _ProbeBucket(tensor))).wait()
    return time.perf_counter() - begin_s
