"""Find the layers in a model that K-FAC can treat, and say why other parameters pass through."""

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

TOO_LARGE: Final = "above max_factor_dim"


@dataclass(frozen=True)
class LayerShape:
    """The properties of a layer that determine the sizes of its factors."""

    # The number of groups, which act like layers side by side. It exceeds 1 only in grouped
    # convolutions.
    groups: int
    # The number of input features per group, plus one for the column of ones if there is a bias.
    a_dim: int
    # The number of outputs per group.
    g_dim: int
    # Whether there is a bias that is trained.
    has_bias: bool
    # Whether the weight is [inputs, outputs].
    transposed: bool = False


def layer_shape(module: nn.Module) -> LayerShape | None:
    """Return the shape of an ``nn.Linear`` or ``nn.Conv2d`` whose weight is trained, else None.

    ``Conv1D`` from the transformers package, which GPT-2 uses, counts as a Linear layer with a
    transposed weight. A subclass counts if it computes the same as its base class. The result is
    also None for a lazy, quantized, pruned or parametrized layer, because the optimizer does not
    update such a layer's weight itself, and for the projection in ``nn.MultiheadAttention``, whose
    weight is read without a call of the module.
    """
    if not _computes_as_known(module) or not _trained(module, "weight"):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not weight.is_floating_point():
        return None
    has_bias = _trained(module, "bias")
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return LayerShape(1, weight.shape[0] + has_bias, weight.shape[1], has_bias, transposed=True)
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    return LayerShape(groups, weight[0].numel() + has_bias, weight.shape[0] // groups, has_bias)


def _computes_as_known(module: nn.Module) -> bool:
    """Return whether a module computes the same as its base class Linear, Conv2d or Conv1D."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    known = _known_class(module)
    if known is None or parametrize.is_parametrized(module):
        return False
    names = {"forward", "_conv_forward"}
    return not names & vars(module).keys() and all(
        getattr(type(module), name, None) is getattr(known, name, None) for name in names
    )


def _known_class(module: nn.Module) -> type[nn.Module] | None:
    for known in type(module).__mro__:
        if known in (nn.Linear, nn.Conv2d):
            return known
        # Conv1D is recognized by its name: importing it would require the package.
        if known.__name__ == "Conv1D" and known.__module__ == "transformers.pytorch_utils":
            return known
    return None


def _trained(module: nn.Module, name: str) -> bool:
    # Subclasses of Parameter do not count: they are lazy, quantized or sharded.
    parameter = getattr(module, name, None)
    return type(parameter) is nn.Parameter and parameter.requires_grad


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that K-FAC treats, and its parameters."""

    # The name of the layer's first module in the model, without the prefixes of DDP and
    # torch.compile.
    name: str
    # All modules that share these parameters. Usually there is only one.
    modules: tuple[nn.Module, ...]
    shape: LayerShape
    weight: nn.Parameter
    # None if the layer has no bias, or if the bias is frozen.
    bias: nn.Parameter | None

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The weight, and the bias if there is one, by their names in the model."""
        prefix = f"{self.name}." if self.name else ""
        found = {f"{prefix}weight": self.weight}
        if self.bias is not None:
            found[f"{prefix}bias"] = self.bias
        return found


class _Use(NamedTuple):
    """A module that has a given parameter."""

    module: nn.Module
    # The parameter's names in the module and in the model.
    attribute: str
    name: str


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and ``torch.compile``."""
    *_, innermost = _wrapped(model)
    return innermost


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return a DDP model's process group, or None for the default group or a model without DDP."""
    ddp = ddp_in(model)
    group: dist.ProcessGroup | None = None if ddp is None else ddp.process_group
    return None if group is dist.group.WORLD else group


def ddp_in(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP model that ``model`` is or wraps; None for a model without DDP."""
    kind = nn.parallel.DistributedDataParallel
    return next((each for each in _wrapped(model) if isinstance(each, kind)), None)


def _wrapped(model: nn.Module) -> Iterator[nn.Module]:
    while True:
        yield model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return


def find_layers(
    model: nn.Module, skip: Sequence[str] = (), max_dim: int | None = None
) -> tuple[list[Layer], dict[str, str]]:
    """List the layers that K-FAC can treat, and the reasons why other parameters pass through.

    Modules of equal shape that share all their parameters are one layer. A weight that is shared
    with another kind of module (an embedding) passes through.

    Args:
        model: the model. It may be wrapped by DDP or ``torch.compile``.
        skip: names or shell patterns of modules that pass through. A name includes all modules
            inside that module. Each entry must match a module.
        max_dim: the maximum size of a factor. A layer with a larger factor passes through. None
            means no limit.

    Returns:
        The layers in the order of registration, which is the same on all ranks, and the reasons by
        the parameter's name.
    """
    root = unwrapped(model)
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    if isinstance(skip, str):
        raise TypeError(f"expected a list of names, got skip={skip!r}; pass skip=[{skip!r}]")
    for pattern in skip:
        if not any(_named(name, [pattern]) for of_module in names.values() for name in of_module):
            raise ValueError(
                f"expected skip to name modules, got {pattern!r}, which matches none; names are "
                "those of model.named_modules() without the 'module.' of DDP"
            )
    uses: dict[nn.Parameter, list[_Use]] = {}
    for module, (name, *_) in names.items():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{name}.{attribute}" if name else attribute
            uses.setdefault(parameter, []).append(_Use(module, attribute, full))
    skipped = {
        module
        for module, of_module in names.items()
        if any(_named(name, skip) for name in of_module)
    }
    layers: dict[nn.Parameter, Layer] = {}
    reasons: dict[nn.Module, str] = {}
    for module, (name, *_) in names.items():
        found = _layer_of(module, name, uses, skipped, max_dim)
        if isinstance(found, Layer):
            layers.setdefault(found.weight, found)
        else:
            reasons[module] = found
    treated = {parameter for layer in layers.values() for parameter in (layer.weight, layer.bias)}
    return list(layers.values()), {
        name: _reason(parameter, uses[parameter], reasons)
        for name, parameter in root.named_parameters()
        if parameter not in treated
    }


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(name == p or name.startswith(f"{p}.") or fnmatchcase(name, p) for p in patterns)


def _layer_of(
    module: nn.Module,
    name: str,
    uses: dict[nn.Parameter, list[_Use]],
    skipped: Collection[nn.Module],
    max_dim: int | None,
) -> Layer | str:
    """Return the layer that ``module`` belongs to, or the reason why it passes through."""
    shape = layer_shape(module)
    if shape is None:
        frozen = isinstance(module, nn.Linear | nn.Conv2d) and not module.weight.requires_grad
        return "beside a frozen weight" if frozen else "not Linear or Conv2d"
    weight = module.weight
    bias = module.bias if shape.has_bias else None
    assert isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
    sharers = {use.module: use for use in uses[weight]}
    if any(sharer in skipped for sharer in sharers):
        return "named in skip"
    for use in uses[weight]:
        same = use.attribute == "weight" and layer_shape(use.module) == shape
        if not same or (bias is not None and use.module.bias is not bias):
            return "shared"
    if bias is not None:
        uses_of_bias = {(use.module, use.attribute) for use in uses[bias]}
        if uses_of_bias != {(sharer, "bias") for sharer in sharers}:
            return "shared"
    for factor, dim in (("A", shape.a_dim), ("G", shape.g_dim)):
        if max_dim is not None and dim > max_dim:
            return f"{factor} of {dim} rows, {TOO_LARGE}={max_dim}"
    return Layer(name, tuple(sharers), shape, weight, bias)


def _reason(parameter: nn.Parameter, uses: list[_Use], reasons: dict[nn.Module, str]) -> str:
    """Return why a parameter passes through, given the reasons for the modules that use it."""
    if not parameter.requires_grad:
        return "frozen"
    why = {reasons.get(use.module, "shared") for use in uses}
    if "named in skip" in why:
        return "named in skip"
    if len(uses) > 1:
        return f"shared with {uses[1].name}"
    return "beside a shared parameter" if why == {"shared"} else why.pop()
