"""The measuring instruments: their arithmetic everywhere, the kernel itself on a GPU."""

import itertools

import pytest
import torch

from tests.gpu.kernels import Interval, busy_kernel, gaps_s, intervals, overlaps, switches


def at(*pairs: tuple[int, int]) -> list[Interval]:
    return [Interval(begin, end) for begin, end in pairs]


def test_overlaps_switches_and_gaps() -> None:
    mine = at((0, 5), (10, 15))
    assert intervals(torch.tensor([[0, 5], [10, 15]])) == mine
    assert not overlaps(mine, at((5, 10), (15, 20)))
    assert overlaps(mine, at((4, 10))) == [(Interval(0, 5), Interval(4, 10))]
    assert len(overlaps(mine, at((-1, 99)))) == 2
    assert switches(mine, at((5, 10), (15, 30))) == 3
    assert switches(mine, at((20, 30))) == 1
    assert gaps_s(at((0, 5), (6, 15)), at((17, 20), (40, 50))) == pytest.approx([2e-9])
    assert gaps_s(at((0, 5), (6, 15)), at((10, 12), (15, 16))) == pytest.approx([-5e-9])


@pytest.mark.gpu
def test_kernels_of_one_stream_run_one_after_the_other_for_the_time_asked() -> None:
    busy = busy_kernel()
    marks = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    for row in marks:
        busy(row, 3_000_000)
    ran = intervals(marks)
    assert all(3e6 <= end - begin < 30e6 for begin, end in ran)
    assert all(earlier.end_ns <= later.begin_ns for earlier, later in itertools.pairwise(ran))
