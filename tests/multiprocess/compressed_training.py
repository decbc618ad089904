"""What tests of codecs train: all codecs, a small network of several buckets, and its batches."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.codecs import Codec, Half, Int8, SIDCo, Threshold
from tests.multiprocess.identity_codec import Identity

CODECS: dict[str, Codec | tuple[Codec, Codec]] = {
    "identity": Identity(),
    "int8": Int8(),
    "half": Half(),
    "threshold": Threshold(0.1),
    "sidco": SIDCo(0.05),
    "pair": (SIDCo(0.05), Int8(64)),
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 70), nn.LayerNorm(70), nn.Linear(70, 10)
    )


def wrapped(device: torch.device | None = None, **options: Any) -> DistributedDataParallel:
    """Return a model of several buckets."""
    return DistributedDataParallel(network().to(device), bucket_cap_mb=0.02, **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)


def backward(model: nn.Module, rank: int, step: int, device: torch.device | None = None) -> None:
    inputs, labels = (each.to(device) for each in batch(rank, step))
    nn.functional.cross_entropy(model(inputs), labels).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def added_in_order(alone: nn.Module, world_size: int, step: int) -> list[torch.Tensor]:
    """Return the mean of all ranks' gradients, added in the order of ranks, by a copy without DDP."""
    sums = [torch.zeros_like(parameter) for parameter in alone.parameters()]
    for other in range(world_size):
        alone.zero_grad()
        backward(alone, other, step)
        torch._foreach_add_(sums, gradients(alone))
    return [total / world_size for total in sums]


def digest(tensors: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()
