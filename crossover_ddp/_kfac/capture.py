"""The hooks that record the factors of this rank's mini-batch, while a model trains.

[Note: one step of several calls] A layer may be called more than once: it is used twice in one forward, or the
gradient of a step is accumulated over m micro-batches. Each call adds its factors to a sum. A is the mean over all
calls. The gradient of the weight is a sum over the calls of one micro-batch, hence so is G; over micro-batches it is
a mean. Where the loss of each was divided by m, as usual, a sample's own gradient is m N g instead of N g, so G is
multiplied by m². "kfac-pytorch" takes plain means of both, as that package does; the result is what one large
batch would have given there. What does not end up in the step's gradient is no part of it: see [Note: on trial].

[Note: few columns] A factor is C Cᵀ of columns, one per sample and position. Where a mini-batch has few of them they
are smaller than the factor, so they are kept, and sent, instead of it: exactly the same, with less traffic, and the
product is left to the layer's owner. Each rank decides that for itself, see `placement.most_columns`.

[Note: hooks on views] A hook on a tensor belongs to the tensor's place in autograd's graph. Where a layer returns a
view (a Linear layer of three-dimensional inputs does before torch 2.15, a convolution of one picture everywhere), that
place is no longer part of the graph once the view is changed in place, as by ``ReLU(inplace=True)``: autograd then
goes on at the tensor that the view is of. So the hook is put there.
"""

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .columns import WeightSharing, input_columns, input_count, output_columns, output_count
from .factor_sums import Call, ColumnRoom, GradientMark, LayerSums
from .factors import BatchFactor, Gram, input_factor, input_factor_of, output_factor
from .layers import Layer, unwrapped

logger = logging.getLogger(__name__)

