"""Every hook of the package on a small model, by public names only."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Muon, Optimizer

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness.networks import mlp

WIDTH: Final = 6
# Of a model under DDP, its optimizers and a mutex: the state and the hook to register.
Way = Callable[[DistributedDataParallel, Sequence[Optimizer], Any], tuple[Any, Any]]


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def muon_and_sgd(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=0.1), SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)]


WAYS: Final[dict[str, Way]] = {
    "split": lambda model, optimizers, mutex: (None, reduce_scatter_all_gather_hook),
    "crossover": lambda model, optimizers, mutex: (CrossoverState(mutex=mutex), crossover_hook),
    "wrapped": lambda model, optimizers, mutex: (
        CrossoverState(mutex=mutex),
        crossover_wrapper(allreduce_hook),
    ),
    "int8": lambda model, optimizers, mutex: (CompressedState(Int8(), mutex=mutex), compressed_hook),
    "decoupled": lambda model, optimizers, mutex: (
        DecoupledState(optimizers[0], mutex=mutex, defer="always"),
        decoupled_hook,
    ),
    "owned": lambda model, optimizers, mutex: (
        DecoupledState(optimizers, mutex=mutex, owners="layers"),
        decoupled_hook,
    ),
    "kfac": lambda model, optimizers, mutex: (KFACState(model, optimizers[0], mutex=mutex), kfac_hook),
    "muon": lambda model, optimizers, mutex: (MuonState(optimizers[0], mutex=mutex), muon_hook),  # type: ignore[arg-type]
    "averaged": lambda model, optimizers, mutex: (LocalSGDState(sync_every=2, mutex=mutex), local_sgd_hook),
    "elastic": lambda model, optimizers, mutex: (ElasticState(sync_every=2), elastic_hook),
}
DDP_OPTIONS: Final = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}


def hooked(module: nn.Module, hook: Any, state: Any = None, **options: Any) -> DistributedDataParallel:
    """Return the module under DDP, in buckets of about one parameter, with a hook."""
    model = DistributedDataParallel(module, **(DDP_OPTIONS | options))
    model.register_comm_hook(state, hook)
    return model


def waited_for_by_nobody(hook: Any) -> Any:
    """Return a user's hook that lets backward end at once, whatever becomes of ``hook``'s Futures."""

    def hurried(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        hook(state, bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hurried


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


class CountsPerGroup(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do, and hangs the learning rate on the count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class Training:
    """A small model under DDP with one of the package's hooks.

    Args:
        way: the name of one of WAYS, or another.
        rank: every rank has data of its own.
        mutex: of the state, if it takes one.
        device: of the model and the data.
        optimizers: makes them; default SGD with momentum, and Muon for its own way.
        around: makes the registered hook of the package's.
        options: of DDP.
    """

    def __init__(
        self,
        way: str | Way,
        rank: int = 0,
        *,
        mutex: Any = None,
        module: nn.Module | None = None,
        device: str = "cpu",
        optimizers: Callable[[nn.Module], list[Optimizer]] | None = None,
        around: Callable[[Any], Any] = lambda hook: hook,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.rank, self.steps, self.device = rank, 0, device
        module = mlp(WIDTH, WIDTH, WIDTH, WIDTH, seed=3, tanh_last=True) if module is None else module
        self.model = DistributedDataParallel(module.to(device), **(DDP_OPTIONS | options))
        self.optimizers = (optimizers or (muon_and_sgd if way == "muon" else _sgd))(self.model)
        self.state, hook = (WAYS[way] if isinstance(way, str) else way)(self.model, self.optimizers, mutex)
        self.model.register_comm_hook(self.state, around(hook))

    def loss(self) -> torch.Tensor:
        return self.model(batch(self.rank, self.steps).to(self.device)).square().mean()  # type: ignore[no-any-return]

    def backward(self) -> float:
        loss = self.loss()
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1

    def step(self) -> float:
        loss = self.backward()
        self.update()
        return loss

    def run(self, steps: int) -> "Training":
        for _ in range(steps):
            self.step()
        return self

    def close(self) -> None:
        """Close the state. Collective."""
        if hasattr(self.state, "consolidate") and (self.state.owners is not None):
            self.state.consolidate()
        if hasattr(self.state, "close"):
            self.state.close()
