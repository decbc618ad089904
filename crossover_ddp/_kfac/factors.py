"""This rank's factors: hooks record them while the model trains, and journeys bring them to owners.

`FactorCapture` records, `FactorTraffic` decides when a step's factors leave, and `FactorMessages`
packs those of one journey.

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

[Note: late factors] Factors always travel in journeys of their own. In steps that compute solvers,
the factors of a bucket's layers leave just before the bucket's gradients. Most steps compute none,
and the running factors do not matter there. In such steps the factors wait until the step's
gradients are gathered. Then they leave in groups, one group behind the gradients of each following
step, while the ranks compute. All groups have left before the next step that takes factors or
computes solvers begins its exchange, so the running means are the same as if all factors had
travelled at once. kfac-pytorch also lets factors trail, and the groups are our own design.

[Note: forms of a factor] A rank sends either the triangle of a factor or the columns that it is
computed from, whichever is shorter, or nothing if the rank has no such factor. So the ranks first
send the owners the form of each factor. They do so when the journey begins, even for late factors:
the order is the same on all ranks, see [Note: who waits where] in `_engine.links`. Where
collectives are issued in the program's order, the host would have to wait for the forms, so all
ranks send triangles. Each triangle is followed by one more number, which is 1 if the rank has the
factor. If no other rank contributes to a factor, the owner uses its own factor unchanged.

All ranks send the same groups in the same order. The owners add them to the running means in that
order.
"""

import enum
import functools
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate, Journey
from crossover_ddp._engine.links import Link, parts
from crossover_ddp._engine.observe import Meter
from crossover_ddp._owners.owned_state import tensors_in

from .curvature import (
    BatchFactor,
    Columns,
    OwnedLayer,
    WeightSharing,
    input_columns,
    multiplied,
    output_columns,
    pack_triangle,
    triangle_numel,
    unpack_triangle,
)
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
_USED_BESIDE: Final = (
    "%s: the model also uses the weight outside of its layer, so K-FAC sees only a part of its "
    "gradient; use it only by calling the layer, or name the layer in KFACState's skip="
)
# The maximum number of groups in which a step's late factors leave. Each group costs messages.
_MAX_LATE_GROUPS: Final = 16
# The form of a factor is one of these values, or the number of its columns.
_NONE: Final = 0
_TRIANGLE: Final = -1


# --- recorded in the model ------------------------------------------------------------------------


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


# --- on the way to the owners ---------------------------------------------------------------------


class Contribution(NamedTuple):
    """One rank's factor in the form in which it travels, see [Note: forms of a factor]."""

    form: int
    flat: Tensor


