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


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


class Job:
    """A training with local steps after the warm-up."""

    def __init__(self, rank: int, corrects: bool, *others: nn.Module) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 5), *others)
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, betas=(0.9, 0.9))
        given = self.optimizer if corrects else None
        self.state = LocalSGDState(4, warmup_steps=WARM_UP, optimizer=given)
        self.model = hooked(network, local_sgd_hook, self.state)
        self._rank = rank

    def run(self, steps: int, skips: int | None = None) -> None:
        """Train; rank 1 skips one step, as a GradScaler does that finds infinities there alone."""
        for step in range(steps):
            seed = 100 * self.state.stats()["steps"] + self._rank
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            if self._rank == 0 or step != skips:
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
    first = Job(rank, True, Scale())
    first.run(WARM_UP + 6, skips=WARM_UP + 2)
    checkpoint = [first.state.checkpoint([first.optimizer])]
    dist.broadcast_object_list(checkpoint)  # rank 0 saves it
    saved = copy.deepcopy(checkpoint[0])
    [sums] = saved["hook"]["second_moment"]
    assert len(sums) == 2
    second = Job(rank, True, Scale())
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
    weight = job.model.module[0].weight
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
    job.state.close()  # gradients are averaged again
    assert job.state.scaled_max_norm(3.0) == 3.0
    assert sum(norms) / len(norms) == pytest.approx(math.sqrt(2), rel=0.1)
    without = Job(rank, corrects=False)
    with pytest.raises(UnsupportedConfigurationError, match="expected LocalSGDState"):
        without.state.scaled_max_norm(1.0)


@in_ranks(2)
def test_ranks_that_differ_in_the_correction_are_refused(rank: int) -> None:
    with pytest.raises(UnsupportedConfigurationError, match="corrects the second moment"):
        Job(rank, corrects=rank == 0).run(1)
