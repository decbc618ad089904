"""Training for tests of codecs: a small network of several buckets, or one matrix."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from crossover_ddp.codecs import (
    Codec,
    CompressedState,
    Half,
    Int4,
    Int8,
    SIDCo,
    Threshold,
    compressed_hook,
)
from crossover_ddp.comm_hooks import CrossoverState, crossover_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness.training import Training, Way, decoupled
from tests.multiprocess.identity_codec import Identity

CODECS: dict[str, Codec | tuple[Codec, Codec]] = {
    "identity": Identity(),
    "int8": Int8(),
    "int4": Int4(),
    "half": Half(),
    "threshold": Threshold(0.1),
    "sidco": SIDCo(0.05),
    "pair": (SIDCo(0.05), Int8(64)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 70),
        nn.LayerNorm(70),
        nn.Linear(70, 10),
    )


def loss_of(model: nn.Module, rank: int, step: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(8, 1, 8, 8, generator=generator).to(device)
    labels = torch.randint(10, (8,), generator=generator).to(device)
    return nn.functional.cross_entropy(model(images), labels)


def way_of(kind: str, **settings: Any) -> Way:
    """Return a function that makes a state of this kind, which takes a codec, and its hook."""
    if kind == "decoupled":
        return decoupled(**settings)

    def state_and_hook(model: nn.Module, optimizers: Any, mutex: Any) -> Any:
        if kind == "kfac":
            return KFACState(model, optimizers[0], **settings), kfac_hook
        if kind == "crossover":
            return CrossoverState(mutex=mutex, **settings), crossover_hook
        return CompressedState(mutex=mutex, **settings), compressed_hook

    return state_and_hook


class Coded(Training):
    """Trains the network. Every third step has two micro-batches.

    Args:
        way: a state that takes a codec, by name, or a function that makes state and hook.
        rank: of this process.
        codec: of the state.
        device: of the network.
        settings: other arguments of the state.
    """

    def __init__(
        self, way: str | Way, rank: int, codec: Any = None, *, device: str = "cpu", **settings: Any
    ) -> None:
        super().__init__(
            way_of(way, codec=codec, **settings) if isinstance(way, str) else way,
            rank,
            module=network(),
            optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)],
            loss=functools.partial(loss_of, device=device),
            device=device,
            bucket_cap_mb=0.02,
        )

    def backward(self, step: int | None = None) -> float:
        if self.steps % 3 == 2:
            with self.model.no_sync():
                self.loss(1000 + self.steps).backward()
        return super().backward(step)

    def stats_of_codec(self) -> dict[str, Any]:
        stats = self.state.stats()
        return stats.get("codec", stats)  # type: ignore[no-any-return]

    def residuals(self) -> dict[str, torch.Tensor]:
        state = self.state.state_dict()
        return state.get("codec", state)["residuals"]  # type: ignore[no-any-return]

    def values(self) -> torch.Tensor:
        return torch.cat([value.flatten() for value in self.weights()])

    def digest(self) -> str:
        return digest(self.weights())


class Weights(nn.Module):
    """A matrix whose gradient is the argument of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 40))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class Branches(nn.Module):
    """Two matrices; the gradient of the second one is multiplied by ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.used = Weights()
        self.elsewhere = Weights()

    def forward(self, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        return self.used(gradient) + weight * self.elsewhere(gradient)


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(40, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def compressed(
    rank: int, state: Any, module: nn.Module | None = None, hook: Any = None, **options: Any
) -> Training:
    """Return a training of ``module``, by default of `Weights` with the gradients of `gradient`."""
    options.setdefault("loss", lambda model, *place: model(gradient(*place)))
    return Training(
        lambda *_: (state, hook or compressed_hook), rank, module=module or Weights(), **options
    )


def gradient_after(training: Training, step: int) -> torch.Tensor:
    """Run one backward pass of `Weights`; return its averaged gradient."""
    training.drop()
    training.backward(step)
    return training.model.module.weight.grad.clone()  # type: ignore[no-any-return]


def digest(tensors: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()
