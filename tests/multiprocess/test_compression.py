"""Codecs between real ranks: same parameters everywhere, nothing lost, bytes on the wire, and what DDP can do."""

import contextlib
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import (
    Codec,
    CompressedState,
    Encoded,
    Half,
    Int8,
    SIDCo,
    Threshold,
    compressed_hook,
)
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from tests.harness import run_ranks

WORLD_SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Identity:
    """Values as they are."""

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        return 4 * sum(lengths)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        message[: 4 * sum(lengths)].view(torch.float32).copy_(values)
        residual.zero_()
        return Encoded(True, values.numel(), None)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        out.add_(message[: 4 * sum(lengths)].view(torch.float32))


CODECS: dict[str, Codec | tuple[Codec, Codec]] = {
    "identity": Identity(),
    "int8": Int8(),
    "half": Half(),
    "threshold": Threshold(0.05, refresh_steps=20),
    "sidco": SIDCo(0.05),
    "pair": (SIDCo(0.05), Int8(64)),
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 70), nn.LayerNorm(70), nn.Linear(70, 10)
    )


def wrapped(**options: Any) -> DistributedDataParallel:
    """Return a model of several buckets."""
    return DistributedDataParallel(network(), bucket_cap_mb=0.02, **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)


def backward(model: nn.Module, rank: int, step: int) -> None:
    inputs, labels = batch(rank, step)
    nn.functional.cross_entropy(model(inputs), labels).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def digest(tensors: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


# --- bits --------------------------------------------------------------------------------------------------


def without_codec(rank: int, world_size: int) -> list[list[str]]:
    digests = []
    for state, hook in [
        (None, reduce_scatter_all_gather_hook),
        (CompressedState(codec=None), compressed_hook),
    ]:
        model = wrapped()
        model.register_comm_hook(state, hook)
        digests.append([])
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
            digests[-1].append(digest(gradients(model)))
    return digests


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_without_a_codec_the_bits_are_those_of_the_split(world_size: int) -> None:
    for split, compressed in run_ranks(without_codec, world_size):
        assert split == compressed


def with_identity(rank: int, world_size: int) -> None:
    model, alone = wrapped(), network()
    model.register_comm_hook(CompressedState(codec=Identity()), compressed_hook)
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step)
        sums = [torch.zeros_like(parameter) for parameter in alone.parameters()]
        for other in range(world_size):
            alone.zero_grad()
            backward(alone, other, step)
            torch._foreach_add_(sums, gradients(alone))
        if step:  # the first one travels on the ring
            for got, total in zip(gradients(model), sums, strict=True):
                assert torch.equal(got, total / world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_identity_codec_adds_in_the_order_of_ranks(world_size: int) -> None:
    run_ranks(with_identity, world_size)


# --- nothing is lost -----------------------------------------------------------------------------------------


def conservation(rank: int, world_size: int, name: str, drained: bool) -> float:
    """Return by how much the sum of all applied differs from that of all gradients less what is kept."""
    model, alone = wrapped(), network()
    state = CompressedState(codec=CODECS[name])
    model.register_comm_hook(state, compressed_hook)
    names = [parameter_name for parameter_name, _ in alone.named_parameters()]
    applied = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    given = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    steps = 12
    for step in range(steps):
        if drained and step == steps - 1:
            state.drain()
        model.zero_grad()
        alone.zero_grad()
        backward(model, rank, step)
        backward(alone, rank, step)
        for total, gradient in zip(applied, gradients(model), strict=True):
            total += gradient
        for total, gradient in zip(given, gradients(alone), strict=True):
            total += gradient / world_size
    kept = state.state_dict()["residuals"]
    assert not drained or not any(residual.any() for residual in kept.values())
    if not drained and name != "identity":
        assert max(float(residual.abs().max()) for residual in kept.values()) > 1e-5
    for each, total in zip(names, given, strict=True):
        if each in kept:
            total -= kept[each].view_as(total).double() / world_size
        dist.all_reduce(total)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(applied, given, strict=True))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_applied_and_what_is_kept_are_all_gradients(name: str, world_size: int) -> None:
    assert max(run_ranks(conservation, world_size, name, False)) < 1e-5


@pytest.mark.parametrize("name", ["int8", "sidco"])
def test_a_drained_step_applies_all_that_was_kept(name: str) -> None:
    assert max(run_ranks(conservation, 3, name, True)) < 1e-5
