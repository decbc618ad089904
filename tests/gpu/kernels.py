"""Kernels that keep the device busy for a given time, and record it on the device's own clock."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

Busy = Callable[[torch.Tensor, int], None]
"""``busy(marks, duration_ns)`` enqueues the kernel. It writes begin and end to ``marks``, in ns."""

_SOURCE = r"""
__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    return now;
}
extern "C" __global__ void busy(unsigned long long* marks, int duration_ns) {
    unsigned long long begin = now_ns(), now = begin;
    while (now - begin < (unsigned long long)duration_ns) now = now_ns();
    marks[0] = begin;
    marks[1] = now;
}
"""


@functools.cache
def busy_kernel() -> Busy:
    """Return the first kernel that compiles and works here: Triton's, or else NVRTC's."""
    problems = []
    for make in (_from_fake_device, _from_triton, _from_nvrtc):
        try:
            return _proven(make())
        except Exception as error:
            problems.append(f"{make.__name__}: {type(error).__name__}: {error}")
    raise RuntimeError(
        "expected Triton (with a C compiler) or torch.cuda._compile_kernel to work, got "
        + "; ".join(problems)
    )


def _proven(busy: Busy) -> Busy:
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy(marks, 2_000_000)
    begin_ns, end_ns = marks.tolist()
    if not 2_000_000 <= end_ns - begin_ns < 1_000_000_000:
        raise RuntimeError(f"expected a spin of 2 ms, got marks {begin_ns} to {end_ns}")
    return busy


def _from_fake_device() -> Busy:
    torch.cuda.init()  # loads the fake device, if it is here
    return cast(Busy, torch.ops.fake.busy)


def _from_triton() -> Busy:
    from tests.gpu.triton_busy import busy

    return busy


def _from_nvrtc() -> Busy:
    kernel = torch.cuda._compile_kernel(_SOURCE, "busy")

    def busy(marks: torch.Tensor, duration_ns: int) -> None:
        kernel((1, 1, 1), (1, 1, 1), [marks, duration_ns])

    return busy


class Interval(NamedTuple):
    """Begin and end of a turn's kernel, in nanoseconds of the device's clock."""

    begin_ns: int
    end_ns: int


def intervals(marks: torch.Tensor) -> list[Interval]:
    """Read the marks of many kernels, an (n, 2) tensor. Waits for the device."""
    return [Interval(*each) for each in marks.tolist()]


def overlaps(
    first: Sequence[Interval], second: Sequence[Interval]
) -> list[tuple[Interval, Interval]]:
    """Return the pairs of kernels, one of each job, that ran at the same time."""
    return [
        (a, b) for a in first for b in second if a.begin_ns < b.end_ns and b.begin_ns < a.end_ns
    ]


def gaps_s(first: Sequence[Interval], second: Sequence[Interval]) -> list[float]:
    """Return how long the device idled at each change of jobs. Negative if they overlapped."""
    order = sorted([(i, 0) for i in first] + [(i, 1) for i in second])
    return [
        (b.begin_ns - a.end_ns) / 1e9
        for (a, one), (b, two) in itertools.pairwise(order)
        if one != two
    ]