class Factor(NamedTuple):
    """The A or G that this rank has captured for one layer in one step."""

    of: OwnedLayer
    dim: int
    # [groups, dim, dim], or its columns. None if this rank has no such factor.
    value: BatchFactor | None = None

    @property
    def groups(self) -> int:
        return self.of.layer.shape.groups

    @property
    def triangle_numel(self) -> int:
        """The number of elements in the triangle, including the number behind it."""
        return triangle_numel(self.groups, self.dim) + 1

    @property
    def nbytes(self) -> int:
        value = self.value.source if isinstance(self.value, Columns) else self.value
        return 0 if value is None else value.nbytes

    def form(self) -> int:
        if self.value is None:
            return _NONE
        return self.value.width if isinstance(self.value, Columns) else _TRIANGLE

    def numel(self, form: int) -> int:
        """Return the number of elements that this factor has in a form, perhaps another rank's."""
        return self.triangle_numel if form == _TRIANGLE else self.groups * self.dim * form

    def pack(self, form: int, out: Tensor) -> None:
        if self.value is None:
            out.zero_()
        elif form == _TRIANGLE:
            _pack_triangle(multiplied(self.value), out)
        elif isinstance(self.value, Columns):
            out.view(self.value.source.shape).copy_(self.value.source)

    def mean(self, contributions: Sequence[Contribution], like: Tensor) -> BatchFactor:
        """Return the mean of the ranks' contributions, or NaNs if there are none."""
        if not contributions:
            return like.new_full((self.groups, self.dim, self.dim), math.nan)
        columns = [
            each.flat.view(self.groups, self.dim, each.form)
            for each in contributions
            if each.form != _TRIANGLE
        ]
        if len(columns) == len(contributions):
            return Columns(torch.cat(columns, dim=2) * math.sqrt(1 / len(contributions)))
        total = like.new_zeros(self.triangle_numel)
        triangle = like.new_empty(self.triangle_numel)
        for form, flat in contributions:
            if form == _TRIANGLE:
                total += flat
            else:
                source = flat.view(self.groups, self.dim, form)
                _pack_triangle(multiplied(Columns(source)), triangle)
                total += triangle
        # The sum of the numbers behind the triangles counts the ranks that have the factor.
        return unpack_triangle(total[:-1], self.groups, self.dim).div_(total[-1])

    def alone(self, like: Tensor) -> BatchFactor:
        """Return this rank's own factor as the mean, or NaNs if it has none."""
        if self.value is None:
            return self.mean((), like)
        value = multiplied(self.value)
        if value.is_cuda:
            # The host drops it before the device has read it, as in `FactorMessages.travel`.
            value.record_stream(torch.cuda.current_stream(value.device))
        return value.to(like.dtype)


def _pack_triangle(value: Tensor, out: Tensor) -> None:
    pack_triangle(value.to(out.dtype), out[:-1])
    out[-1] = 1.0


class FactorMessages:
    """The factors of some layers, packed for the journey to their owners.

    Args:
        factors: the factors to send. All ranks must pass the same factors in the same order.
        rank: this rank.
        size: the number of ranks.
        like: a tensor on the factors' device, with the dtype in which they travel.
        sends_forms: whether ranks first send the owners the forms, see [Note: forms of a factor].
    """

    def __init__(
        self, factors: Sequence[Factor], rank: int, size: int, like: Tensor, *, sends_forms: bool
    ) -> None:
        self._rank = rank
        self._size = size
        self._sends_forms = sends_forms
        # For each rank: the factors that it owns, and the forms in which this rank sends them.
        self._by_owner: list[list[Factor]] = [[] for _ in range(size)]
        for factor in factors:
            self._by_owner[factor.of.owner].append(factor)
        self._forms = [
            [factor.form() if sends_forms else _TRIANGLE for factor in of_owner]
            for of_owner in self._by_owner
        ]
        by_owner = list(zip(self._by_owner, self._forms, strict=True))
        # For each rank: the number of elements that this rank sends to it.
        self._layout = [sum(_numels(of_owner, forms)) for of_owner, forms in by_owner]
        self._flat = like.new_empty(sum(self._layout))
        for (of_owner, forms), part in zip(by_owner, parts(self._flat, self._layout), strict=True):
            outs = part.split(_numels(of_owner, forms))
            for factor, form, out in zip(of_owner, forms, outs, strict=True):
                factor.pack(form, out)

    async def travel(self, link: Link, after: Gate | None) -> Iterator[tuple[Factor, BatchFactor]]:
        """Send all factors to their owners.

        The factors leave when ``after`` is open, unless collectives are issued in the program's
        order.

        Returns:
            Each factor that this rank owns, with its mean.
        """
        if self._flat.is_cuda:
            # The host drops the tensor before the device has read it.
            self._flat.record_stream(torch.cuda.current_stream(self._flat.device))
        own = self._by_owner[self._rank]
        forms = [self._forms[self._rank]] * self._size
        if self._sends_forms:
            # The forms travel first, so that each owner knows how much it will receive.
            forms = await self._exchange_forms(link)
            # Late factors wait here for the gradients in front of them.
            if after is not None:
                await after
        numels = [_numels(own, of_rank) for of_rank in forms]
        layout = [sum(of_rank) for of_rank in numels]
        incoming = self._flat.new_empty(sum(layout))
        # Each rank sends every owner its factors. If a peer is lost, this raises, and so does the
        # next backward().
        await link.all_to_all(self._flat, self._layout, incoming, layout)
        arrived = parts(incoming, layout)
        # The link leaves this rank's own part to the caller.
        arrived[self._rank] = parts(self._flat, self._layout)[self._rank]
        flats = [part.split(of_rank) for part, of_rank in zip(arrived, numels, strict=True)]
        return self._means(forms, flats)

    def _means(
        self, forms: Sequence[Sequence[int]], flats: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Factor, BatchFactor]]:
        """Yield each factor that this rank owns, with its mean.

        The means are computed one at a time to save memory.

        ``forms`` and ``flats`` are indexed by rank and then by factor.
        """
        for index, factor in enumerate(self._by_owner[self._rank]):
            contributions = [
                Contribution(of_rank[index], flat[index])
                for of_rank, flat in zip(forms, flats, strict=True)
                if of_rank[index] != _NONE
            ]
            yield factor, factor.mean(contributions, self._flat)

    async def _exchange_forms(self, link: Link) -> list[list[int]]:
        """Return, for each rank, the forms in which it sends the factors that this rank owns."""
        device = self._flat.device
        count = len(self._forms[self._rank])
        outgoing = torch.tensor(
            [form for of_owner in self._forms for form in of_owner], dtype=torch.int32
        )
        incoming = torch.empty(self._size * count, dtype=torch.int32, device=device)
        layout = [len(of_owner) for of_owner in self._forms]
        await link.all_to_all(outgoing.to(device), layout, incoming, [count] * self._size)
        forms: list[list[int]] = [[] for _ in range(self._size)]
        if count:
            forms = incoming.view(self._size, count).tolist()
        forms[self._rank] = self._forms[self._rank]
        return forms


