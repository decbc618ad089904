"""Benchmarks have two forms, chosen by ``CROSSOVER_BENCH``.

- ``smoke`` (the default, and what `make test` runs): small and few; shows that a benchmark works and that
  what it compares agrees. Says nothing about speed, so it asserts nothing about it.
- ``full`` (`make bench`, an otherwise idle machine): the sizes and repetitions that figures are taken with,
  and the bounds that they must keep. Figures are printed.
"""

import os
from collections.abc import Callable
from typing import Any, Literal

import pytest

BenchForm = Literal["smoke", "full"]
Tell = Callable[[Any], None]


@pytest.fixture(scope="session")
def bench_form() -> BenchForm:
    form = os.environ.get("CROSSOVER_BENCH", "smoke")
    if form not in ("smoke", "full"):
        raise pytest.UsageError(f"expected CROSSOVER_BENCH to be smoke or full, got {form!r}")
    return "full" if form == "full" else "smoke"


@pytest.fixture
def tell(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], bench_form: BenchForm) -> Tell:
    """Print figures of the full form."""

    def told(figures: Any) -> None:
        if bench_form == "full":
            with capsys.disabled():
                print(f"\n{request.node.name}: {figures}")

    return told
