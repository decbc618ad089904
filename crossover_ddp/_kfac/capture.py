"""Hooks that record the factors of this rank's mini-batch while a model trains.

[Note: one step of several calls] A layer may be called more than once in a step. It may be used
twice in one forward, or the gradient may be accumulated over m micro-batches of nᵢ samples, n in
total. Each call adds its factors to a sum. A is the mean over all calls, weighted by their numbers
of samples. The weight's gradient is a sum over the calls in one micro-batch, and so is the
micro-batch's Gᵢ, which takes a sample's own gradient to be nᵢ g. If the loss of each micro-batch is
its share of the step's loss ("mean"), a sample's own gradient is n g instead, so G is Σ n/nᵢ Gᵢ. If
the loss is a mean of its own ("sum"), G is the mean Σ nᵢ/n Gᵢ. "kfac-pytorch" takes plain means of
both factors over the calls, like that package: this is what one large batch would give there.
Gradients outside of the step do not count, see [Note: uncommitted sums].

[Note: unequal micro-batches] Weights are relative to the first size, nᵢ/n₁ or n₁/nᵢ, and the sum is
multiplied by n/n₁, or its inverse, when it is taken. So equal micro-batches weigh exactly 1. A
micro-batch of unknown size has the same weight as the first one of known size. A call without
samples is left out of A and does not count as a micro-batch. A rank whose whole step is empty has
no factors, and the mean over ranks leaves it out. If there are several forwards in one micro-batch
(two views), the largest decides its size. A forward whose graph is gone when backward begins is
ignored.

[Note: few columns] A factor is C Cᵀ, where C has one column per sample and position. If a
mini-batch has only a few columns, they are smaller than the factor. They are then kept and sent in
its place. The result is exactly the same with less traffic, and the layer's owner computes the
product. Each rank decides this for itself, see `placement.most_columns`.

[Note: uncommitted sums] Only gradients that `optimizer.step()` will see may form factors. A forward
may be followed by no backward at all (its loss was not finite), by ``torch.autograd.grad`` (for an
adversarial attack or a gradient penalty), which leaves ``p.grad`` alone, or by a backward whose
gradients ``zero_grad()`` throws away. So only the call's own node in autograd's graph references
the call's A, which is freed with the node. `PassSums` collects the factors of one backward pass.
They are committed to the step only when the same pass adds to the weight's ``.grad``. Committed
sums are dropped if that ``.grad`` has been cleared since.

[Note: hooks on views] A hook on a tensor belongs to the tensor's node in autograd's graph. A layer
may return a view: a Linear layer with three-dimensional inputs does so before torch 2.15, and a
convolution of a single picture always does. If the view is changed in place, for example by
``ReLU(inplace=True)``, that node is no longer part of the graph: autograd continues at the view's
base tensor. So the hook is put on the base.

[Note: directions that wait] After an exchange, the gradient of a layer's weight holds its
direction. If a backward pass added to it, in ``no_sync()`` or not, the owner would precondition the
sum, and thus the direction a second time. Therefore a hook inspects each gradient just before a
pass adds to it: by then the gradient must be None or zero. The gradient's version does not show
this: ``p.grad.data.zero_()`` does not change the version, but clipping does.
"""

import enum
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp.errors import UnsupportedConfigurationError

from .factors import BatchFactor, Columns, WeightSharing, input_columns, multiplied, output_columns
from .layers import Layer, unwrapped
from .placement import most_columns

logger = logging.getLogger(__name__)

_NO_BACKWARD: Final = -1  # torch's number for the backward pass when none is running
_NOTHING_SEEN: Final = (
    "K-FAC has seen no call of any layer whose gradient came, so gradients stay as they are: "
    "layers are seen in training mode, in calls after the KFACState was made. Call train() on the "
    "model, not eval() (a Dropout or BatchNorm in it may be in eval mode), and make the state "
    "before the model is compiled and called"
)
_UNSEEN: Final = (
    "K-FAC has seen no call of %s, whose gradients came and stay as they are: a part in eval "
    "mode, a sparse or nested input, or a weight that is used without a call of its module; call "
    "train() on it, or name it in KFACState's skip="
)
_CHANGED: Final = (
    "the input factor of layer %s was changed in place before activation checkpointing had "
    "computed it again; the factors of such layers are dropped in such steps. If this happens "
    "often, do not change the input in place, or name the layer in skip="
)
_REMEDY: Final = (
    "call optimizer.zero_grad() between two exchanges, and to accumulate gradients do all "
    "backward passes of a step but the last one in model.no_sync(), or add up their losses"
)
_USED_BESIDE: Final = (
    "%s: the model also uses the weight outside of its layer, so K-FAC sees only a part of its "
    "gradient; use it only by calling the layer, or name the layer in KFACState's skip="
)


