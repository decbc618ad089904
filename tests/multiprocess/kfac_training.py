"""A small model under DDP with K-FAC, for tests between real ranks."""

import contextlib
import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, GPUMutex, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import networks

WIDTH, OUTPUTS, SAMPLES = 6, 5, 8
LR = 0.05
mlp = functools.partial(networks.mlp, seed=4)


class Training:
    """Train ``network`` with K-FAC, every rank on data of its own.

    Args:
        rank: of this process.
        network: of WIDTH inputs and OUTPUTS outputs; default an MLP of four layers.
        ddp: options of DDP.
        decoupled: whether directions are applied in the next forward.
        options: of KFACState.
    """

    def __init__(
        self,
        rank: int,
        network: nn.Module | None = None,
        *,
        ddp: dict[str, Any] | None = None,
        mutex: GPUMutex | None = None,
        decoupled: bool = False,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        network = network or mlp(WIDTH, 8, 8, 8, OUTPUTS)
        self.rank = rank
        self.model = DistributedDataParallel(network, **({"bucket_cap_mb": 0.0004} | (ddp or {})))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.state = KFACState(self.model, self.optimizer, mutex=mutex, **options)
        if decoupled:
            group = self.state.process_group
            self.outer = DecoupledState(self.optimizer, group, mutex=mutex, kfac=self.state)
            self.model.register_comm_hook(self.outer, decoupled_hook)
        else:
            self.model.register_comm_hook(self.state, kfac_hook)
        self.steps = 0

    def backward(self, parts: int = 1) -> float:
        """Accumulate over ``parts`` of the batch; return the mean loss."""
        self.optimizer.zero_grad()
        total = 0.0
        chunks = [each.chunk(parts) for each in batch(self.rank, self.steps)]
        for part, (inputs, targets) in enumerate(zip(*chunks, strict=True), start=1):
            with contextlib.nullcontext() if part == parts else self.model.no_sync():
                loss = nn.functional.cross_entropy(self.model(inputs), targets) / parts
                loss.backward()
            total += float(loss.detach())
        self.steps += 1
        return total

    def step(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        return loss

    def trained(self, steps: int) -> list[dict[str, Tensor]]:
        """Train; return the gradients of each step."""
        found = []
        for _ in range(steps):
            self.backward()
            found.append(self.gradients())
            self.optimizer.step()
        return found

    def save(self, path: str, *, writer: int = 0) -> None:
        """Save everything from rank ``writer``. Collective."""
        state = self.state.state_dict()
        if self.rank == writer:
            torch.save((self.model.module.state_dict(), self.optimizer.state_dict(), state, self.steps), path)

    def load(self, path: str) -> dict[str, Any]:
        """Go on where `save` was called; return the state's own dict."""
        network, optimizer, state, self.steps = torch.load(path)
        self.model.module.load_state_dict(network)
        self.optimizer.load_state_dict(optimizer)
        self.state.load_state_dict(copy.deepcopy(state))
        assert self.state.steps == self.steps
        return state  # type: ignore[no-any-return]

    def gradients(self) -> dict[str, Tensor]:
        named = self.model.module.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.module.parameters()])

    @property
    def owners(self) -> Sequence[int]:
        return [*self.state.owners.values()]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(0, OUTPUTS, (SAMPLES,), generator=generator)
