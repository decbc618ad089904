"""Accumulation by DDP's own flag gives the parameters that ``no_sync()`` gives."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.errors import ReplicasDifferError
from tests.harness import in_ranks
from tests.harness.training import WAYS, Training, batch

MICRO_BATCHES = 3
# Returns the context of a micro-batch's forward and backward, given whether it is the last one.
Accumulation = Callable[[DistributedDataParallel, bool], contextlib.AbstractContextManager[None]]


def by_no_sync(
    model: DistributedDataParallel, is_last: bool
) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if is_last else model.no_sync()


@contextlib.contextmanager
def by_flag(model: DistributedDataParallel, is_last: bool) -> Iterator[None]:
    """Do as nanoGPT, which leaves the flag as it is after the step."""
    model.require_backward_grad_sync = is_last
    yield


def parameters_after(training: Training, accumulation: Accumulation, steps: int) -> torch.Tensor:
    for step in range(steps):
        for each in range(MICRO_BATCHES):
            with accumulation(training.model, each == MICRO_BATCHES - 1):
                inputs = batch(training.rank, MICRO_BATCHES * step + each)
                (training.model(inputs).square().mean() / MICRO_BATCHES).backward()
        for optimizer in training.optimizers:
            optimizer.step()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in training.model.parameters()])


# An elastic replica takes the centre as it finds it, which depends on the ranks' paces.
@pytest.mark.parametrize("way", [way for way in WAYS if way != "elastic"])
@in_ranks(2)
def test_the_flag_set_before_forward_is_no_sync(rank: int, way: str) -> None:
    expected = parameters_after(Training(way, rank), by_no_sync, steps=5)
    assert torch.equal(parameters_after(Training(way, rank), by_flag, steps=5), expected)


@pytest.mark.parametrize("way", ["decoupled", "kfac", "muon"])
@in_ranks(2)
def test_the_flag_set_after_forward_is_found_by_the_comparison_of_replicas(
    rank: int, way: str
) -> None:
    """As with plain DDP, the last backward is not exchanged, so replicas differ."""
    training = Training(way, rank)
    with pytest.raises(ReplicasDifferError):
        for step in range(5):
            for each in range(MICRO_BATCHES):
                loss = training.model(batch(rank, MICRO_BATCHES * step + each)).square().mean()
                training.model.require_backward_grad_sync = each == MICRO_BATCHES - 1
                loss.backward()
            for optimizer in training.optimizers:
                optimizer.step()
            for optimizer in training.optimizers:
                optimizer.zero_grad()