class Phase(enum.Enum):
    """The phase of a `FactorCapture`'s current micro-batch, set by `FactorCapture._enter` alone."""

    # Entered by begin_step(). The first forward of the model begins micro-batch 1.
    IDLE = enum.auto()
    # Entered by the first forward in a micro-batch. Further forwards belong to the same
    # micro-batch.
    FORWARD = enum.auto()
    # Entered when a backward pass adds to the gradient of a layer's weight. The next forward
    # outside of backward begins another micro-batch. A forward inside of backward is recomputed
    # (activation checkpointing) and belongs to the current one.
    GRADIENTS = enum.auto()
    # Entered by close(). It is never left: the hooks are gone.
    CLOSED = enum.auto()


@dataclass(eq=False)
class Forward:
    """One forward of the model. Its calls reference it, and the capture references the latest."""

    micro_batch: int = 0
    # The number of samples that the model was called with. None if it is unknown.
    samples: int | None = None


@dataclass(eq=False)
class Call:
    """One call of a layer with gradients enabled. Only autograd's graph references it."""

    # Calls are ordered by it.
    number: int
    step: int
    forward: Forward
    # Returns A, or its columns. None if A has been counted already, or if the call is empty.
    make_a: Callable[[], BatchFactor] | None
    # Whether the call has no samples, or none for this layer.
    is_empty: bool


@dataclass
class Sum:
    """The sum of a layer's A or G over several calls, see [Note: unequal micro-batches]."""

    # The sum is kept as columns while it has at most this many.
    room: int
    # A part with n samples weighs n to this power: 1, -1, or 0 if all parts weigh the same.
    power: int
    value: BatchFactor | None = None
    # The number of samples that has weight 1. The first part of known size sets it.
    unit: int | None = None
    # The total weight of all parts.
    weight: float = 0.0

    def add(self, part: BatchFactor | None, samples: int | None, weight: float = 1.0) -> None:
        """Add a part to the sum.

        Args:
            part: the factor or its columns. It may be changed in place. None adds nothing.
            samples: the number of samples in the part. None if it is unknown.
            weight: the total weight of the part if it is itself a sum.
        """
        if part is None:
            return
        if self.unit is None:
            self.unit = samples
        factor = (samples / self.unit) ** self.power if samples and self.unit else 1.0
        if factor != 1.0:
            _multiply(part, factor)
        self.weight += factor * weight
        value = self.value
        if value is None:
            self.value = part
        elif (
            isinstance(value, Columns)
            and isinstance(part, Columns)
            and value.width + part.width <= self.room
        ):
            self.value = Columns(torch.cat([value.source, part.source], dim=2))
        else:
            self.value = multiplied(value).add_(multiplied(part))

    def take(self, scale: float) -> BatchFactor | None:
        """Return the sum times ``scale``, or its columns, and reset it.

        Return None if nothing was added.
        """
        value = self.value
        self.value = None
        self.unit = None
        self.weight = 0.0
        if isinstance(value, Columns):
            return Columns(value.source * math.sqrt(scale))
        return None if value is None else value.mul_(scale)


@dataclass
class PassSums:
    """A layer's sums in one backward pass: its G so far, and the calls that its A comes from."""

    g: Sum
    calls: list[Call] = field(default_factory=list)


