"""Codecs on a GPU: they give the bits of the CPU, and do not synchronize the host.

All ranks of a bucket are in one process and exchange their bytes directly, since NCCL allows one
rank per GPU. tests/conformance has the exchange by NCCL.
"""

import pytest
import torch

from crossover_ddp._compression.codec import CodecChoice
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
