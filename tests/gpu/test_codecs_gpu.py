"""Codecs on a GPU: they give the bits of the CPU, and do not synchronize the host.

All ranks of a bucket are in one process and exchange their bytes directly, since NCCL allows one
rank per GPU. tests/conformance has the exchange by NCCL.
"""

import pytest
import torch

from crossover_ddp._compression.codec import CodecChoice
from tests.unit.compression import test_low_rank as low_rank
from tests.unit.compression.test_coded_link import (
    PAIRS,
    Ranks,
    check_bits,
    check_infinities,
    gradients,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("codecs", "world_size"),
    [(codecs, 2 + place % 2) for place, codecs in enumerate(PAIRS)],
    ids=repr,
)
def test_bits_are_those_of_the_cpu(codecs: CodecChoice, world_size: int) -> None:
    check_bits(codecs, world_size, torch.device("cuda", 0))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinities_reach_all_ranks_and_no_residual(bad: float) -> None:
    check_infinities(PAIRS[0], bad, torch.device("cuda", 0))


@pytest.mark.parametrize("world_size", [2, 3])
def test_means_of_low_rank_are_equal_on_all_ranks_and_near_the_cpus(world_size: int) -> None:
    """In the third step a value of one rank is not finite. It enters no residual."""
    ranks, reference = (
        low_rank.Ranks(world_size, device=device, by_collectives=True, leaves_unused=True)
        for device in ("cuda", "cpu")
    )
    for step in range(5):
        expected = low_rank.gradients(world_size, step)
        if step == 2:
            expected[1][10] = torch.nan
        found = [flat.cuda() for flat in expected]
        ranks.step(found)
        reference.step(expected)
        for flat in found:
            assert torch.equal(flat.isnan(), found[0].isnan())
            assert torch.equal(flat.nan_to_num(), found[0].nan_to_num())
        torch.testing.assert_close(
            found[0].cpu(), expected[0], rtol=1e-3, atol=1e-4, equal_nan=True
        )
    assert all(bool(each.isfinite().all()) for each in ranks.residuals())


@pytest.mark.parametrize("codecs", PAIRS, ids=repr)
def test_codecs_do_not_synchronize_the_host(codecs: CodecChoice) -> None:
    device = torch.device("cuda", 0)
    ranks = Ranks(codecs, 2, device, by_collectives=True, leaves_unused=True)
    flats = gradients(2, 0, device)
    ranks.step(flats)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ranks.step(flats)
    finally:
        torch.cuda.set_sync_debug_mode("default")
