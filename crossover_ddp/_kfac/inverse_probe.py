"""What inverting a factor costs on this machine, measured on random ones."""

import statistics
import time
from typing import Final

import torch

from .factors import Solver
from .placement import InverseCost

_DIMS: Final = (16, 64, 192, 384)
_REPEATS: Final = 3


def measure_inverse(solver: type[Solver], device: torch.device) -> InverseCost:
    """Time the solver for factors of several sizes and fit their cost; takes some tenths of a second."""
    return InverseCost.fitted([(dim, _seconds(solver, dim, device)) for dim in _DIMS])


def _seconds(solver: type[Solver], dim: int, device: torch.device) -> float:
    """Return the median time of one factor."""
    generator = torch.Generator().manual_seed(dim)  # not the user's
    rows = torch.randn(2 * dim, dim, generator=generator).to(device)
    factor = (rows.mT @ rows / len(rows)).unsqueeze(0)
    times = []
    for _ in range(_REPEATS):
        _finish(device)
        begin_s = time.perf_counter()
        solver.compute(factor, factor, 1e-3, pi=False)
        _finish(device)
        times.append((time.perf_counter() - begin_s) / 2)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
