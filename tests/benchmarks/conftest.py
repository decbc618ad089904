"""Benchmarks have two forms, chosen by ``CROSSOVER_BENCH``.

- ``smoke`` (the default, and what `make test` runs): small and few; shows that a benchmark works and that
  what it compares agrees. Says nothing about speed, so it asserts nothing about it.
- ``full`` (`make bench`, an otherwise idle machine): the sizes and repetitions that figures are taken with,
  and the bounds that they must keep.

Figures are ratios of alternating runs. Put them, with what they were computed from, into
``benchmark.extra_info``; ``--benchmark-json=FILE`` writes them out.
"""

import os

import pytest


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    """Say whether the full form runs; timings are taken in it and only there."""
    form, given = os.environ.get("CROSSOVER_BENCH", "smoke"), request.config.getoption
    timed = not given("benchmark_disable") or given("benchmark_enable")
    if form not in ("smoke", "full") or (form == "full" and not timed):
        raise pytest.UsageError(f"expected CROSSOVER_BENCH=smoke, or full by `make bench`, got {form!r}")
    return form == "full"
