"""A small model under DDP with K-FAC."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from crossover_ddp import DecoupledKFACState, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import networks, training

WIDTH, OUTPUTS, SAMPLES = 6, 5, 8
LR = 0.1  # of the harness
mlp = functools.partial(networks.mlp, seed=4)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(0, OUTPUTS, (SAMPLES,), generator=generator)


class Training(training.Training):
    """Trains ``network`` with K-FAC, every rank on data of its own.

    Args:
        rank: this rank.
        network: the model. Default: five layers.
        data: returns inputs and targets by rank and step.
        ddp: arguments of DistributedDataParallel.
        optimizers: makes the optimizers of a model. Default: one.
        decoupled: with `decoupled_hook`, which applies directions in the next forward.
        device: of the model and its inputs.
        options: arguments of KFACState.

    Attributes:
        kfac: the KFACState.
    """

    def __init__(
        self,
        rank: int = 0,
        network: nn.Module | None = None,
        *,
        data: Callable[[int, int], tuple[Tensor, Tensor]] = batch,
        ddp: dict[str, Any] | None = None,
        optimizers: Callable[[nn.Module], list[Optimizer]] | None = None,
        decoupled: bool = False,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        def way(model: Any, optimizers: Sequence[Any], _: Any) -> tuple[Any, Any]:
            several = optimizers if len(optimizers) > 1 else optimizers[0]
            self.kfac = KFACState(model, several, **options)
            if not decoupled:
                return self.kfac, kfac_hook
            group = self.kfac.process_group
            return DecoupledKFACState(optimizers[0], self.kfac, group), decoupled_hook

        super().__init__(
            way,
            rank,
            module=network or mlp(WIDTH, 8, 8, 8, OUTPUTS),
            device=device,
            optimizers=optimizers,
            **({"bucket_cap_mb": 0.0004, "gradient_as_bucket_view": False} | (ddp or {})),
        )
        self.data = data
        self.device = device

    def loss(self, part: int = 0, parts: int = 1) -> Tensor:
        inputs, targets = (
            each.chunk(parts)[part].to(self.device) for each in self.data(self.rank, self.steps)
        )
        return F.cross_entropy(self.model(inputs), targets) / parts

    def backward(self, parts: int = 1) -> float:
        """Accumulate over ``parts`` of the batch. Return the mean loss."""
        self.model.zero_grad()
        total = 0.0
        for part in range(parts):
            with contextlib.nullcontext() if part == parts - 1 else self.model.no_sync():
                loss = self.loss(part, parts)
                loss.backward()
            total += float(loss.detach())
        return total

    def trained(self, steps: int) -> list[dict[str, Tensor]]:
        """Train some steps. Return the gradients of each."""
        found = []
        for _ in range(steps):
            self.backward()
            found.append(self.gradients())
            self.update()
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of the gradients, by the parameters' names in the model without DDP."""
        named = self.model.module.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def parameters(self) -> Tensor:
        """Return all parameters in one tensor."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def spread(self) -> list[str]:
        """Return the names of the layers that all ranks precondition together."""
        lines = self.kfac.report().splitlines()
        return [line.split(":")[0].strip() for line in lines if "spread over all ranks" in line]


def same(ones: Sequence[dict[str, Tensor]], others: Sequence[dict[str, Tensor]]) -> bool:
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(ones, others, strict=True)
    )
