"""K-FAC in float64, from the definition: one process with all ranks' data, dense linear algebra."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Settings:
    """The settings of one run. The names are those of KFACState's arguments."""

    solver: str = "inverse"
    damping: float = 0.03
    factor_decay: float = 0.9
    kl_clip: float | None = 1e-5
    factor_update_steps: int = 1
    inv_update_steps: int = 1
    factors: str = "global"
    weight_sharing: str = "expand"


@dataclass
class Oracle:
    """Computes the preconditioned gradients of all parameters, step by step."""

    settings: Settings
    # The learning rate, or a function that returns it by parameter name.
    lr: float | Callable[[str], float]
    # By layer name, for ``factors="local"``.
    owners: Mapping[str, int] = field(default_factory=dict)
    # A and G of each layer: the running means, and those that the present solver is made of.
    running: dict[str, list[Tensor]] = field(default_factory=dict)
    frozen: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: int = 0
    least_scale: float = 1.0

    def step_of_runs(self, ranks: "Sequence[RankRun]") -> dict[str, Tensor]:
        """Return the preconditioned gradients by parameter name, from all ranks' runs."""
        names, layers = ranks[0].gradients, ranks[0].layers
        mean = {name: torch.stack([run.gradients[name] for run in ranks]).mean(0) for name in names}
        is_local, sharing = self.settings.factors == "local", self.settings.weight_sharing
        taken = {name: [ranks[self.owners[name]]] if is_local else ranks for name in layers}
        factors = {
            name: [run.factors(name, sharing) for run in runs if run.calls[name]]
            for name, runs in taken.items()
        }
        return self.step_of(mean, factors, layers)

    def step_of(
        self,
        mean: dict[str, Tensor],
        factors: Mapping[str, Sequence[tuple[Tensor, Tensor]]],
        layers: Mapping[str, nn.Module],
    ) -> dict[str, Tensor]:
        """Return the preconditioned gradients by parameter name.

        ``mean`` has the mean gradients, ``factors`` the ranks' own A and G by layer name.
        """
        if self.steps % self.settings.factor_update_steps == 0:
            for name, pairs in factors.items():
                if pairs:
                    self._update(name, pairs)
        if self.steps % self.settings.inv_update_steps == 0:
            self.frozen = {
                name: [factor.clone() for factor in pair] for name, pair in self.running.items()
            }
        self.steps += 1
        return self._precondition(mean, layers)

    def _update(self, name: str, pairs: "Sequence[tuple[Tensor, Tensor]]") -> None:
        batch = [torch.stack(list(of_ranks)).mean(0) for of_ranks in zip(*pairs, strict=True)]
        if not all(bool(factor.isfinite().all()) for factor in batch):
            return
        old, decay = self.running.get(name, batch), self.settings.factor_decay
        self.running[name] = [
            decay * was + (1 - decay) * now for was, now in zip(old, batch, strict=True)
        ]

    def solve(self, matrix: Tensor, a: Tensor, g: Tensor) -> Tensor:
        return direction(self.settings.solver, matrix, a, g, self.settings.damping)

    def _precondition(
        self, mean: dict[str, Tensor], layers: Mapping[str, nn.Module]
    ) -> dict[str, Tensor]:
        found, total = {}, 0.0
        for name, module in layers.items():
            if name not in self.frozen:
                # No rank has called it yet.
                continue
            has_bias = f"{name}.bias" in mean
            matrix = as_matrix(module, mean[f"{name}.weight"], mean.get(f"{name}.bias"))
            solved = self.solve(matrix, *self.frozen[name])
            weight = solved[..., :-1] if has_bias else solved
            found[f"{name}.weight"] = weight.reshape(mean[f"{name}.weight"].shape)
            if has_bias:
                found[f"{name}.bias"] = solved[..., -1].reshape(-1)
        for name, value in found.items():
            lr = self.lr(name) if callable(self.lr) else self.lr
            total += lr**2 * float((value * mean[name]).sum())
        clip = self.settings.kl_clip
        scale = 1.0 if clip is None or not total else min(1.0, (clip / abs(total)) ** 0.5)
        self.least_scale = min(self.least_scale, scale)
        return mean | {name: scale * value for name, value in found.items()}


def direction(
    solver: str, matrix: Tensor, a: Tensor, g: Tensor, damping: float, *, pi: bool = True
) -> Tensor:
    """Precondition group by group.

    "eigen" solves (G kron A + γ I) vec(V) = vec(∇), "inverse" (G + √γ/π I) kron (A + √γ π I) vec(V)
    = vec(∇), with rows of ∇ one after the other in vec(∇).
    """
    directions = []
    for gradient, a_, g_ in zip(matrix, a, g, strict=True):
        if solver == "eigen":
            big = torch.kron(g_, a_) + damping * torch.eye(gradient.numel(), dtype=torch.float64)
            directions.append(torch.linalg.solve(big, gradient.reshape(-1)).reshape(gradient.shape))
            continue
        ratio = ((a_.trace() / len(a_)) / (g_.trace() / len(g_))).sqrt() if pi else 1.0
        a_damped = a_ + damping**0.5 * ratio * torch.eye(len(a_), dtype=torch.float64)
        g_damped = g_ + damping**0.5 / ratio * torch.eye(len(g_), dtype=torch.float64)
        directions.append(torch.linalg.solve(g_damped, gradient) @ torch.linalg.inv(a_damped))
    return torch.stack(directions)


