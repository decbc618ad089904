"""What the split puts on the wire, counted on the interface."""

from pathlib import Path

import pytest

from tests.benchmarks.pairs import measure_pairs, why_not_shaped

_REASON = why_not_shaped()
SIZE_BYTES = 8 * 2**20


@pytest.mark.usefixtures("forked_lab")
@pytest.mark.root
@pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}")
def test_wire_bytes_are_those_of_an_all_reduce(tmp_path: Path) -> None:
    """Of four ranks; tests/journeys/test_bits_and_buffers.py counts what two ranks send."""
    # Odd, so that the parts differ and there is a tail.
    ranks = measure_pairs(tmp_path, world_size=4, rate_mbit=2000, repeats={SIZE_BYTES + 4: 5})
    for rank, (pair,) in enumerate(ranks):
        assert 0.98 < pair.wire_per_payload < 1.05, f"rank {rank}"
