"""Measures one layer of a chain on a device: its times, and the storages that it keeps.

[Note: stored and shared]
A layer keeps the storages of the tensors that it saves for backward. Its input and its output are
storages that a neighbour may keep as well. A layer that works in place, or returns a view, passes
its input's storage on, so that a storage can reach several layers. The first layer that saves such
a storage stores it, the last one as well, and so do all layers between them. All of these except
the first share it. So a stage keeps the sum of its layers' stored bytes, minus the shared bytes of
all its layers but the first. This is exact for every cut, with one exception: a stage only of
layers that pass on a storage which layers before and behind it save, such as ``nn.Flatten``. Its
sum is that storage, although it saves nothing.

A layer that returns a part of a larger storage counts as if it saved this storage, because the next
layer may keep it. This is an upper bound. Our design.
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from .chain import one_tensor

_BIAS_SCALE: Final = 0.02


class SavedBytes(NamedTuple):
    """The storages that one layer keeps for backward."""

    # The size of the storages that are neither the input's nor the output's.
    inner_bytes: int
    # The sizes of the input's and the output's storage.
    input_bytes: int
    output_bytes: int
    saves_input: bool
    saves_output: bool
    # Whether the output lies in the input's storage.
    passes_on: bool


class LayerCosts(NamedTuple):
    """The measured costs of one layer. `LayerProfile` describes them."""

    forward_s: float
    backward_s: float
    weight_s: float
    parameter_bytes: int
    frozen_bytes: int
    saved: SavedBytes


class _Run(NamedTuple):
    """A forward: the copy of the input that the layer was given, and the output."""

    given: torch.Tensor
    output: torch.Tensor
    forward_s: float


class _Times(NamedTuple):
    forward_s: float
    backward_s: float
    # The part of backward for the input's gradient alone.
    input_s: float


def stored_and_shared(layers: Sequence[SavedBytes]) -> list[tuple[int, int]]:
    """Return the stored and the shared bytes of each layer; see [Note: stored and shared]."""
    stored = [layer.inner_bytes for layer in layers]
    shared = [0] * len(layers)
    creator = -1  # the sample has no creator
    for user, layer in enumerate(layers):
        if layer.passes_on:
            continue
        _add_value(layers, creator, user, stored, shared)
        creator = user
    _add_value(layers, creator, len(layers) - 1, stored, shared)
    return list(zip(stored, shared, strict=True))


def _add_value(
    layers: Sequence[SavedBytes], creator: int, last: int, stored: list[int], shared: list[int]
) -> None:
    """Add one storage, which ``creator`` returns and the layers after it up to ``last`` reach."""
    savers = [place for place in range(creator + 1, last + 1) if layers[place].saves_input]
    if creator >= 0 and layers[creator].saves_output:
        savers.insert(0, creator)
    if not savers:
        return
    for place in range(savers[0], savers[-1] + 1):
        layer = layers[place]
        stored[place] += layer.output_bytes if place == creator else layer.input_bytes
        if place > savers[0]:
            shared[place] += layer.input_bytes


def placed(
    name: str, layer: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """Return a copy of a layer on ``device``. Parameters on the meta device get random values.

    Args:
        name: the name of the layer, for the error message.
        layer: the layer, which is left as it is.
        device: where to put the copy.
        dtype: the dtype of floating-point parameters and buffers. None: as they are.

    On failure: ``ValueError`` if the layer cannot be copied.
    """
    try:
        made = copy.deepcopy(layer)
    except Exception as error:  # from any module's __deepcopy__
        raise ValueError(
            f"expected a layer that copy.deepcopy can copy, got layer {name!r} ({error}); keep "
            "tensors in parameters and buffers only"
        ) from error
    filled: dict[torch.Tensor, torch.Tensor] = {}  # a tensor may have several names
    for module in made.modules():
        tensors = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for attribute, tensor in tensors:
            if tensor.is_meta:
                if tensor not in filled:
                    filled[tensor] = _filled(tensor, device)
                setattr(module, attribute, filled[tensor])
    return made.to(device, dtype)


def _filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like this one on the meta device, with small values and no NaN in forward."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    values = torch.randn(tensor.shape, device=device)
    if tensor.dim() > 1:
        # Outputs as large as inputs: tiny ones would be slow subnormal numbers after some layers.
        values *= (tensor.shape[0] / max(1, tensor.numel())) ** 0.5
    else:
        values *= _BIAS_SCALE
    if not isinstance(tensor, nn.Parameter):
        return values.abs().to(tensor.dtype)  # a running variance must not be negative
    return nn.Parameter(values.to(tensor.dtype), tensor.requires_grad)


class LayerMeter:
    """Run one layer on a device, and measure its costs.

    Args:
        name: the name of the layer, for error messages.
        layer: the layer. Its buffers change, and its parameters get gradients.
        inputs: its input, on the layer's device. The gradient of the input is computed if the input
            requires one.
        autocast: the dtype for ``torch.autocast``. None: without it.
    """

    def __init__(
        self, name: str, layer: nn.Module, inputs: torch.Tensor, autocast: torch.dtype | None
    ) -> None:
        self._name = name
        self._layer = layer
        self._inputs = inputs
        self._autocast = autocast

    def measure(self, repeats: int) -> tuple[LayerCosts, torch.Tensor]:
        """Return the costs, and the output as the next layer's input.

        One untimed run comes first. It warms up, and finds the saved tensors.
        """
        output, saved = self._saved()
        trials = [self._trial() for _ in range(repeats)]
        forward_s, backward_s, input_s = map(median, zip(*trials, strict=True))
        held = [*self._layer.parameters(), *self._layer.buffers()]
        costs = LayerCosts(
            forward_s,
            backward_s,
            max(0.0, backward_s - input_s),
            sum(each.nbytes for each in held if each.requires_grad),
            sum(each.nbytes for each in held if not each.requires_grad),
            saved,
        )
        return costs, output

    def _saved(self) -> tuple[torch.Tensor, SavedBytes]:
        kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        with _recording(kept):
            run = self._forward()
        saved = self._saved_bytes(kept, run)
        output = run.output
        self._backward_s(output)
        return output.detach().requires_grad_(output.requires_grad), saved

    def _saved_bytes(self, kept: "weakref.WeakSet[_Kept]", run: _Run) -> SavedBytes:
        """Return the sizes of the kept storages. The graph of ``run`` must be alive.

        So all storages are alive as well, and different ones have different addresses.
        """
        sizes = {_address(each.tensor): each.tensor.untyped_storage().nbytes() for each in kept}
        for tensor in (*self._layer.parameters(), *self._layer.buffers()):
            sizes.pop(_address(tensor), None)
        given, output = _address(run.given), _address(run.output)
        output_bytes = run.output.untyped_storage().nbytes()
        is_part = run.output.requires_grad and output_bytes > run.output.nbytes
        if is_part:  # [Note: stored and shared]
            sizes[output] = output_bytes
        ends = {given} if is_part else {given, output}
        return SavedBytes(
            inner_bytes=sum(size for address, size in sizes.items() if address not in ends),
            input_bytes=run.given.untyped_storage().nbytes(),
            output_bytes=output_bytes,
            saves_input=given in sizes,
            saves_output=output in sizes and not is_part,
            passes_on=given == output and not is_part,
        )

    def _trial(self) -> _Times:
        run = self._forward()
        # Gradients of parameters are added to those of earlier runs, as in a step of a pipeline.
        backward_s = self._backward_s(run.output)
        if not self._inputs.requires_grad:
            return _Times(run.forward_s, backward_s, 0.0)
        trained = [each for each in self._layer.parameters() if each.requires_grad]
        if not trained:
            return _Times(run.forward_s, backward_s, backward_s)
        # Not torch.autograd.grad, since a custom Function would still compute all gradients.
        for parameter in trained:
            parameter.requires_grad_(False)
        input_s = self._backward_s(self._forward().output)
        for parameter in trained:
            parameter.requires_grad_()
        return _Times(run.forward_s, backward_s, input_s)

    def _forward(self) -> _Run:
        leaf = self._inputs.detach().requires_grad_(self._inputs.requires_grad)
        given = leaf.clone()  # the layer may change its input in place, like nn.ReLU(inplace=True)
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._autocast is not None:
            context = torch.autocast(given.device.type, dtype=self._autocast)
        begin_s = self._now_s()
        try:
            with context:
                output = self._layer(given)
        except Exception as error:
            raise ValueError(
                "expected a layer that takes the one tensor which the layer before returns, got "
                f"layer {self._name!r}, which refuses shape={tuple(given.shape)} ({error}); skip "
                "connections must stay inside one layer"
            ) from error
        forward_s = self._now_s() - begin_s
        return _Run(given, one_tensor(output, self._name), forward_s)

    def _backward_s(self, output: torch.Tensor) -> float:
        if not output.requires_grad:
            return 0.0
        gradient = torch.ones_like(output)
        begin_s = self._now_s()
        torch.autograd.backward(output, gradient)
        return self._now_s() - begin_s

    def _now_s(self) -> float:
        if self._inputs.device.type != "cpu":
            torch.accelerator.synchronize(self._inputs.device)
        return perf_counter()


class _Kept:
    """A tensor that autograd has saved. Only the graph refers to this object."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextlib.contextmanager
def _recording(kept: "weakref.WeakSet[_Kept]") -> Iterator[None]:
    """Add all tensors to ``kept`` that forward saves for backward."""

    def pack(tensor: torch.Tensor) -> _Kept:
        made = _Kept(tensor)
        kept.add(made)
        return made

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda made: made.tensor):
        yield


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