def cross_entropy(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda outputs: F.cross_entropy(outputs, targets)


def errors_beside(oracle: Oracle, training: Any, steps: int, world_size: int) -> Iterator[float]:
    """Train with a `kfac_training.Training`. Yield the relative error of each step's gradients.

    Rank 0 computes the expected gradients for all ranks.
    """
    plain: nn.Module = training.model.module
    for _ in range(steps):
        batches = [training.data(rank, training.steps) for rank in range(world_size)]
        answer: list[Any] = [None]
        if training.rank == 0:
            runs = [
                RankRun(
                    copy.deepcopy(plain).cpu().double(), inputs.double(), cross_entropy(targets)
                )
                for inputs, targets in batches
            ]
            answer = [(oracle.step_of_runs(runs), oracle.least_scale)]
        dist.broadcast_object_list(answer)
        expected, oracle.least_scale = answer[0]
        training.backward()
        named = plain.named_parameters()
        yield relative_error({name: p.grad for name, p in named if p.grad is not None}, expected)
        training.update()


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of a layer.

    A bias does not count as a layer of its own: before a BatchNorm its gradient is zero.
    """
    assert found.keys() == expected.keys()
    errors, scales = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, wanted in expected.items():
        layer = name.rpartition(".")[0]
        errors[layer] = max(errors[layer], float((found[name].double().cpu() - wanted).abs().max()))
        scales[layer] = max(scales[layer], float(wanted.abs().max()))
    return max(error / scales[layer] for layer, error in errors.items())


class RankRun:
    """One rank's forward and backward, with each layer's inputs and output gradients by call."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, loss_of: Callable[[Tensor], Tensor]
    ) -> None:
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        }
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.layers}
        handles = [
            module.register_forward_hook(
                lambda _, args, out, name=name: calls[name].append((args[0], out))
            )
            for name, module in self.layers.items()
        ]
        loss = loss_of(model(inputs))
        for handle in handles:
            handle.remove()
        outputs = [out for of_layer in calls.values() for _, out in of_layer]
        by_output = iter(torch.autograd.grad(loss, outputs, retain_graph=True))
        self.calls = {
            name: [(x.detach(), next(by_output)) for x, _ in of_layer]
            for name, of_layer in calls.items()
        }
        named = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
        self.gradients = dict(zip(named, found, strict=True))
        self._samples = len(inputs)

    def factors(self, name: str, sharing: str) -> tuple[Tensor, Tensor]:
        """Return A, the mean over the layer's calls, and G, their sum: [groups, d, d]."""
        module = self.layers[name]
        pairs = [factors_of_call(module, x, y, self._samples, sharing) for x, y in self.calls[name]]
        return torch.stack([a for a, _ in pairs]).mean(0), torch.stack([g for _, g in pairs]).sum(0)


def factors_of_call(
    module: nn.Module, x: Tensor, y: Tensor, loss_samples: int, sharing: str
) -> tuple[Tensor, Tensor]:
    return factors_of_rows(input_rows(module, x), output_rows(module, y) * loss_samples, sharing)


def factors_of_rows(a: Tensor, g: Tensor, sharing: str) -> tuple[Tensor, Tensor]:
    """Return A and G of [samples, positions, groups, features]."""
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
    samples, positions = a.shape[:2]
    return (
        torch.einsum("nsgi,nsgj->gij", a, a) / (samples * positions),
        torch.einsum("nsgi,nsgj->gij", g, g) / samples,
    )


def input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of the layer's product: [samples, positions, groups, features]."""
    if isinstance(module, nn.Conv2d):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        size, dilation, stride = module.kernel_size, module.dilation, module.stride
        columns = F.unfold(padded, size, dilation, 0, stride)  # type: ignore[arg-type]
        rows = columns.mT.unflatten(-1, (module.groups, -1))
    else:
        rows = x.reshape(len(x), -1, 1, x.shape[-1])
    if module.bias is not None:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)
    return rows


def output_rows(module: nn.Module, y: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d):
        return y.flatten(2).mT.unflatten(-1, (module.groups, -1))
    return y.reshape(len(y), -1, 1, y.shape[-1])


def as_matrix(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gradient as [groups, outputs, inputs and bias]."""
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    return matrix if bias is None else torch.cat([matrix, bias.reshape(groups, -1, 1)], dim=-1)
