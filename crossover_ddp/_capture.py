"""Which layers K-FAC can treat, and the hooks that record the factors of this rank's mini-batch.

[Note: one step of several calls] A layer may be called more than once: it is used twice in one forward, or the
gradient of a step is accumulated over m micro-batches. Each call adds its factors to a sum. A is the mean over all
calls. The gradient of the weight is a sum over the calls of one micro-batch, hence so is G; over micro-batches it is
a mean. Where the loss of each was divided by m, as usual, a sample's own gradient is m N g instead of N g, so G is
multiplied by m². "kfac-pytorch" takes plain means of both, as that package does; the result is what one large
batch would have given there.

[Note: few columns] A factor is C Cᵀ of columns, one per sample and position. Where a mini-batch has few of them they
are smaller than the factor, so they are kept, and sent, instead of it: exactly the same, with less traffic, and the
product is left to the layer's owner. How many may be sent is agreed before the step.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ._columns import (
    LayerShape,
    WeightSharing,
    input_columns,
    input_count,
    layer_shape,
    output_columns,
    output_count,
)
from ._factors import input_factor, output_factor

_NO_BACKWARD: Final = -1


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that K-FAC treats, and its parameters.

    Args:
        name: of its first module in the model, without the prefixes of DDP and ``torch.compile``.
        modules: all modules that share these parameters, usually one.
        shape: of its factors.
        weight: as the modules have it.
        bias: None where it has none or a frozen one.
    """

    name: str
    modules: tuple[nn.Module, ...]
    shape: LayerShape
    weight: nn.Parameter
    bias: nn.Parameter | None


class Captured(NamedTuple):
    """The factors of one layer in this step: [groups, a_dim, a_dim] and [groups, g_dim, g_dim], or their columns."""

    a: Tensor
    g: Tensor


class Room(NamedTuple):
    """How many columns of a layer's factors each rank may send, see [Note: few columns]; 0: the factor itself."""

    a: int = 0
    g: int = 0


class _Use(NamedTuple):
    """A module that has a parameter, and under which name."""

    module: nn.Module
    attribute: str
    name: str


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and ``torch.compile``."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def find_layers(model: nn.Module, skip: Sequence[str] = ()) -> tuple[list[Layer], dict[str, str]]:
    """List the layers that K-FAC can treat, and why each other parameter passes through as it is.

    Modules of equal shape that share all their parameters are one layer. A weight that is shared with anything
    else (an embedding) passes through.

    Args:
        model: plain, or wrapped by DDP or ``torch.compile``.
        skip: names of modules not to treat: a name with all below it, or a pattern as of the shell.

    Returns: the layers in the order of registration, the same on all ranks of the same model; and reasons by name
    of parameter.
    """
    root = unwrapped(model)
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    uses: dict[nn.Parameter, list[_Use]] = {}
    for module, (name, *_) in names.items():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{name}.{attribute}" if name else attribute
            uses.setdefault(parameter, []).append(_Use(module, attribute, full))
    skipped = {module for module, of in names.items() if any(_named(name, skip) for name in of)}
    layers: dict[nn.Parameter, Layer] = {}
    reasons: dict[nn.Module, str] = {}
    for module, (name, *_) in names.items():
        found = _layer_of(module, name, uses, skipped)
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
    module: nn.Module, name: str, uses: dict[nn.Parameter, list[_Use]], skipped: Collection[nn.Module]
) -> Layer | str:
    """Return the layer that ``module`` belongs to, or why it is none."""
    shape = layer_shape(module)
    if shape is None:
        frozen = isinstance(module, nn.Linear | nn.Conv2d) and not module.weight.requires_grad
        return "beside a frozen weight" if frozen else "not Linear or Conv2d"
    weight, bias = module.weight, module.bias if shape.has_bias else None
    assert isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
    sharers = {use.module: use for use in uses[weight]}
    if any(sharer in skipped for sharer in sharers):
        return "named in skip"
    for use in uses[weight]:
        same = use.attribute == "weight" and layer_shape(use.module) == shape
        if not same or (bias is not None and use.module.bias is not bias):
            return "shared"
    if bias is not None and {(use.module, use.attribute) for use in uses[bias]} != {
        (m, "bias") for m in sharers
    }:
        return "shared"
    return Layer(name, tuple(sharers), shape, weight, bias)


