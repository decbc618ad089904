"""Benchmarks have two forms, chosen by ``CROSSOVER_BENCH``.

- ``smoke`` (the default, as in `make test`): small and few. It asserts nothing about speed.
- ``full`` (`make bench`, an otherwise idle machine): the sizes for published figures, and their
  bounds.

Figures are ratios of alternating runs. ``--benchmark-json=FILE`` writes ``benchmark.extra_info``.
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
