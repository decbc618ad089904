"""What a model's layers cost, as far as their owners are chosen by it; agreed upon by all ranks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp._engine.agreement import compare, told_by_all
from crossover_ddp.errors import UnsupportedConfigurationError

from .layers import Layer, unwrapped
from .placement import LayerCost, expected_buckets, spreads
from .spread import rounding

logger = logging.getLogger(__name__)
_DEFAULT_BUCKET_BYTES: Final = 25 * 1024 * 1024
_FIRST_BUCKET_BYTES: Final = 1024 * 1024


def layer_costs(
    model: nn.Module, layers: Sequence[Layer], world_size: int, inverse_steps: int | None
) -> list[LayerCost]:
    """Return the costs of all layers, the buckets in which they are expected, and which of them had best be spread.

    A layer may be spread that has more than half of a bucket: of a full one, not of the one it comes in, so that a
    resumed run, whose first buckets are others, rounds as before.

    Args:
        model: wrapped by DDP or not; then DDP's default size of buckets is expected.
        layers: of the model.
        world_size: number of ranks.
        inverse_steps: steps that a solver serves, those of the first step if that changes; None: nothing is spread.
    """
    cap = int(getattr(model, "bucket_bytes_cap", _DEFAULT_BUCKET_BYTES))
    by_default = getattr(model, "bucket_bytes_cap_default", True)
    first = min(cap, getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BUCKET_BYTES)) if by_default else cap
    trained = [each for each in unwrapped(model).parameters() if each.requires_grad]
    numbers = expected_buckets([each.nbytes for each in trained], cap, first)
    bucket_of = {id(each): number for each, number in zip(trained, numbers, strict=True)}
    full = min(cap, sum(each.nbytes for each in trained))
    found = []
    for layer in layers:
        cost = _layer_cost(layer, bucket_of[id(layer.weight)])
        spread = (
            2 * cost.gradient_bytes > full
            and inverse_steps is not None
            # 16-bit numbers are too coarse for a gradient that is multiplied on its way.
            and layer.weight.itemsize >= 4
            and spreads(cost, world_size, inverse_steps)
        )
        found.append(cost._replace(spread=spread))
    return found


def agree(
    costs: list[LayerCost],
    layers: Sequence[Layer],
    group: dist.ProcessGroup,
    arguments: Mapping[str, object],
) -> list[LayerCost]:
    """Return the costs of layers, the same on all ranks; raise on all ranks if layers or arguments differ.

    No layer is spread if the ranks would round its last product differently.

    Args:
        costs: of this rank's layers.
        layers: in the same order.
        group: the ranks.
        arguments: of this rank's state, by name.

    Collective.
    """
    rank = group.rank()
    device = layers[0].weight.device if layers else torch.device("cpu")
    rounded = rounding(
        [layer.shape for layer, each in zip(layers, costs, strict=True) if each.spread], device
    )
    compare(group, arguments)
    answers = told_by_all(group, (costs, rounded))
    for other, (theirs, _) in enumerate(answers):
        if theirs != costs:
            raise UnsupportedConfigurationError(
                f"expected the same layers on all ranks, got {_difference(costs, theirs)} on rank {other} against rank "
                f"{rank}; build the same model everywhere"
            )
    if len({rounded for _, rounded in answers}) > 1:
        if rank == 0:
            _warn_of_rounding()
        return [each._replace(spread=False) for each in costs]
    return costs


def _warn_of_rounding() -> None:
    logger.warning(
        "layers that dominate their bucket go to one rank as a whole, which costs time: the ranks round products "
        "differently; give all the same processor, torch and number of threads"
    )


def _layer_cost(layer: Layer, bucket: int) -> LayerCost:
    shape = layer.shape
    gradient = layer.weight.nbytes + (0 if layer.bias is None else layer.bias.nbytes)
    return LayerCost(
        name=layer.name,
        groups=shape.groups,
        a_dim=shape.a_dim,
        g_dim=shape.g_dim,
        gradient_bytes=gradient,
        bucket=bucket,
    )


def _difference(ours: Sequence[LayerCost], theirs: Sequence[LayerCost]) -> str:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"layer {_described(other)} where layer {_described(mine)} is expected"
    return f"{len(theirs)} layers instead of {len(ours)}"


def _described(layer: LayerCost) -> str:
    groups = f", {layer.groups} groups" if layer.groups > 1 else ""
    return f"{layer.name!r} of A {layer.a_dim}, G {layer.g_dim}{groups}"
