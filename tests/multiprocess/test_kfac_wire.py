"""The bytes that K-FAC sends, as the kernel counts them: gradients, and factors when due."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run_ranks
from tests.journeys.test_bits_and_buffers import COUNTED, sent_bytes
from tests.multiprocess.kfac_training import Training, mlp

pytestmark = COUNTED
LAYERS, WIDTH = 4, 256
SAMPLES = {"columns": 32, "triangles": 256}
# Bytes of both ranks for the gradient, to the owners and back.
GRADIENT = 2 * 4 * LAYERS * WIDTH**2
# Elements of A, and of G, of one layer in the form that is smaller.
PACKING = {"columns": SAMPLES["columns"] * WIDTH, "triangles": WIDTH * (WIDTH + 1) // 2 + 1}
FACTOR_STEPS, INVERSE_STEPS = 2, 3
# Kinds of steps, after those in which DDP rebuilds its buckets.
KINDS = {4: "factors", 5: "plain", 6: "both", 8: "factors", 9: "solvers"}
WIRE, PACKINGS = 0.02, 0.03


def bytes_of_steps(rank: int, world_size: int, samples: int) -> dict[tuple[str, str], int]:

    def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(samples, WIDTH, generator=generator)
        return inputs, torch.randint(WIDTH, (samples,), generator=generator)

    found = {}
    for factors in ("global", "local"):
        training = Training(
            rank,
            mlp(*(WIDTH,) * (LAYERS + 1), bias=False),
            data=data,
            ddp={"bucket_cap_mb": 1.0},
            factor_update_steps=FACTOR_STEPS,
            inv_update_steps=INVERSE_STEPS,
            factors=factors,
        )
        for step in range(max(KINDS) + 1):
            dist.barrier()
            begin = sent_bytes()
            training.step()
            # Late factors count in the step that has taken them.
            training.kfac._preconditioner.traffic.settle()
            dist.barrier()
            if step in KINDS:
                found[factors, KINDS[step]] = sent_bytes() - begin
        training.close()
    return found


@pytest.mark.parametrize("form", SAMPLES)
def test_factors_cost_one_reduction_and_solvers_and_local_factors_nothing(
    form: str,
) -> None:
    ranks = run_ranks(bytes_of_steps, 2, args=(SAMPLES[form],))
    sent = {key: sum(of_rank[key] for of_rank in ranks) for key in ranks[0]}
    for without, with_factors in (("plain", "factors"), ("solvers", "both")):
        assert sent["global", without] / GRADIENT == pytest.approx(1, abs=WIRE)
        extra = sent["global", with_factors] - sent["global", without]
        assert extra / (4 * LAYERS * 2 * PACKING[form]) == pytest.approx(1, abs=PACKINGS), (
            with_factors
        )
    for kind in KINDS.values():
        assert sent["local", kind] / GRADIENT == pytest.approx(1, abs=WIRE), kind
