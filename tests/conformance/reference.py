"""References of hooks: plain DDP that adds gradients in the owners' order, and K-FAC in float64."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossover_ddp.kfac_hooks import KFACState
from tests.harness.oracles import tree_sum
from tests.multiprocess.kfac_oracle import Oracle, Settings, factors_of_call


def gathered(flat: Tensor) -> list[Tensor]:
    """Return a tensor of all ranks, by rank."""
    of_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, flat)
    return of_ranks


class Additions:
    """Averages the ranks' gradients in the order in which owners add.

    Owners divide first, as torch's hook does, and add as a tree over ranks. They add a codec's
    messages in the order of ranks, and divide last. A codec's first step is exact.

    Args:
        order: "tree", or "tree, then ranks" for a codec.
    """

    def __init__(self, order: str) -> None:
        self._order, _, self._later = order.partition(", then ")
        self._is_first_step = True

    def answer(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        of_ranks = gathered(flat)
        order = self._order if self._is_first_step or not self._later else self._later
        if order == "tree":
            flat.copy_(tree_sum([each / len(of_ranks) for each in of_ranks]))
        else:
            total = functools.reduce(torch.add, [each.float() for each in of_ranks])
            flat.copy_(total / len(of_ranks))
        self._is_first_step &= not bucket.is_last()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future


def _answered(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state.answer(bucket)  # type: ignore[no-any-return]


def adding(order: str) -> tuple[Any, Any]:
    return Additions(order), _answered


class KFACOracle:
    """K-FAC by its definition. Each bucket waits for the last one; all are preconditioned together.

    Args:
        model: the module inside of DDP.
        layers: the names of the layers to precondition.
        optimizer: its learning rates enter the clip.
        settings: those of K-FAC.
        loss_scale: returns the factor by which the loss is multiplied.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[str],
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        loss_scale: Callable[[], float],
    ) -> None:
        self._names = {
            parameter: name.replace("_orig_mod.", "")  # of torch.compile
            for name, parameter in model.named_parameters()
        }
        self._layers = {name: model.get_submodule(name) for name in layers}
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._oracle = Oracle(settings, self._learning_rate)
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
        # The number of the latest forward of the model.
        self._forward = 0
        # The forwards and backwards with gradients since the last step. The smaller set counts the
        # micro-batches: a forward may have no backward, or share one with another.
        self._forwards: set[int] = set()
        self._backwards: set[int] = set()
        self._buckets: list[tuple[dist.GradBucket, torch.futures.Future[Tensor]]] = []
        model.register_forward_pre_hook(self._begun)
        for name, module in self._layers.items():
            module.register_forward_hook(functools.partial(self._called, name))

    def _learning_rate(self, name: str) -> float:
        return next(
            float(group["lr"])
            for group in self._optimizer.param_groups
            if any(self._names[parameter] == name for parameter in group["params"])
        )

    def _begun(self, *_: Any) -> None:
        self._forward += 1

    def _called(self, name: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Record the call once backward has the gradient of its output."""
        if output.requires_grad and module.training:
            output.register_hook(
                functools.partial(self._record, name, inputs[0].detach(), self._forward)
            )

    def _record(self, name: str, x: Tensor, forward: int, y: Tensor) -> None:
        self._calls[name].append((x.double().cpu(), y.double().cpu() / self._loss_scale()))
        self._forwards.add(forward)
        self._backwards.add(torch._C._current_graph_task_id())

    def answer(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.append((bucket, future))
        if bucket.is_last():
            self._precondition()
        return future

    def _precondition(self) -> None:
        mean: dict[str, Tensor] = {}
        for bucket, _ in self._buckets:
            flat = bucket.buffer()
            of_ranks = gathered(flat)
            flat.copy_(tree_sum([each / len(of_ranks) for each in of_ranks]))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                unscaled = gradient.double().cpu() / self._loss_scale()
                mean[self._names[parameter]] = unscaled.view(parameter.shape)
        directions = self._oracle.step_of(mean, self._factors(), self._layers)
        for bucket, future in self._buckets:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                direction = directions[self._names[parameter]] * self._loss_scale()
                gradient.copy_(direction.view_as(gradient))
            future.set_result(bucket.buffer())
        self._buckets.clear()

    def _factors(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return, for each layer, A and G of all ranks that have called it."""
        own = {}
        micro_batches = min(len(self._forwards), len(self._backwards))
        self._forwards.clear()
        self._backwards.clear()
        for name, calls in self._calls.items():
            pairs = [factors_of_call(self._layers[name], x, y, len(x), "expand") for x, y in calls]
            if pairs:
                a, g = (torch.stack(list(each)) for each in zip(*pairs, strict=True))
                own[name] = (a.mean(0), g.sum(0) * micro_batches)
            calls.clear()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        return {name: [each[name] for each in of_ranks if name in each] for name in self._layers}


def kfac_in_float64(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    loss_scale: Callable[[], float] = lambda: 1.0,
    **settings: Any,
) -> tuple[Any, Any]:
    """Return the oracle and its hook, for the layers that `KFACState` would choose."""
    state = KFACState(model, optimizer, **settings)
    layers = list(state.owners)
    state.close()
    oracle = KFACOracle(model.module, layers, optimizer, Settings(**settings), loss_scale)
    return oracle, _answered