def _numels(factors: Sequence[Factor], forms: Sequence[int]) -> list[int]:
    return [factor.numel(form) for factor, form in zip(factors, forms, strict=True)]


@dataclass(eq=False)
class FactorTraffic:
    """Decides when each step's factors travel. All ranks make the same decisions."""

    # The layers, in the same order as in the capture. Their curvatures receive the factors.
    layers: Sequence[OwnedLayer]
    capture: FactorCapture
    group: dist.ProcessGroup
    # Whether owners use only their own factors, so that no factors travel.
    local: bool

    def __post_init__(self) -> None:
        # Counts the traffic. Each backward pass sets it.
        self._meter: Meter | None = None
        # For each layer: its factors of this backward pass, if they are late.
        self._trailing: list[list[Factor]] = []
        # Groups of factors that will leave behind the gradients of later steps.
        self.late: list[list[Factor]] = []
        self._late_decay = 0.0
        # Opened when all factors sent so far have been added to the running means.
        self.arrived = Gate()
        self.arrived.open()
        self._newest: Journey | None = None

    @functools.cached_property
    def can_trail(self) -> bool:
        """Whether factors that are not needed yet may travel behind the gradients."""
        on_host = all(each.layer.weight.device.type == "cpu" for each in self.layers)
        return self.group.size() > 1 and not self.local and on_host

    def begin_pass(self, meter: Meter) -> None:
        """Forget the late factors of a backward pass that ended before its last bucket."""
        self._meter = meter
        self._trailing = []

    def take(self, layers: Sequence[OwnedLayer], decay: float, *, inverts: bool) -> None:
        """Take the factors of the layers in a bucket. Send them now, or keep them if they are late.

        ``inverts`` is whether solvers are computed in this step. ``decay`` is the weight of the old
        mean. See [Note: late factors].
        """
        taken = [self._taken(layer) for layer in layers]
        if self.can_trail and not inverts:
            self._trailing += taken
        else:
            self.send([factor for of_layer in taken for factor in of_layer], decay)

    def _taken(self, layer: OwnedLayer) -> list[Factor]:
        """Take a layer's A and G for this step, or return no factors if this rank needs none."""
        if self.local and layer.curvature is None:
            return []
        shape = layer.layer.shape
        a, g = self.capture.take(layer.index)
        return [Factor(layer, shape.a_dim, a), Factor(layer, shape.g_dim, g)]

    def end_pass(self, decay: float, steps: int) -> None:
        """Divide the late factors into groups, one for each of ``steps`` steps."""
        taken = self._trailing
        if not taken:
            return
        sizes = [sum(factor.triangle_numel for factor in of_layer) for of_layer in taken]
        self.late = []
        for layers in in_equal_groups(sizes, min(steps, _MAX_LATE_GROUPS)):
            self.late.append([factor for layer in layers for factor in taken[layer]])
        self._late_decay = decay
        self._trailing = []

    def leave(self, after: Gate | None = None, *, all_groups: bool = False) -> None:
        """Send the next group of late factors, or all remaining groups, when ``after`` is open."""
        while self.late:
            self.send(self.late.pop(0), self._late_decay, after)
            if not all_groups:
                return

    def settle(self) -> None:
        """Send all late factors, and wait until all factors have arrived. **Collective**.

        If an error has ended the journeys in this group, that error is raised.
        """
        self.leave(all_groups=True)
        newest = self._newest
        self._newest = None
        if newest is not None:
            newest.wait()

    @property
    def nbytes(self) -> int:
        return sum(factor.nbytes for group in self.late for factor in group)

    @torch.no_grad()
    def send(self, factors: Sequence[Factor], decay: float, after: Gate | None = None) -> None:
        """Begin the journey that adds factors to their owners' running means.

        The factors leave when ``after`` is open. They are added after all factors that were sent
        earlier. ``decay`` is the weight of the old mean.
        """
        exchange = Exchange.of(self.group)
        weight = self.layers[0].layer.weight
        like = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        # None if no other rank contributes to these factors.
        messages = None
        if exchange.size > 1 and not self.local:
            sends_forms = not exchange.networks[like.device].in_program_order
            messages = FactorMessages(
                factors, exchange.rank, exchange.size, like, sends_forms=sends_forms
            )
        former = self.arrived
        arrived = Gate()
        self.arrived = arrived

        async def bring(link: Link) -> None:
            # The factors go to their owners. Each rank receives the other ranks' factors for the
            # layers that it owns.
            means: Iterator[tuple[Factor, BatchFactor]]
            if messages is None:
                means = ((factor, factor.alone(like)) for factor in factors)
            else:
                means = await messages.travel(link, after)

            # Multiplying columns takes a long time, so it runs where it does not delay the
            # reduction of another journey.
            await link.compute()
            # A running mean depends on the order, so wait for the factors that were sent earlier.
            await former
            with torch.autocast(like.device.type, enabled=False):
                for factor, a in means:
                    # A layer's G follows its A.
                    _, g = next(means)
                    if factor.of.curvature is not None:
                        factor.of.curvature.add(a, g, decay)
            # Solvers may be computed from these factors now.
            arrived.open()

        self._newest = exchange.begin(bring, like, "factors of K-FAC", meter=self._meter)


def in_equal_groups(sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Divide the sizes into at most ``count`` consecutive groups with about equal sums.

    Yield the indices in each group. No group is empty.
    """
    total = max(1, sum(sizes))
    ends = list(itertools.accumulate(sizes))

    def group(index: int) -> int:
        """Return which of ``count`` equal parts of the total contains the middle of this size."""
        return min(count - 1, int((ends[index] - sizes[index] / 2) * count / total))

    for _, indices in itertools.groupby(range(len(sizes)), key=group):
        yield list(indices)
