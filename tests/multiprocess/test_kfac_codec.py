"""K-FAC with a codec: gradients and directions coded, factors and messages exact, the same bits on all ranks.

With one that loses nothing it is in test_kfac.py.
"""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from crossover_ddp.codecs import Codec, Int8, SIDCo
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.oracles import heard
from tests.multiprocess.compressed_training import digest
from tests.multiprocess.kfac_oracle import Settings
from tests.multiprocess.kfac_training import Training, mlp
from tests.multiprocess.test_kfac import TINY_MB, Everything, batch

CODED_WORLDS = (2, 3, 4) if IN_CAMPAIGN else (2, 4)
CODECS: dict[str, Codec | tuple[Codec, Codec]] = {"int8": Int8(64), "pair": (SIDCo(0.2), Int8(64))}
STEPS = 6 if IN_CAMPAIGN else 5  # two of them travel exact


def training_of(rank: int, codec: Any) -> Training:
    ddp, settings = {"bucket_cap_mb": TINY_MB}, asdict(Settings(kl_clip=None))
    return Training(rank, Everything(), data=batch, ddp=ddp, codec=codec, **settings)


def train(rank: int, codec: Any) -> list[Tensor]:
    """Return the directions of each step, all at the same parameters."""
    training = training_of(rank, codec)
    directions = []
    for _ in range(STEPS):
        training.backward()
        directions.append(torch.cat([each.flatten() for each in training.gradients().values()]))
        training.steps += 1
    training.close()
    return directions


@pytest.mark.parametrize("world_size", CODED_WORLDS)
@in_ranks()
def test_directions_are_near_those_without_a_codec_and_the_same_on_all_ranks(rank: int) -> dict[str, str]:
    exact = train(rank, None)
    found = {}  # how far one direction and the sum of all are apart
    for name, codec in CODECS.items():
        directions = train(rank, codec)
        apart = [a - b for a, b in zip(directions, exact, strict=True)]
        one = max(float(each.norm() / b.norm()) for each, b in zip(apart[2:], exact[2:], strict=True))
        both = torch.stack(exact[2:]).sum(0)
        found[name] = digest(directions), one, float(torch.stack(apart[2:]).sum(0).norm() / both.norm())
    assert found["int8"][2] < found["int8"][1] < 0.06
    assert found["pair"][1] > 0.1
    return {name: bits for name, (bits, *_) in found.items()}


@in_ranks(3)
def test_a_drained_step_leaves_nothing_behind_and_what_passes_through_loses_nothing(
    rank: int, world_size: int
) -> str:
    """After coded steps, after `drain` and a step, and after one more."""
    codec = (SIDCo(0.2), Int8())
    training, alone = training_of(rank, codec), Everything()
    found = []  # whether no residual is to be lost
    applied, given = torch.zeros(7, 3, dtype=torch.float64), torch.zeros(7, 3, dtype=torch.float64)
    for steps in (STEPS - 1, 1, 1):
        for _ in range(steps):
            alone.load_state_dict(training.model.module.state_dict())
            alone.zero_grad()
            inputs, labels = batch(rank, training.steps)
            F.cross_entropy(alone(inputs), labels).backward()
            training.backward()
            applied += training.gradients()["embedding.weight"]
            given += alone.embedding.weight.grad / world_size  # type: ignore[operator]
            training.update()
        with heard() as warned:
            training.kfac.state_dict()
        found.append(not any("residuals" in each for each in warned))
        if steps > 1:
            training.kfac.drain()
        elif len(found) == 2:
            everyones = given.clone()
            dist.all_reduce(everyones)
            assert float((applied - everyones).abs().max() / everyones.abs().max()) < 1e-5
    training.close()
    assert found == [False, True, False]
    return digest([training.parameters()])


@in_ranks(2)
def test_it_tells_the_rate(rank: int) -> str:
    """Accumulate over two parts of each batch."""

    def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(16, 64, generator=generator), torch.randint(10, (16,), generator=generator)

    seldom = {"factor_update_steps": 100, "inv_update_steps": 100}
    ddp = {"bucket_cap_mb": 25}
    training = Training(rank, mlp(64, 256, 128, 10), data=data, ddp=ddp, codec=Int8(), **seldom)
    for _ in range(12):
        training.backward(parts=2)
        training.update()
    training.close()
    assert 0.25 < training.kfac.stats()["codec"]["rate"] < 0.29
    return digest([training.parameters()])