_NO_BACKWARD: Final = -1
_NOTHING_SEEN: Final = (
    "K-FAC has seen no call of any layer whose gradient came, so gradients stay as they are: layers are seen in "
    "training mode, in calls after the KFACState was made. Call train() on the model, not eval() (a Dropout or "
    "BatchNorm in it may be in eval mode), and make the state before the model is compiled and called"
)


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
        rooms: by layer, how many columns are kept; default none.

    Attributes:
        active: whether anything is captured.
        on_begin: called when a micro-batch begins.
        on_input: called with the layer's index when it was called in forward.
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
        rooms: Sequence[ColumnRoom] | None = None,
    ) -> None:
        self.active = True
        self.on_begin: Callable[[], None] | None = None
        self.on_input: Callable[[int], None] | None = None
        self._layers = list(layers)
        self._rooms = [ColumnRoom() for _ in layers] if rooms is None else rooms
        self._sharing = sharing
        self._loss_scale = loss_scale
        self._scale: float | None = None
        self._accumulated = accumulated
        chosen = range(len(self._layers)) if only is None else sorted(only)
        self._sums = {index: LayerSums() for index in chosen}
        # Of all layers: those that are not captured also show which micro-batches count.
        self._marks = [GradientMark() for _ in self._layers]
        self._step = 0
        self._numbers = itertools.count()
        self._newest_task = _NO_BACKWARD
        self._warned = False
        self._warned_of_none = False
        self._seen: set[bool] = set()  # whether layers were, of those whose gradients came in this step
        self._micro_batch = 0
        self._gradients_came = False
        self._began_before_backward = False
        self._handles = list(self._hooked(model))

    def _hooked(self, model: nn.Module | None) -> Iterator[RemovableHandle]:
        for index in self._sums:
            for module in self._layers[index].modules:
                hook = WeakHook(self, "_on_forward", index)
                # First of all hooks: another one may replace the output.
                yield module.register_forward_hook(hook, prepend=True, with_kwargs=True)
        for index, layer in enumerate(self._layers):
            yield layer.weight.register_post_accumulate_grad_hook(WeakHook(self, "_on_accumulated", index))
        if model is not None:
            yield unwrapped(model).register_forward_pre_hook(WeakHook(self, "_on_root"))

    @property
    def micro_batches(self) -> int:
        """How many micro-batches have their gradients in this step's so far."""
        return len(set().union(*(mark.micro_batches for mark in self._marks)))

    def begin_step(self) -> None:
        """Forget all that was not taken, and count micro-batches anew."""
        if self._seen == {False} and not self._warned_of_none:
            self._warned_of_none = True
            logger.warning(_NOTHING_SEEN)
        self._seen.clear()
        for index, sums in self._sums.items():
            for call in sums.open:
                call.make_a = None
            self._sums[index] = LayerSums()
        for mark in self._marks:
            mark.clear()
        self._step += 1
        self._micro_batch = 0
        self._gradients_came = False
        self._scale = None

    def begin_micro_batch(self) -> None:
        """Note that a forward of the model begins.

        Several forwards before a gradient comes (two views of a picture, a recomputed forward) are one micro-batch.
        """
        if self._micro_batch and (
            not self._gradients_came or (self._began_before_backward and _in_backward())
        ):
            return
        self._began_before_backward = not _in_backward()
        self._micro_batch += 1
        self._gradients_came = False
        self._scale = None
        if self.on_begin is not None:
            self.on_begin()

    def begin_exchange(self) -> None:
        """The step's gradients are about to be exchanged: drop what was given up, if no layer's gradient did so."""
        if self.active:
            self._begin_pass()

    def take_input(self, index: int) -> BatchFactor | None:
        """Return A of a layer as of now, or its columns, and forget it; None if it had no gradient."""
        return self._sums[index].take_input()

    def take_input_ahead(self, index: int) -> BatchFactor | None:
        """Return A as `take_input`, of calls whose backward is still to come, too.

        If it does not come `take_output` returns what is not a number, so that the layer's factors are dropped.
        """
        if not _in_backward():
            self._drop_given_up()
        return self._sums[index].take_input_ahead(self._rooms[index].a)

    def take_output(self, index: int) -> BatchFactor | None:
        """Return G of a layer as of now, or its columns, and forget it; None as `take_input`."""
        sums = self._sums[index]
        found = sums.take_output(self._output_scale)
        if not sums.spoiled:
            return found
        self._warn_of_spoiled(
            index,
            "was taken from a forward whose backward was not the step's",
            "call plan_factors(early=False)",
        )
        return self._not_a_number(index, self._layers[index].shape.g_dim)

    def _output_scale(self, calls: int) -> float:
        if self._sharing == "kfac-pytorch":
            return 1 / calls
        m = max(1, self.micro_batches)
        return m if self._accumulated == "mean" else 1 / m

    def close(self) -> None:
        """Remove the hooks and forget what was captured; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False
        self.begin_step()

    # --- forward ---------------------------------------------------------------------------------------------

    def _on_root(self, module: nn.Module, args: object) -> None:
        if self._captures(module):
            self.begin_micro_batch()

    def _on_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not self._captures(module) or not output.requires_grad:
            return
        # The layers' only argument: torch's call it input, transformers' Conv1D x.
        sums, (input,) = self._sums[index], args or kwargs.values()
        in_forward = not _in_backward()
        if in_forward:
            sums.trials.clear()  # of passes that added to no gradient
        call = Call(next(self._numbers), step=self._step, micro_batch=self._micro_batch, make_a=None)
        count = input_count(module, input, output, self._sharing)
        if not in_forward:
            # Activation checkpointing calls a layer again, and with the kind that is not reentrant for nothing: then
            # the first output has the hook that will fire.
            call.make_a = partial(self._make_later, index, module, input, input._version, count)
        else:
            call.make_a = self._made(index, module, input, count)
        sums.open.add(call)
        _hook_output(output, partial(self._on_gradient, index, module, call))
        if in_forward and self.on_input is not None:
            self.on_input(index)

    def _captures(self, module: nn.Module) -> bool:
        return self.active and module.training and torch.is_grad_enabled()

    def _made(self, index: int, module: nn.Module, input: Tensor, count: int) -> Callable[[], BatchFactor]:
        """Return A of one call: now, or, of a layer that waits for many gradients at once, in the smallest form."""
        shape = self._layers[index].shape
        if self._rooms[index].a < count < shape.a_dim and self._sums[index].open:
            columns = input_columns(module, shape, input, self._sharing)
            # A copy: the input may be changed in place where activations are recomputed.
            columns = columns._replace(columns=columns.columns.clone())
            return partial(input_factor_of, columns, shape)
        made = self._part_of_input(index, module, input, count)
        return lambda: made

    def _make_later(
        self, index: int, module: nn.Module, input: Tensor, version: int, count: int
    ) -> BatchFactor:
        if input._version == version:
            return self._part_of_input(index, module, input, count)
        self._warn_of_spoiled(
            index,
            "was changed in place before activation checkpointing had computed it again",
            "do not change it in place, or name the layer in skip=",
        )
        return self._not_a_number(index, self._layers[index].shape.a_dim)

    def _part_of_input(self, index: int, module: nn.Module, input: Tensor, count: int) -> BatchFactor:
        shape = self._layers[index].shape
        if 0 < count <= self._rooms[index].a:
            return Gram(input_columns(module, shape, input, self._sharing).scaled())
        return input_factor(module, shape, input, self._sharing)

    # --- backward --------------------------------------------------------------------------------------------

    def _on_gradient(self, index: int, module: nn.Module, call: Call, gradient: Tensor) -> None:
        if not self._handles or call.step != self._step:
            return
        self._begin_pass()
        if self._scale is None:  # a GradScaler's makes the host wait for the device
            self._scale = self._loss_scale()
        trial, shape = self._sums[index].trial(_task()), self._layers[index].shape
        room = self._rooms[index].g
        trial.calls.append(call)
        if 0 < output_count(module, gradient, self._sharing) <= room:
            columns = output_columns(module, shape, gradient, self._sharing)
            trial.g.add(Gram(columns.scaled().div_(self._scale)), room)
        else:
            trial.g.add(output_factor(module, shape, gradient, self._sharing).div_(self._scale**2), room)

    def _on_accumulated(self, index: int, weight: Tensor) -> None:
        """The gradient of a layer's weight was added to: what its pass has brought is the step's."""
        if not self.active:
            return
        sums = self._sums.get(index)
        trial = None if sums is None else sums.trials.pop(_task(), None)
        if sums is not None:
            self._seen.add(trial is not None)
        if sums is not None and trial is None:
            return
        self._gradients_came = True
        made_in = {self._micro_batch} if trial is None else {call.micro_batch for call in trial.calls}
        self._marks[index].left(weight.grad, made_in)
        if sums is None or trial is None:
            return
        sums.commit(trial, self._rooms[index])

    def _begin_pass(self) -> None:
        """Once per backward pass, before it adds to any gradient: drop what was given up."""
        if _task() > self._newest_task:
            self._newest_task = _task()
            self._drop_given_up()

    def _drop_given_up(self) -> None:
        """Drop what belongs to gradients that were cleared since."""
        written: dict[int, Tensor] = {}
        for index, (mark, layer) in enumerate(zip(self._marks, self._layers, strict=True)):
            gradient = layer.weight.grad
            if not mark.micro_batches:
                continue
            if gradient is None:
                self._drop(index)
            elif not mark.is_as_left(gradient):
                written[index] = gradient  # cleared, or clipped, or scaled
        if written:
            left = torch.stack([gradient.detach().any() for gradient in written.values()]).tolist()
            for index, something in zip(written, left, strict=True):
                if not something:
                    self._drop(index)

    def _drop(self, index: int) -> None:
        self._marks[index].clear()
        if index in self._sums:
            self._sums[index].drop()

    def _not_a_number(self, index: int, dim: int) -> Tensor:
        weight, size = self._layers[index].weight, (self._layers[index].shape.groups, dim, dim)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.full(size, math.nan, dtype=dtype, device=weight.device)

    def _warn_of_spoiled(self, index: int, how: str, remedy: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "the input factor of layer %s %s; the factors of such layers are dropped in such steps. If this goes "
                "on, %s",
                self._layers[index].name,
                how,
                remedy,
            )


class _View(NamedTuple):
    """Where in the memory of its base a view lies."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base_stride: tuple[int, ...]

    @classmethod
    def of(cls, view: Tensor, base: Tensor) -> "_View":
        offset = int(view.storage_offset() - base.storage_offset())
        return cls(view.size(), view.stride(), offset, base.stride())

    def taken_of(self, gradient: Tensor) -> Tensor:
        """Return the part of the base's gradient that is the view's."""
        if gradient.stride() != self.base_stride:
            gradient = gradient.new_empty_strided(gradient.size(), self.base_stride).copy_(gradient)
        return gradient.as_strided(self.size, self.stride, gradient.storage_offset() + self.offset)


def _hook_output(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` called with the gradient of what ``output`` is now, see [Note: hooks on views]."""
    base = output._base if output._is_view() else None
    if base is None:
        output.register_hook(hook)
    else:
        base.register_hook(partial(_on_gradient_of_base, hook, _View.of(output, base)))


def _on_gradient_of_base(hook: Callable[[Tensor], None], view: _View, gradient: Tensor) -> None:
    hook(view.taken_of(gradient.detach()))


def _task() -> int:
    return torch._C._current_graph_task_id()


def _in_backward() -> bool:
    """Tell whether autograd is what runs this, on whichever thread."""
    return _task() != _NO_BACKWARD


class WeakHook:
    """A hook of a module or a parameter that knows its owner weakly, and whose copies know none."""

    def __init__(self, owner: object | None, method: str, *arguments: object) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method
        self._arguments = arguments
        # A compiler would trace what it sees of this moment, the sums and flags as constants.
        self._run = None if owner is None else torch.compiler.disable(self._run_eagerly)

    def __call__(self, *arguments: object) -> None:
        if self._run is not None:
            self._run(*arguments)

    def _run_eagerly(self, *arguments: object) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._method)(*self._arguments, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakHook, (None, self._method)
