"""Local steps of AdamW between real ranks, whose second moment is corrected."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from tests.harness import in_ranks
from tests.harness.training import hooked

WARM_UP = 3


class Job:
    """A training with local steps after the warm-up."""

    def __init__(self, rank: int, corrects: bool) -> None:
        torch.manual_seed(0)
        network = nn.Linear(6, 5)
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, betas=(0.9, 0.9))
        given = self.optimizer if corrects else None
        self.state = LocalSGDState(4, warmup_steps=WARM_UP, optimizer=given)
        self.model = hooked(network, local_sgd_hook, self.state)
        self._rank = rank

    def run(self, steps: int) -> None:
        for _ in range(steps):
            seed = 100 * self.state.stats()["steps"] + self._rank
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()


def moments_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([each["exp_avg_sq"].flatten() for each in optimizer.state.values()])


@in_ranks(2)
def test_only_local_steps_are_corrected(rank: int) -> None:
    """A step after the warm-up has half of a pure noise's square, or more where it has signal."""
    found = {}
    for steps in (WARM_UP, WARM_UP + 1):
        for corrects in (False, True):
            job = Job(rank, corrects)
            job.run(steps)
            found[steps, corrects] = moments_of(job.optimizer)
            job.state.close()
    assert torch.equal(found[WARM_UP, True], found[WARM_UP, False])
    before = 0.9 * found[WARM_UP, True]
    added = found[WARM_UP + 1, True] - before
    plain = found[WARM_UP + 1, False] - before
    ratio = added.sum() / plain.sum()
    torch.testing.assert_close(added, ratio * plain, rtol=1e-3, atol=1e-7)
    assert 0.5 <= ratio < 1


@in_ranks(2)
def test_a_resumed_job_continues_bit_for_bit(rank: int) -> torch.Tensor:
    first = Job(rank, corrects=True)
    first.run(WARM_UP + 6)
    saved = copy.deepcopy(first.state.checkpoint([first.optimizer]))
    assert len(saved["hook"]["second_moment"]) == 2
    second = Job(rank, corrects=True)
    second.state.restore(saved, [second.optimizer])
    ends = []
    for job in (first, second):
        job.run(6)
        job.state.average()
        ends.append(torch.cat([each.detach().flatten() for each in job.model.parameters()]))
        job.state.close()
    assert torch.equal(*ends)
    return ends[0]


@in_ranks(2)
def test_the_bound_for_clipping_grows_with_the_norm_of_local_gradients(rank: int) -> None:
    """A gradient of pure noise has √2 times the norm of the mean of two."""
    job = Job(rank, corrects=True)
    weight = job.model.module.weight
    generator = torch.Generator().manual_seed(rank)
    norms = []
    for step in range(60):
        job.optimizer.zero_grad()
        noise = torch.randn(8, 5, generator=generator)
        (job.model(torch.randn(8, 6, generator=generator)) * noise).sum().backward()
        if step < WARM_UP:
            assert job.state.scaled_max_norm(3.0) == 3.0
        elif step > WARM_UP + 10:
            mean = weight.grad.clone()
            dist.all_reduce(mean)
            norms.append(float(weight.grad.norm() / (mean / 2).norm()))
            assert 1.25 < job.state.scaled_max_norm(1.0) <= math.sqrt(2) + 1e-6
        job.optimizer.step()
    assert sum(norms) / len(norms) == pytest.approx(math.sqrt(2), rel=0.1)
    without = Job(rank, corrects=False)
    with pytest.raises(UnsupportedConfigurationError, match="expected LocalSGDState"):
        without.state.scaled_max_norm(1.0)


@in_ranks(2)
def test_ranks_that_differ_in_the_correction_are_refused(rank: int) -> None:
    with pytest.raises(UnsupportedConfigurationError, match="corrects the second moment"):
        Job(rank, corrects=rank == 0).run(1)