class LayerSums:
    """The sums of both factors of a layer in one step, see [Note: uncommitted sums].

    Args:
        rooms: the maximum numbers of columns to keep for A and for G.
        powers: the powers of the number of samples by which parts of A and of G are weighted.
    """

    def __init__(self, rooms: tuple[int, int], powers: tuple[int, int]) -> None:
        self.a = Sum(rooms[0], powers[0])
        self.g = Sum(rooms[1], powers[1])
        # The sums of each backward pass, by the number of the pass.
        self.uncommitted: dict[int, PassSums] = {}
        # Calls whose A has not been counted yet.
        self.open: weakref.WeakSet[Call] = weakref.WeakSet()
        # The micro-batches that have added to the weight's `.grad`, without empty ones.
        self.micro_batches: set[int] = set()
        # The weight's `.grad` and its version after the last pass that added to it.
        self._left: tuple[weakref.ref[Tensor], int] | None = None

    def of_pass(self, number: int) -> PassSums:
        return self.uncommitted.setdefault(number, PassSums(Sum(self.g.room, self.g.power)))

    def commit(self, of_pass: PassSums) -> None:
        """Add the sums of a backward pass to the step.

        The pass has added to the weight's ``.grad``.
        """
        for call in sorted(of_pass.calls, key=lambda call: call.number):
            make_a = call.make_a
            call.make_a = None
            self.open.discard(call)
            if make_a is not None:
                self.a.add(make_a(), call.forward.samples)
        self.g.add(of_pass.g.value, of_pass.g.unit, of_pass.g.weight)

    def note_gradient(self, gradient: Tensor | None, micro_batches: Iterable[int]) -> None:
        """Remember the weight's ``.grad`` after a pass has added these micro-batches to it."""
        self.micro_batches.update(micro_batches)
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def is_unchanged(self, gradient: Tensor) -> bool:
        """Return whether ``gradient`` is the noted ``.grad``, and its version has not changed."""
        if self._left is None:
            return False
        noted, version = self._left
        return noted() is gradient and version == gradient._version

    def drop(self) -> None:
        """Forget the committed sums because the gradient was cleared."""
        self.a = Sum(self.a.room, self.a.power)
        self.g = Sum(self.g.room, self.g.power)
        self.micro_batches.clear()


