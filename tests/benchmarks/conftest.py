"""Benchmarks have two forms, chosen by ``CROSSOVER_BENCH``.

- ``smoke`` (the default, and what `make test` runs): small and few; asserts nothing about speed.
- ``full`` (`make bench`, an otherwise idle machine): the sizes of figures, and the bounds that they must keep.

Figures are ratios of alternating runs; ``--benchmark-json=FILE`` writes ``benchmark.extra_info`` out.
"""

import os

import pytest


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    form, given = os.environ.get("CROSSOVER_BENCH", "smoke"), request.config.getoption
    timed = not given("benchmark_disable") or given("benchmark_enable")
    if form not in ("smoke", "full") or (form == "full" and not timed):
        raise pytest.UsageError(
            f"expected CROSSOVER_BENCH=smoke, or full by `make bench`, got {form!r}"
        )
    return form == "full"
