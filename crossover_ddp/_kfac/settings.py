"""Check K-FAC's arguments and the model, and compare them between ranks before the first step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._ddp.groups import compare, gather_objects
from crossover_ddp.errors import UnsupportedConfigurationError

from .curvature import WeightSharing, rounding
from .layers import TOO_LARGE, Layer, unwrapped
from .placement import LayerCost, expected_buckets, spreads
from .preconditioner import listed

logger = logging.getLogger(__name__)

_DEFAULT_BUCKET_BYTES: Final = 25 * 1024 * 1024
_FIRST_BUCKET_BYTES: Final = 1024 * 1024
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "solver": ("inverse", "eigen"),
    "weight_sharing": get_args(WeightSharing),
    "factors": ("global", "local"),
    "accumulated": ("mean", "sum"),
}


def check_choices(given: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if an argument is not among its choices."""
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ValueError(
                f"expected {name} to be one of {', '.join(_CHOICES[name])}, got {name}={value!r}"
            )


def check_parameters(layers: Sequence[Layer], model: nn.Module) -> None:
    """Refuse a model that is not whole on one device, and layers whose weight is float16."""
    sharded = [
        name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")
    ]
    if sharded:
        raise UnsupportedConfigurationError(
            f"expected whole parameters, got {sharded[0]} sharded over ranks (DTensor); K-FAC "
            "works with data parallelism only: use DistributedDataParallel without tensor or "
            "model parallelism"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedConfigurationError(
            f"expected a model on one device, got parameters on {sorted(map(str, devices))}; K-FAC "
            "works with data parallelism only: keep each replica on one device"
        )
    for layer in layers:
        if layer.weight.dtype == torch.float16:
            raise UnsupportedConfigurationError(
                f"expected parameters of float32, float64 or bfloat16, got {layer.name}.weight of "
                "float16, whose range is too small for preconditioned gradients; keep the "
                "parameters in float32 and use autocast, or skip it"
            )


def check_any(layers: Sequence[Layer], passing: Mapping[str, str]) -> None:
    """Refuse a model without a layer that K-FAC treats."""
    if not layers:
        found = "; ".join(f"{name}: {reason}" for name, reason in list(passing.items())[:3])
        raise UnsupportedConfigurationError(
            f"expected a model with a layer that K-FAC treats, got none of {len(passing)} "
            f"parameters ({found}); Linear and Conv2d layers count unless they are frozen, shared, "
            "skipped or too large: see skip= and max_factor_dim=, or train without kfac_hook"
        )


def layer_costs(
    model: nn.Module, layers: Sequence[Layer], world_size: int, inverse_steps: int | None
) -> list[LayerCost]:
    """Return the cost of each layer, with its expected bucket and whether it is spread.

    A layer may be spread if it fills more than half of a full bucket. The bucket that it actually
    comes in does not matter: a resumed run has different first buckets but must round in the same
    way. If ``inverse_steps`` is None, no layer is spread.
    """
    cap = int(getattr(model, "bucket_bytes_cap", _DEFAULT_BUCKET_BYTES))
    first = cap
    if getattr(model, "bucket_bytes_cap_default", True):
        first = min(cap, getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BUCKET_BYTES))
    trained = [each for each in unwrapped(model).parameters() if each.requires_grad]
    numbers = expected_buckets([each.nbytes for each in trained], cap, first)
    bucket_of = {id(each): number for each, number in zip(trained, numbers, strict=True)}
    full = min(cap, sum(each.nbytes for each in trained))
    found = []
    for layer in layers:
        shape = layer.shape
        gradient_bytes = sum(each.nbytes for each in layer.parameters.values())
        bucket = bucket_of[id(layer.weight)]
        cost = LayerCost(layer.name, shape.groups, shape.a_dim, shape.g_dim, gradient_bytes, bucket)
        spread = (
            2 * cost.gradient_bytes > full
            and inverse_steps is not None
            # 16-bit numbers are too coarse for T ∇, which is summed over the ranks on the way.
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
    """Check that all ranks have the same layers and arguments, and return the layers' costs.

    If the ranks would round the last product of spread layers differently, no layer is spread in
    the returned costs.

    On failure: all ranks raise ``UnsupportedConfigurationError`` if layers or arguments differ.

    **Collective**.
    """
    device = layers[0].weight.device if layers else torch.device("cpu")
    spread = [layer.shape for layer, each in zip(layers, costs, strict=True) if each.spread]
    rounded = rounding(spread, device)
    names = [each.name for each in costs]
    compare(
        group, {**arguments, "layers": names, **{f"layer {each.name!r}": each for each in costs}}
    )
    if len(set(gather_objects(group, rounded))) > 1:
        if group.rank() == 0:
            logger.warning(
                "layers that dominate their bucket go to one rank as a whole, which costs time: "
                "the ranks round products differently; give all the same processor, torch and "
                "number of threads"
            )
        return [each._replace(spread=False) for each in costs]
    return costs


def warn_of_large(passing: Mapping[str, str]) -> None:
    """Give one warning that names the parameters whose layers are too large."""
    large = [name for name, reason in passing.items() if TOO_LARGE in reason]
    if large:
        logger.warning(
            "%s of %d in all pass through as plain gradients: %s. Raise max_factor_dim to treat "
            "them, or name them in skip=",
            ", ".join(large[:4]),
            len(large),
            passing[large[0]],
        )


def warn_of_adaptive(
    optimizer: Optimizer | Sequence[Optimizer] | None, layers: Sequence[Layer]
) -> None:
    """Give one warning if an optimizer of the layers' weights divides gradients by their size."""
    weights = {id(layer.weight) for layer in layers}
    dividing = [
        each for each in listed(optimizer) if any(_divides(kind) for kind in type(each).__mro__)
    ]
    found = {
        type(each).__name__
        for each in dividing
        for group in each.param_groups
        if weights & {id(parameter) for parameter in group["params"]}
    }
    if found:
        logger.warning(
            "%s divides each gradient by a running mean of its size, which undoes K-FAC's "
            "preconditioning; use SGD for the layers that K-FAC treats, with the learning rate of "
            "a second-order step",
            ", ".join(sorted(found)),
        )


def _divides(kind: type) -> bool:
    name = kind.__name__.lower()
    return any(
        each in name for each in ("adam", "rmsprop", "adagrad", "adadelta", "adafactor", "lamb")
    )