class FactorCapture:
    """Records the factors of a model's layers while it trains.

    See [Note: one step of several calls].

    The hooks act only while `active` is set, in training mode and with gradients enabled. On a copy
    of the model (an average of its weights) they do nothing. The capture is not collective: ranks
    may capture different layers.

    Under ``torch.compile`` a hook runs outside of the graph, which is cut around each captured
    layer. Create the capture before the model's first call: compiled code does not see hooks that
    are added later.

    Args:
        layers: the layers that `find_layers` returned. All layer indices refer to this list.
        sharing: how the factors sum over the positions in a sample, see `WeightSharing`.
        model: the model whose forwards are counted. Each forward belongs to a micro-batch.
        loss_scale: returns the number that the loss was multiplied by. It is called once per
            micro-batch.
        accumulated: whether the loss of each micro-batch is its share of the step's loss ("mean"),
            or a mean of its own ("sum").
        only: the indices of the layers to capture. Other layers cost nothing. Default: all layers.
        ranks: the number of ranks that send columns of the same factor, see [Note: few columns].
            With 1, no columns are kept.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        sharing: WeightSharing,
        model: nn.Module,
        loss_scale: Callable[[], float] = lambda: 1.0,
        accumulated: Literal["mean", "sum"] = "mean",
        only: Collection[int] | None = None,
        ranks: int = 1,
    ) -> None:
        # Whether this step's factors are captured. The object that holds the capture sets it before
        # each step.
        self.active = True
        self._layers = list(layers)
        # For each layer, the maximum numbers of columns to keep for A and for G.
        self._rooms: list[tuple[int, int]] = []
        for layer in layers:
            shape = layer.shape
            room = (most_columns(shape.a_dim, ranks), most_columns(shape.g_dim, ranks))
            self._rooms.append(room)
        self._sharing = sharing
        self._loss_scale = loss_scale
        self._accumulated = accumulated
        self._powers = (1, -1 if accumulated == "mean" else 1)
        if sharing == "kfac-pytorch":
            self._powers = (0, 0)
        self._captured = frozenset(range(len(self._layers)) if only is None else only)
        self._phase = Phase.IDLE
        # Counts steps, so that gradients of calls in an earlier step are recognized.
        self._step = 0
        # The sums of all layers: even layers that are not captured show which micro-batches count.
        self._sums = self._new_sums()
        self._numbers = itertools.count()
        # The last backward pass for which `_begin_pass` ran.
        self._newest_pass = _NO_BACKWARD
        # For each layer whose gradient came in this step, by index: whether a call of it was
        # captured.
        self._seen: dict[int, bool] = {}
        # The warnings that have been given.
        self._warned: set[str] = set()
        self._has_compared_uses = False

        # --- the current micro-batch ---
        self._forward = Forward()
        self._began_in_backward = False
        # The number of calls of each layer outside of backward.
        self._calls: Counter[int] = Counter()
        # The loss scale. None if it has not been read yet.
        self._scale: float | None = None

        # The forwards in this step whose graphs are alive, and the size of each micro-batch.
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._samples: dict[int, int | None] = {}
        self._handles = list(self._hooked(unwrapped(model)))

    def _hooked(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for index, layer in enumerate(self._layers):
            for module in layer.modules if index in self._captured else ():
                hook = weak_hook(self, "_on_forward", index)
                # Before all other hooks, which may replace the output.
                yield module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            yield layer.weight.register_post_accumulate_grad_hook(
                weak_hook(self, "_on_accumulated", index)
            )
        yield model.register_forward_pre_hook(weak_hook(self, "_on_root"), with_kwargs=True)
        yield model.register_forward_hook(weak_hook(self, "_on_output"))

    def _enter(self, phase: Phase) -> None:
        if self._phase is not Phase.CLOSED:
            self._phase = phase

    def _new_sums(self) -> list[LayerSums]:
        return [LayerSums(rooms, self._powers) for rooms in self._rooms]

    @property
    def micro_batches(self) -> int:
        """The number of non-empty micro-batches that have added to the step's gradients so far."""
        return len(self._counted())

    def _counted(self) -> set[int]:
        return set().union(*(sums.micro_batches for sums in self._sums))

    def begin_step(self) -> None:
        """Forget all sums that were not taken, and start counting micro-batches from 1 again."""
        self._warn_of_unseen()
        self._seen.clear()
        for sums in self._sums:
            for call in sums.open:
                call.make_a = None
        self._sums = self._new_sums()
        self._step += 1
        self._enter(Phase.IDLE)
        self._forward = Forward(0, self._forward.samples)
        self._forwards.clear()
        self._samples.clear()
        self._calls.clear()
        self._scale = None

    def _warn_of_unseen(self) -> None:
        """Warn of layers whose gradients came in this step although no call was captured."""
        unseen = [self._layers[index].name for index, is_seen in self._seen.items() if not is_seen]
        if not unseen:
            return
        if len(unseen) == len(self._seen):
            self._warn_once(_NOTHING_SEEN)
        else:
            self._warn_once(_UNSEEN, ", ".join(sorted(unseen)))

    def begin_exchange(self) -> None:
        """Drop sums whose gradients were cleared, before the step's gradients are exchanged.

        This does nothing if it has already happened when a layer's gradient came in the same
        backward pass.
        """
        if self.active:
            self._begin_pass()

    def take(self, index: int) -> tuple[BatchFactor | None, BatchFactor | None]:
        """Return a layer's A and G so far, or their columns, and reset them.

        A factor is None if no call in this step has contributed to it.
        """
        sums = self._sums[index]
        a = sums.a.take(1 / (sums.a.weight or 1))
        g = sums.g.take(self._output_scale(sums.g))
        return a, g

    def _output_scale(self, g: Sum) -> float:
        if self._sharing == "kfac-pytorch":
            return 1 / (g.weight or 1)
        sizes = [self._samples.get(each) for each in sorted(self._counted())]
        unit = g.unit or next(filter(None, sizes), 1)
        total = sum(unit if size is None else size for size in sizes) or unit
        return total / unit if self._accumulated == "mean" else unit / total

    def close(self) -> None:
        """Remove the hooks and forget all sums."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False
        self._enter(Phase.CLOSED)
        self.begin_step()

    # --- forward ----------------------------------------------------------------------------------

    def _on_root(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Assign a forward of the model that begins now to the current micro-batch or to a new one.

        All forwards before the first gradient (two views of a picture, a recomputed forward) belong
        to one micro-batch.
        """
        # The model's own mode does not matter: parts of a model in eval mode may train.
        if not (self.active and torch.is_grad_enabled()):
            return
        joins = self._joins_micro_batch()
        number = self._forward.micro_batch if joins else self._forward.micro_batch + 1
        self._forward = Forward(number, _samples_of((*args, *kwargs.values())))
        self._forwards.add(self._forward)
        self._size_micro_batches()
        if joins:
            return
        self._enter(Phase.FORWARD)
        self._began_in_backward = _in_backward()
        self._scale = None
        self._calls.clear()

    def _joins_micro_batch(self) -> bool:
        """Return whether a forward that begins now belongs to the current micro-batch."""
        if self._phase is Phase.FORWARD:
            return True
        if self._phase is Phase.GRADIENTS:
            return _in_backward() and not self._began_in_backward
        return False

    def _on_forward(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        if not self._captures(module) or not output.requires_grad:
            return
        sums = self._sums[index]
        # The layer's only argument. It is called input in torch's layers and x in transformers'
        # Conv1D.
        (input,) = args or kwargs.values()
        if input.layout is not torch.strided or input.is_nested:
            return
        in_forward = not _in_backward()
        if in_forward:
            # The rest belongs to backward passes that have added to no gradient.
            sums.uncommitted.clear()
        # Activation checkpointing calls a layer again. With non-reentrant checkpointing the second
        # output has no gradient: the first output's hook fires. So A is computed only when it is
        # needed.
        make = self._made if in_forward else self._made_later
        is_empty = self._forward.samples == 0 or input.numel() == 0
        made = None if is_empty else make(index, module, input)
        call = Call(next(self._numbers), self._step, self._forward, made, is_empty)
        sums.open.add(call)
        _hook_output(output, lambda gradient: self._on_gradient(index, module, call, gradient))
        if in_forward:
            self._calls[index] += 1

    def _on_output(self, module: nn.Module, args: object, output: object) -> None:
        """Warn, once, of weights that the model also uses outside of their layers."""
        if self._has_compared_uses or not self._calls or not self._captures(module):
            return
        self._has_compared_uses = True
        uses = _uses(tensors_in(output))
        layers = self._layers
        found = [
            layers[index].name for index, n in self._calls.items() if uses[layers[index].weight] > n
        ]
        if found:
            logger.warning(_USED_BESIDE, ", ".join(found))

    def _captures(self, module: nn.Module) -> bool:
        return self.active and module.training and torch.is_grad_enabled()

    def _made(self, index: int, module: nn.Module, input: Tensor) -> Callable[[], BatchFactor]:
        """Return a function that returns the A of one call. A is usually computed now.

        If other calls of the layer still wait for their gradients and the input is smaller than A,
        A is computed later from a copy of the input. It takes a copy because the input may be
        changed in place if activations are recomputed.
        """
        shape = self._layers[index].shape
        room = self._rooms[index][0]
        columns = input_columns(module, shape, input, self._sharing)
        if room < columns.width < shape.a_dim and self._sums[index].open:
            return columns.kept().factor
        made = _in_small(columns, room)
        return lambda: made

    def _made_later(
        self, index: int, module: nn.Module, input: Tensor
    ) -> Callable[[], BatchFactor]:
        """Return a function that computes the A of one call from its input when it is called."""
        version = input._version
        shape = self._layers[index].shape

        def make() -> BatchFactor:
            columns = input_columns(module, shape, input, self._sharing)
            if input._version == version:
                return _in_small(columns, self._rooms[index][0])
            self._warn_once(_CHANGED, self._layers[index].name)
            return columns.factor().fill_(math.nan)

        return make

    # --- backward ---------------------------------------------------------------------------------

    def _on_gradient(self, index: int, module: nn.Module, call: Call, gradient: Tensor) -> None:
        if self._phase is Phase.CLOSED or call.step != self._step:
            return
        self._begin_pass()
        of_pass = self._sums[index].of_pass(_backward_pass())
        shape = self._layers[index].shape
        of_pass.calls.append(call)
        if call.is_empty:
            return
        if self._scale is None:
            # Once per micro-batch: a GradScaler's scale makes the host wait for the device.
            self._scale = self._loss_scale()
        columns = output_columns(module, shape, gradient, self._sharing, call.forward.samples)
        part = _in_small(columns, of_pass.g.room)
        if isinstance(part, Columns):
            part.source.div_(self._scale)
        else:
            part.div_(self._scale**2)
        of_pass.g.add(part, self._samples.get(call.forward.micro_batch))

    def _on_accumulated(self, index: int, weight: Tensor) -> None:
        """Commit the sums of a backward pass that has added to the weight's ``.grad``."""
        if not self.active:
            return
        sums = self._sums[index]
        forward = self._forward
        made_in = set() if forward.samples == 0 else {forward.micro_batch}
        if index in self._captured:
            of_pass = sums.uncommitted.pop(_backward_pass(), None)
            self._seen[index] = of_pass is not None or self._seen.get(index, False)
            if of_pass is None:
                return
            made_in = {call.forward.micro_batch for call in of_pass.calls if not call.is_empty}
            sums.commit(of_pass)
        if self._phase is Phase.FORWARD:
            self._enter(Phase.GRADIENTS)
        sums.note_gradient(weight.grad, made_in)

    def _begin_pass(self) -> None:
        """Drop sums whose gradients were cleared.

        This happens once per backward pass, before the pass adds to any gradient.
        """
        if _backward_pass() <= self._newest_pass:
            return
        self._newest_pass = _backward_pass()
        self._size_micro_batches()
        # Gradients that have been written since: cleared in place, clipped, or scaled.
        written: list[tuple[LayerSums, Tensor]] = []
        for sums, layer in zip(self._sums, self._layers, strict=True):
            gradient = layer.weight.grad
            if not sums.micro_batches:
                continue
            if gradient is None:
                sums.drop()
            elif not sums.is_unchanged(gradient):
                written.append((sums, gradient.detach().any()))
        if written:
            # The host waits for the device once, for all of them.
            are_nonzero = torch.stack([is_nonzero for _, is_nonzero in written]).tolist()
            for (sums, _), is_nonzero in zip(written, are_nonzero, strict=True):
                if not is_nonzero:
                    sums.drop()

    def _size_micro_batches(self) -> None:
        """Note the size of each micro-batch whose gradients have not come yet.

        A micro-batch is as large as its largest forward whose graph is alive.
        """
        counted = self._counted()
        sizes = Counter[int]()
        for forward in self._forwards:
            if forward.micro_batch not in counted:
                sizes[forward.micro_batch] = max(sizes[forward.micro_batch], forward.samples or 0)
        self._samples.update({number: size or None for number, size in sizes.items()})

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)


