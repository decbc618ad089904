"""Buffers that forward reads: one hash with one forward, and a refusal where there cannot be one."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

from crossover_ddp import VirtualRanks, reduce_scatter_all_gather_hook
from tests.harness import run_ranks
from tests.harness.oracles import error_of

from .jobs import hash_of


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which the next forward reads."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.mean.clone()


class Constant(nn.Module):
    """Adds a buffer that never changes."""

    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.place


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "centred": Centred,
    "constant": Constant,
    "spectral": lambda: spectral_norm(nn.Linear(8, 8)),
    "norm": lambda: nn.BatchNorm1d(8),
}


def trained(rank: int, size: int, kind: str, forwards: int, **options: Any) -> str:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), MODULES[kind](), nn.Linear(8, 3))
    model = DistributedDataParallel(network, **options)
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    ranks = VirtualRanks(model, 4)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    for inputs, labels in ranks.micro_batches(ranks.loader(data, 4)):
        outputs = [model(inputs + number) for number in range(forwards)]
        loss = torch.stack([nn.functional.cross_entropy(each, labels) for each in outputs]).sum()
        loss.backward()
        ranks.report(loss)
        if ranks.is_step_end:
            optimizer.step()
            optimizer.zero_grad()
    return hash_of(ranks.losses(), [*network.parameters()])


def message(rank: int, size: int, *args: Any, **options: Any) -> str:
    return str(error_of(lambda: trained(rank, size, *args, **options)))


def without_broadcast(rank: int, size: int, kind: str) -> str:
    return trained(rank, size, kind, 1, broadcast_buffers=False)


def message_without_broadcast(rank: int, size: int, kind: str) -> str:
    return message(rank, size, kind, 1, broadcast_buffers=False)


@pytest.mark.parametrize(
    ("kind", "forwards"), [("centred", 1), ("spectral", 1), ("norm", 2), ("constant", 2)]
)
def test_buffers_have_one_hash(kind: str, forwards: int) -> None:
    found = [run_ranks(trained, size, args=(kind, forwards)) for size in (1, 2, 4)]
    assert len({each for of_size in found for each in of_size}) == 1, found


@pytest.mark.parametrize(("kind", "size"), [("centred", 1), ("centred", 4), ("spectral", 2)])
def test_a_second_forward_that_reads_changed_buffers_is_refused(kind: str, size: int) -> None:
    for found in run_ranks(message, size, args=(kind, 2)):
        assert "expected one forward in each micro-batch" in found


@pytest.mark.parametrize("size", [1, 4])
def test_changed_buffers_that_are_not_broadcast_are_refused(size: int) -> None:
    for found in run_ranks(message_without_broadcast, size, args=("centred",)):
        assert "expected broadcast_buffers=True" in found


def test_constant_buffers_need_no_broadcast() -> None:
    found = [run_ranks(without_broadcast, size, args=("constant",)) for size in (1, 4)]
    assert len({each for of_size in found for each in of_size}) == 1, found
