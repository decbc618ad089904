"""Matrix optimizers as small as they can be, and a model trained with owners, with plain DDP, or with owners' sums."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer

from crossover_ddp import GPUMutex
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from tests.harness.oracles import tree_sum
from tests.multiprocess.muon_training import TINY_MB, Mixture, batch, loss_of, mixture
from tests.multiprocess.muon_training import optimizers as muon_and_adamw

__all__ = ["MAKE", "ByOwners", "OwnedRun", "Shampoo", "Soap", "batch", "loss_of", "mixture"]


class Soap(Optimizer):
    """Adam in the eigenbases of both sides' second moments: what SOAP (arXiv 2409.11321) does, without its options.

    ``in_place``: products are made of the gradient where it lies, so that their bits depend on where that is.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, every: int = 2, in_place: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "every": every, "in_place": in_place})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient = gradient if group["in_place"] else gradient.clone()
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sides"] = [gradient.new_zeros(size, size) for size in gradient.shape]
            state["bases"] = [torch.eye(size, dtype=gradient.dtype) for size in gradient.shape]
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["step"] += 1
        for side, term in zip(state["sides"], (gradient @ gradient.T, gradient.T @ gradient), strict=True):
            side.lerp_(term, 0.1)
        if (int(state["step"]) - 1) % group["every"] == 0:
            eye = [torch.eye(len(side), dtype=side.dtype) for side in state["sides"]]
            state["bases"] = [
                torch.linalg.eigh(side + 1e-4 * one)[1] for side, one in zip(state["sides"], eye, strict=True)
            ]
        left, right = state["bases"]
        turned = left.T @ gradient @ right
        state["first"].lerp_(gradient, 0.1)
        state["second"].lerp_(turned.square(), 0.05)
        direction = (left.T @ state["first"] @ right) / (state["second"].sqrt() + 1e-3)
        parameter.sub_(group["lr"] * (left @ direction @ right.T))


class Shampoo(Optimizer):
    """Both sides to the power of -1/4 (arXiv 1802.09568), and a count of steps in the parameter group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient = gradient.clone()  # else bits depend on where it lies
        state = self.state[parameter]
        if not state:
            state["sides"] = tuple(torch.eye(size, dtype=gradient.dtype) for size in gradient.shape)
        left, right = state["sides"]
        left.add_(gradient @ gradient.T)
        right.add_(gradient.T @ gradient)
        lr = group["lr"] / (1 + 0.01 * group["steps"])
        parameter.sub_(lr * (_root(left) @ gradient @ _root(right)))


def _root(side: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(side)
    return vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the rest."""
    return (
        [p for p in module.parameters() if p.dim() == 2],
        [p for p in module.parameters() if p.dim() != 2],
    )


def with_adamw(
    make: Callable[[list[nn.Parameter]], Optimizer],
) -> Callable[[nn.Module], list[Optimizer]]:
    def made(module: nn.Module) -> list[Optimizer]:
        matrices, others = halves(module)
        return [make(matrices), AdamW(others, lr=3e-3)]

    return made


def shampoo_and_two_groups(module: nn.Module) -> list[Optimizer]:
    """The second group has one matrix: most ranks own nothing of it."""
    matrices, others = halves(module)
    groups = [{"params": matrices[:-1]}, {"params": matrices[-1:], "lr": 0.02}]
    return [Shampoo(groups), SGD(others, lr=0.02, momentum=0.9)]


def adan(module: nn.Module) -> list[Optimizer]:
    import timm.optim  # takes a second or two

    return [timm.optim.create_optimizer_v2(module.parameters(), opt="adan", lr=3e-3)]


def timm_muon(module: nn.Module) -> list[Optimizer]:
    """A hybrid: Muon for matrices, AdamW for the rest, in one optimizer."""
    import timm.optim

    return [timm.optim.create_optimizer_v2(module, opt="muon", lr=0.02, weight_decay=0.05)]


class DerivedMuon(Muon):
    """A class made of torch's Muon: nobody knows what it does to its step, so that its parameters travel."""


MAKE: dict[str, Callable[[Any], list[Optimizer]]] = {
    "soap": with_adamw(Soap),
    "soap in place": with_adamw(functools.partial(Soap, in_place=True)),
    "shampoo": shampoo_and_two_groups,
    "muon": with_adamw(lambda matrices: Muon(matrices, lr=0.02)),
    "muon in groups": lambda module: [*muon_and_adamw(module)],
    "muon without nesterov": lambda module: [*muon_and_adamw(module, nesterov=False, ns_steps=3)],
    "adamw and muon": lambda module: [*reversed(muon_and_adamw(module))],
    "derived muon": with_adamw(lambda matrices: DerivedMuon(matrices, lr=0.02)),
    "adamw": lambda module: [AdamW(module.parameters(), lr=3e-3)],
    "adan": adan,
    "timm muon": timm_muon,
    "adagrad": lambda module: [torch.optim.Adagrad(module.parameters(), lr=3e-3)],
}


class OwnedRun:
    """A model with its optimizers and schedulers; ``owners``: with our hook, which may take turns."""

    def __init__(
        self,
        module: Mixture,
        kind: str,
        *,
        owners: bool,
        options: dict[str, Any] | None = None,
        mutex: GPUMutex | None = None,
    ) -> None:
        self.module = module
        self.model = DistributedDataParallel(
            module, **{"bucket_cap_mb": TINY_MB, "gradient_as_bucket_view": True, **(options or {})}
        )
        self.optimizers = MAKE[kind](module)
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 100) for each in self.optimizers]
        self.state: DecoupledState | None = None
        if owners:
            group = self.model.process_group
            self.state = DecoupledState(self.optimizers, group, mutex=mutex, owners="layers")
            self.model.register_comm_hook(self.state, decoupled_hook)

    def backward(self, tokens: Tensor) -> None:
        loss_of(self.model, tokens).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()

    def step(self, tokens: Tensor) -> None:
        self.backward(tokens)
        self.update()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]


class ByOwners:
    """The optimizers fed the sums as the owners make them, without our package; see `muon_training.ByOwners`."""

    def __init__(self, module: Mixture, kind: str, owners: Sequence[int]) -> None:
        self.module = copy.deepcopy(module)
        self.optimizers = MAKE[kind](self.module)
        in_order = [p for each in self.optimizers for group in each.param_groups for p in group["params"]]
        assert len(in_order) == len(owners)
        self._in_order = in_order
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 100) for each in self.optimizers]

    def step(self, tokens: Tensor) -> None:
        loss_of(self.module, tokens).backward()
        world_size = dist.get_world_size()
        gradients = [parameter.grad for parameter in self._in_order if parameter.grad is not None]
        assert len(gradients) == len(self._in_order)
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / world_size
        everyone = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(everyone, flat)
        of_ranks = [each.split([gradient.numel() for gradient in gradients]) for each in everyone]
        for place, gradient in enumerate(gradients):
            total = tree_sum([each[place] for each in of_ranks])
            gradient.copy_(total.view(gradient.shape))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]