def _reason(parameter: nn.Parameter, of: list[_Use], reasons: dict[nn.Module, str]) -> str:
    if not parameter.requires_grad:
        return "frozen"
    why = {reasons.get(use.module, "shared") for use in of}
    if "named in skip" in why:
        return "named in skip"
    if len(of) > 1:
        return f"shared with {of[1].name}"
    return "beside a shared parameter" if why == {"shared"} else why.pop()


@dataclass
class _Sum:
    """What one layer has gathered of one of its factors in this step: a sum, or columns."""

    total: Tensor | None = None
    columns: list[Tensor] = field(default_factory=list)
    count: int = 0  # of columns
    calls: int = 0

    def add(self, factor: Tensor) -> None:
        self.total = factor if self.total is None else self.total.add_(factor)

    def take(self, room: int, scale: Callable[[int], float]) -> Tensor | None:
        """Return the factor, times ``scale`` of the number of calls, or its columns; None if there is none."""
        if not self.calls or self.count > room > 0:
            return None
        if not room:
            assert self.total is not None
            return self.total.mul_(scale(self.calls))
        return torch.cat(self.columns, dim=2).mul_(math.sqrt(scale(self.calls)))


@dataclass
class _Sums:
    """Both factors of one layer, and how often it was called in this micro-batch, not to recompute in backward."""

    a: _Sum = field(default_factory=_Sum)
    g: _Sum = field(default_factory=_Sum)
    forward_calls: int = 0


