"""Benchmarks have two forms, chosen by ``CROSSOVER_BENCH``.

- ``smoke`` (the default, and what `make test` runs): small and few; shows that a benchmark works and that
  what it compares agrees. Says nothing about speed, so it asserts nothing about it.
- ``full`` (`make bench`, an otherwise idle machine): the sizes and repetitions that figures are taken with,
  and the bounds that they must keep.

Figures are ratios of alternating runs. Put them, with what they were computed from, into
``benchmark.extra_info``; ``--benchmark-json=FILE`` writes them out.
"""

import os
from typing import Literal

import pytest

BenchForm = Literal["smoke", "full"]


@pytest.fixture(scope="session")
def bench_form(request: pytest.FixtureRequest) -> BenchForm:
    """Say which form runs; timings are taken in the full form and only there."""
    form = os.environ.get("CROSSOVER_BENCH", "smoke")
    if form not in ("smoke", "full"):
        raise pytest.UsageError(f"expected CROSSOVER_BENCH to be smoke or full, got {form!r}")
    timed = not request.config.getoption("benchmark_disable") or request.config.getoption("benchmark_enable")
    if form == "full" and not timed:
        raise pytest.UsageError(
            "CROSSOVER_BENCH=full takes timings; run it by `make bench` (--benchmark-enable)"
        )
    return "full" if form == "full" else "smoke"