def _in_small(columns: Columns, room: int) -> BatchFactor:
    return columns.scaled() if 0 < columns.width <= room else columns.factor()


def _multiply(part: BatchFactor, factor: float) -> None:
    """Multiply a factor, or the factor that the columns stand for, by ``factor`` in place."""
    if isinstance(part, Columns):
        part.source.mul_(math.sqrt(factor))
    else:
        part.mul_(factor)


def _samples_of(inputs: Sequence[object]) -> int | None:
    """Return the number of samples in a model's inputs.

    This is the size of the first dimension of the first non-empty tensor that has at least two
    dimensions. Tensors in lists and tuples are not considered, since such a list may hold samples
    or parts of samples. If there is no such tensor, the result is 0 if all tensors in the inputs
    are empty, and None (unknown) otherwise.
    """
    found = next(_first_dimensions(inputs), None)
    if found is not None:
        return found
    tensors = list(tensors_in(inputs))
    if tensors and not any(each.numel() for each in tensors):
        return 0
    return None


def _first_dimensions(inputs: Iterable[object]) -> Iterator[int]:
    for each in inputs:
        if isinstance(each, Mapping):
            yield from _first_dimensions(each.values())
        elif isinstance(each, Tensor) and each.dim() > 1 and each.shape[0]:
            yield each.shape[0]