class FactorCapture:
    """Record the factors of a model's layers while it trains, see [Note: one step of several calls].

    The hooks do something only while `active`, in training mode and with gradients enabled. A copy of the model
    (an average of its weights) has hooks that do nothing. Not collective; one rank may capture what another does
    not.

    Under ``torch.compile`` a hook runs outside of the graph, which is cut around each captured layer; make the capture
    before the model's first call, later hooks are not seen by what is already compiled.

    Args:
        layers: of `find_layers`; an index below is one of this list.
        sharing: how positions of a sample are counted.
        model: its forward begins a micro-batch; None if the caller says so by `begin_micro_batch`.
        loss_scale: by what the loss is multiplied; read once per micro-batch.
        accumulated: "mean" if each micro-batch's loss is divided by their number, "sum" if not.
        only: the indices to capture; default all. Others cost nothing.

    Attributes:
        active: whether anything is captured.
        on_begin: called when a micro-batch begins.
        on_input: called with the layer's index when A has been added to.
        room: by the layer's index, the same during a step: whether columns are kept.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        sharing: WeightSharing,
        model: nn.Module | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
        accumulated: Literal["mean", "sum"] = "mean",
        only: Collection[int] | None = None,
    ) -> None:
        if accumulated not in ("mean", "sum"):
            raise ValueError(f"expected accumulated='mean' or 'sum', got accumulated={accumulated!r}")
        self.active = True
        self.on_begin: Callable[[], None] | None = None
        self.on_input: Callable[[int], None] | None = None
        self.room: Callable[[int], Room] = _no_room
        self._layers = list(layers)
        self._sharing = sharing
        self._loss_scale = loss_scale
        self._scale: float | None = None
        self._accumulated = accumulated
        chosen = range(len(self._layers)) if only is None else sorted(only)
        self._sums = {index: _Sums() for index in chosen}
        self._micro_batches = 0
        self._gradients_came = False
        self._began_before_backward = False
        self._handles = list(self._hooked(model))

    def _hooked(self, model: nn.Module | None) -> Iterator[RemovableHandle]:
        for index in self._sums:
            for module in self._layers[index].modules:
                hook = _Hook(self, "_on_forward", index)
                # First of all hooks: another one may replace the output.
                yield module.register_forward_hook(hook, prepend=True, with_kwargs=True)
        if model is not None:
            yield unwrapped(model).register_forward_pre_hook(_Hook(self, "_on_root"))

    @property
    def micro_batches(self) -> int:
        """How many micro-batches this step has had, the one in progress included."""
        return self._micro_batches

    def begin_step(self) -> None:
        """Forget all that was not taken, and count micro-batches anew."""
        for index in self._sums:
            self._sums[index] = _Sums()
        self._micro_batches = 0
        self._gradients_came = False
        self._scale = None

    def begin_micro_batch(self) -> None:
        """Note that a forward of the model begins.

        Several forwards before a gradient comes (two views of a picture, a recomputed forward) are one micro-batch.
        """
        if self._micro_batches and (
            not self._gradients_came or (self._began_before_backward and _in_backward())
        ):
            return
        self._began_before_backward = not _in_backward()
        self._micro_batches += 1
        self._gradients_came = False
        self._scale = None
        if self.on_begin is not None:
            self.on_begin()
        for sums in self._sums.values():
            sums.forward_calls = 0

    def take_input(self, index: int) -> Tensor | None:
        """Return A of a layer as of now, or its columns [groups, a_dim, count], and forget it.

        None if it was not called, or has more columns than there is room for.
        """
        sums = self._sums[index]
        found = sums.a.take(self.room(index).a, lambda calls: 1 / calls)
        sums.a = _Sum(count=sums.a.count)
        return found

    def take_output(self, index: int) -> Tensor | None:
        """Return G of a layer as of now, or its columns, and forget it; None as `take_input`."""
        sums = self._sums[index]
        found = sums.g.take(self.room(index).g, self._output_scale)
        sums.g = _Sum(count=sums.g.count)
        return found

    def _output_scale(self, calls: int) -> float:
        if self._sharing == "kfac-pytorch":
            return 1 / calls
        m = max(1, self._micro_batches)
        return m if self._accumulated == "mean" else 1 / m

    def counts(self, index: int) -> Room:
        """Return how many columns a layer's factors had in this step, taken or not; 0 if it is not captured."""
        sums = self._sums.get(index)
        return Room() if sums is None else Room(sums.a.count, sums.g.count)

    def take(self, index: int) -> Captured | None:
        """Return both factors of a layer and forget them; None if it was not called or no gradient came."""
        a, g = self.take_input(index), self.take_output(index)
        return None if a is None or g is None else Captured(a, g)

    def close(self) -> None:
        """Remove the hooks and forget what was captured; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False
        self.begin_step()

    def _on_root(self, module: nn.Module, args: object) -> None:
        if self._captures(module):
            self.begin_micro_batch()

    def _on_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not self._captures(module):
            return
        if self._is_new(index):
            self._add_input(index, module, args[0] if args else kwargs["input"], output)
        if output.requires_grad:
            output.register_hook(partial(self._on_gradient, index, module))

    def _captures(self, module: nn.Module) -> bool:
        return self.active and module.training and torch.is_grad_enabled()

    def _is_new(self, index: int) -> bool:
        """Tell whether this input was not counted before; count it.

        Activation checkpointing calls a layer again in backward. The reentrant kind had gradients disabled the
        first time. With the other kind the first output has the hook that will fire, and the second never fires.
        """
        sums = self._sums[index]
        if _in_backward():
            return sums.forward_calls == 0
        sums.forward_calls += 1
        return True

    def _add_input(self, index: int, module: nn.Module, input: Tensor, output: Tensor) -> None:
        total, shape, room = self._sums[index].a, self._layers[index].shape, self.room(index).a
        total.calls += 1
        total.count += input_count(module, input, output, self._sharing)
        if not room:
            total.add(input_factor(module, shape, input, self._sharing))
        elif total.count <= room:
            total.columns.append(input_columns(module, shape, input, self._sharing).scaled())
        if self.on_input is not None:
            self.on_input(index)

    def _on_gradient(self, index: int, module: nn.Module, gradient: Tensor) -> None:
        if not self._handles:
            return
        self._gradients_came = True
        if self._scale is None:  # a GradScaler's makes the host wait for the device
            self._scale = self._loss_scale()
        total, shape, room = self._sums[index].g, self._layers[index].shape, self.room(index).g
        total.calls += 1
        total.count += output_count(module, gradient, self._sharing)
        if not room:
            factor = output_factor(module, shape, gradient, self._sharing)
            total.add(factor.div_(self._scale**2))
        elif total.count <= room:
            columns = output_columns(module, shape, gradient, self._sharing).scaled()
            total.columns.append(columns.div_(self._scale))


def _in_backward() -> bool:
    """Tell whether autograd is what runs this, on whichever thread."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def _no_room(index: int) -> Room:
    return Room()


class _Hook:
    """A hook of a module that knows the capture weakly, and whose copies know none."""

    def __init__(self, capture: FactorCapture | None, method: str, *arguments: object) -> None:
        self._capture = None if capture is None else weakref.ref(capture)
        self._method = method
        self._arguments = arguments
        # A compiler would trace what it sees of this moment, the sums and flags as constants.
        self._run = None if capture is None else torch.compiler.disable(self._run_eagerly)

    def __call__(self, *arguments: object) -> None:
        if self._run is not None:
            self._run(*arguments)

    def _run_eagerly(self, *arguments: object) -> None:
        capture = None if self._capture is None else self._capture()
        if capture is not None:
            getattr(capture, self._method)(*self._arguments, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._method)
