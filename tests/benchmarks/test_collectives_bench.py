"""The split's pair of halves against all-reduce of the same buffer, on shaped links."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import BenchForm
from .pairs import Pair, measure_pairs, why_not_shaped

TIME_LIMIT = 1.05
MIB = 2**20
# Sizes and repetitions; what takes seconds is repeated less often.
FULL = {MIB: 41, 4 * MIB: 21, 16 * MIB: 11, 64 * MIB: 5}
# The slowest link takes 16 s for 64 MiB between four ranks, both ways and warm-up counted.
LINKS = [(2, 1000.0), (2, 200.0), (4, 1000.0), (4, 200.0)]

_REASON = why_not_shaped()


@pytest.mark.root
@pytest.mark.usefixtures("forked_lab")
@pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}")
@pytest.mark.parametrize(("world_size", "rate_mbit"), LINKS, ids=[f"{w}x{r:g}mbit" for w, r in LINKS])
def test_the_pair_takes_no_longer_than_an_all_reduce(
    world_size: int, rate_mbit: float, bench_form: BenchForm, benchmark: Any, tmp_path: Path
) -> None:
    if bench_form == "smoke":
        pytest.skip("tests/multiprocess/test_collectives_wire.py runs the same and counts its bytes")
    options = {"world_size": world_size, "rate_mbit": rate_mbit, "repeats": FULL}
    ranks: list[list[Pair]] = benchmark.pedantic(measure_pairs, (tmp_path,), options, rounds=1)
    # The slowest rank decides, as in training.
    worst = [max(pairs, key=lambda pair: pair.time_ratio) for pairs in zip(*ranks, strict=True)]
    benchmark.extra_info.update({f"{pair.size_bytes // MIB} MiB": figures(pair) for pair in worst})
    assert all(pair.wire_per_payload < 1.1 for pair in worst)
    assert all(pair.time_ratio <= TIME_LIMIT for pair in worst), benchmark.extra_info


def figures(pair: Pair) -> dict[str, float]:
    return {
        "pair_s": pair.median("pair", "time_s"),
        "all_reduce_s": pair.median("all_reduce", "time_s"),
        "time_ratio": pair.time_ratio,
        "cpu_ratio": pair.cpu_ratio,
        "wire_per_payload": pair.wire_per_payload,
    }
