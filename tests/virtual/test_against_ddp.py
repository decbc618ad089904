"""Virtual ranks against DDP with as many real ranks, and against sums that are written by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import crossover_ddp as ddp
from crossover_ddp._virtual.seeds import mixed, seeded
from tests.harness import run_ranks
from tests.harness.oracles import tree_sum

from .jobs import MODELS, SEED, Augmented, Job, Running, hash_of, hash_of_job, optimizers_of

pytestmark = pytest.mark.torch_version


def hash_of_ddp(rank: int, world_size: int, job: Job) -> str:
    """Run a job of as many ranks by torch's own means, with the split hook or none."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = MODELS[job.model]()
    (optimizer,) = optimizers_of(job.optimizer, module)
    model = DistributedDataParallel(module, bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    if job.hook == "split":
        model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    dataset = Augmented(job.model, job.samples * job.count, job.noise)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=SEED, drop_last=True)
    loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
    losses: list[float] = []
    for step in range(job.steps):
        epoch, at = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        inputs, targets = [*loader][at]
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        of_all: list[Any] = [None] * world_size
        dist.all_gather_object(of_all, float(loss.detach()))
        losses += of_all
    return hash_of(
        {
            "model": module.state_dict(),
            "optimizer": [optimizer.state_dict()],
            "losses": losses,
            "norms": [],
        }
    )


def hash_by_hand(rank: int, world_size: int, job: Job) -> str:
    """Run a job by its definition: a copy of the model for each virtual rank, and a tree."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = MODELS[job.model]()
    (optimizer,) = optimizers_of(job.optimizer, module)
    dataset = Augmented(job.model, job.samples * job.count, job.noise)
    losses: list[float] = []
    for step in range(job.steps):
        epoch, at = divmod(step, job.samples // 8)
        gradients: list[tuple[Tensor, ...]] = []
        copies = [copy.deepcopy(module) for _ in range(job.count)]
        for v, own in enumerate(copies):
            sampler: DistributedSampler[Any] = DistributedSampler(
                dataset, job.count, v, seed=SEED, drop_last=True
            )
            sampler.set_epoch(epoch)
            indices = [*sampler][8 * at : 8 * at + 8]
            with seeded(mixed(SEED, "samples", epoch, at, v)):
                inputs, targets = default_collate([dataset[index] for index in indices])
            with seeded(mixed(SEED, "micro-batch", step, v)):
                loss = F.cross_entropy(own(inputs), targets)
                gradients.append(torch.autograd.grad(loss, [*own.parameters()]))
            losses.append(float(loss.detach()))
        module.load_state_dict(copies[0].state_dict())  # virtual rank 0's buffers
        for p, of_all in zip(module.parameters(), zip(*gradients, strict=True), strict=True):
            p.grad = tree_sum(of_all) / job.count
        optimizer.step()
    return hash_of(
        {
            "model": module.state_dict(),
            "optimizer": [optimizer.state_dict()],
            "losses": losses,
            "norms": [],
        }
    )


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_two_virtual_ranks_are_plain_ddp_on_two_ranks(model: str) -> None:
    job = Job(model, count=2, noise=0.0)
    ddps = run_ranks(hash_of_ddp, 2, args=(Job(model, count=2, noise=0.0, hook="none"),))
    for size in (1, 2):
        assert run_ranks(hash_of_job, size, args=(job,))[0] == ddps[0], size


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_four_virtual_ranks_are_the_split_hook_on_four_ranks(model: str) -> None:
    job = Job(model, count=4, noise=0.0)
    split = run_ranks(hash_of_ddp, 4, args=(job,))
    for size in (1, 4):
        assert run_ranks(hash_of_job, size, args=(job,))[0] == split[0], size


@pytest.mark.parametrize("count", [8, 6])
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_virtual_ranks_are_copies_of_the_model_with_streams_of_their_own(
    model: str, count: int
) -> None:
    """With BatchNorm's buffers, dropout and noise in samples."""
    job = Job(model, count=count)
    assert run_ranks(hash_of_job, 1, args=(job,)) == run_ranks(hash_by_hand, 1, args=(job,))


def buffers(rank: int, world_size: int) -> list[list[Tensor]]:
    """Return the buffers after each micro-batch's forward, and after the step."""
    torch.set_num_threads(1)
    seen: list[list[Tensor]] = []

    def note(running: Running) -> None:
        seen.append([each.clone() for each in running.module.buffers()])

    Running(Job(count=4)).run(1, within=note)
    return seen


def test_a_step_ends_with_the_buffers_of_virtual_rank_zero() -> None:
    of_micro_batches = run_ranks(buffers, 1)[0]
    first, second, _, last = of_micro_batches
    assert any(not torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(first, last, strict=True))