def _uses(outputs: Iterable[Tensor]) -> Counter[Tensor]:
    """Return how often each leaf was used to compute ``outputs``."""
    seen = {each.grad_fn for each in outputs if each.grad_fn is not None}
    to_visit = list(seen)
    # The number of edges into each node, and pairs of a leaf and a node that reads it.
    users = Counter[object]()
    leaves: list[tuple[Tensor, Any]] = []
    while to_visit:
        node = to_visit.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            users[child] += 1
            if hasattr(child, "variable"):
                leaves.append((child.variable, node))
            elif child not in seen:
                seen.add(child)
                to_visit.append(child)
    uses = Counter[Tensor]()
    for leaf, node in leaves:
        # autocast casts a weight only once for all its uses.
        uses[leaf] += users[node] if node.name() == "ToCopyBackward0" else 1
    return uses


class WaitingDirections:
    """Tracks the weights whose gradients hold directions, see [Note: directions that wait].

    Args:
        layers: the layers that K-FAC treats. All layer indices refer to this list.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # For each layer whose gradient held a direction after the last exchange: None until a
        # backward pass adds to it, then whether any of the direction was left at that time. The
        # values are tensors so that the host need not wait for the device.
        self._added_to: dict[int, Tensor | None] = {}
        # The same for a pass that may be about to add. It may also add nothing, like
        # `torch.autograd.grad`.
        self._about_to_add: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            layer.weight.register_hook(weak_hook(self, "_before_adding", index))
            layer.weight.register_post_accumulate_grad_hook(weak_hook(self, "_added", index))

    def wait(self, layers: Iterable[int]) -> None:
        """Note that the gradients of these layers hold directions from now on."""
        self._added_to.update((index, None) for index in layers)

    def check(self, layers: Iterable[int]) -> None:
        """Refuse a bucket if a backward pass has added to the direction of any of these layers."""
        for index in layers:
            added = self._added_to.get(index)
            if added is not None and bool(added):
                weight = next(iter(self._layers[index].parameters))
                raise UnsupportedConfigurationError(
                    "expected gradients that were cleared since the last exchange, got a second "
                    f"backward() added to the K-FAC direction of {weight}, which would be "
                    f"preconditioned twice; {_REMEDY}"
                )

    def _before_adding(self, index: int, _: Tensor) -> None:
        if index not in self._added_to:
            return
        gradient = self._layers[index].weight.grad
        if gradient is None:
            del self._added_to[index]
            return
        before = self._added_to[index]
        left = gradient.detach().any()
        # A gradient that was cleared once no longer holds a direction, only the sum of later
        # passes.
        self._about_to_add[index] = left if before is None else before & left

    def _added(self, index: int, _: Tensor) -> None:
        if index in self._added_to:
            self._added_to[index] = self._about_to_add.pop(index)


def _hook_output(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` with the gradient of the value that ``output`` has now.

    A later in-place change of ``output`` does not matter, see [Note: hooks on views].
    """
    base = output._base if output._is_view() else None
    if base is None:
        output.register_hook(hook)
        return
    size = output.size()
    stride = output.stride()
    base_stride = base.stride()
    offset = int(output.storage_offset() - base.storage_offset())

    def on_gradient_of_base(gradient: Tensor) -> None:
        gradient = gradient.detach()
        if gradient.stride() != base_stride:
            gradient = gradient.new_empty_strided(gradient.size(), base_stride).copy_(gradient)
        hook(gradient.as_strided(size, stride, gradient.storage_offset() + offset))

    base.register_hook(on_gradient_of_base)


def _backward_pass() -> int:
    """Return autograd's number for the backward pass that runs on this thread, or -1 if none."""
    return torch._C._current_graph_task_id()


def _in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    return _backward_pass() != _NO_BACKWARD


def weak_hook(owner: object, method: str, *arguments: object) -> OwnHook:
    """Return a hook that calls a method and holds its owner weakly. Copies of it do nothing."""
    known = weakref.ref(owner)

    def run(*given: object) -> None:
        if (found := known()) is not None:
            getattr(found, method)(*arguments, *given)

    # A compiler would bake the current sums and flags into its graph as constants.
    return OwnHook(uncompiled(run))
