"""The hooks that record the factors of this rank's mini-batch, while a model trains.

[Note: one step of several calls] A layer may be called more than once: it is used twice in one forward, or the
gradient of a step is accumulated over m micro-batches of nᵢ samples, n in all. Each call adds its factors to a sum.
A is the mean over all calls, weighted by the samples of each. The gradient of the weight is a sum over the calls of
one micro-batch, hence so is its Gᵢ, which takes a sample's own gradient to be nᵢ g. Where the loss of each micro-batch
is its share of the step's loss, a sample's own gradient is n g instead, so G is Σ n/nᵢ Gᵢ. Where it is a mean of its
own ("sum"), G is the mean Σ nᵢ/n Gᵢ. "kfac-pytorch" takes plain means over calls of both, as that package does; the
result is what one large batch would have given there. Gradients outside of the step form no part of it: see
[Note: on trial].

[Note: unequal micro-batches] Weights are relative to the first size, nᵢ/n₁ or n₁/nᵢ, and the sum is multiplied by
n/n₁, or its inverse, when it is taken: equal micro-batches weigh exactly 1. One whose size is not known weighs as the
first known size. A call without samples does not count, neither in A nor as a micro-batch. A rank whose whole step is
empty has no factors, and the mean over ranks leaves it out. Several forwards in one micro-batch (two views) give it
the size of the largest. A forward whose graph is gone when backward begins gives none.

[Note: few columns] A factor is C Cᵀ of columns, one per sample and position. Where a mini-batch has few of them they
are smaller than the factor, so they are kept, and sent, instead of it: exactly the same, with less traffic, and the
product is left to the layer's owner. Each rank decides that for itself, see `placement.most_columns`.

[Note: on trial] Only the gradients that `optimizer.step()` will see may form factors. A forward may be followed by no
backward at all (its loss was not finite), by ``torch.autograd.grad`` (an adversarial attack, a gradient penalty),
which leaves ``p.grad`` alone, or by a backward whose gradients are thrown away by ``zero_grad()``. So A of a call is
held by the call's own place in autograd's graph, and is gone with it. What a backward pass brings is a `PassSums`,
which is committed when the same pass has added to the weight's ``.grad``, and only then. And what was committed is
dropped when that ``.grad`` was cleared since.

[Note: hooks on views] A hook on a tensor belongs to the tensor's place in autograd's graph. Where a layer returns a
view (a Linear layer of three-dimensional inputs does before torch 2.15, a convolution of one picture everywhere), that
place is no longer part of the graph once the view is changed in place, as by ``ReLU(inplace=True)``: autograd then
goes on at the tensor that the view is of. So the hook is put there.

[Note: directions that wait] After an exchange the gradient of a layer's weight is its direction. A backward pass that
adds to it, in ``no_sync()`` or not, would have the owner precondition the sum, and so the direction a second time.
Therefore a hook looks at each gradient just before a pass adds to it: it must be None or zero by then. Its version
would not tell, since ``p.grad.data.zero_()`` leaves it alone, and clipping changes it.
"""

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

_NO_BACKWARD: Final = -1
_NOTHING_SEEN: Final = (
    "K-FAC has seen no call of any layer whose gradient came, so gradients stay as they are: layers are seen in "
    "training mode, in calls after the KFACState was made. Call train() on the model, not eval() (a Dropout or "
    "BatchNorm in it may be in eval mode), and make the state before the model is compiled and called"
)
_UNSEEN: Final = (
    "K-FAC has seen no call of %s, whose gradients came and stay as they are: a part in eval mode, a sparse or nested "
    "input, or a weight that is used without a call of its module; call train() on it, or name it in KFACState's skip="
)
_CHANGED: Final = (
    "the input factor of layer %s was changed in place before activation checkpointing had computed it again; the "
    "factors of such layers are dropped in such steps. If this goes on, do not change it in place, or name the layer "
    "in skip="
)
_REMEDY: Final = (
    "call optimizer.zero_grad() between two exchanges, and to accumulate gradients do all backward passes of a step "
    "but the last one in model.no_sync(), or add up their losses"
)
_USED_BESIDE: Final = (
    "%s: the model uses the weight beside its layer, too, so K-FAC sees a part of its gradient only; use it by calling "
    "the layer alone, or name the layer in KFACState's skip="
)


@dataclass(eq=False)
class Forward:
    """One forward of the model; its calls hold it, and the capture holds the latest one.

    Args:
        samples: how many the model was called with. None: not known.
    """

    micro_batch: int = 0
    samples: int | None = None


@dataclass(eq=False)
class Call:
    """One call of a layer with gradients enabled; autograd's graph holds it.

    Args:
        number: orders calls.
        make_a: returns A, or its columns. None: A is counted already, or the call is empty.
        is_empty: whether it has no samples, or none for this layer.
    """

    number: int
    step: int
    forward: Forward
    make_a: Callable[[], BatchFactor] | None
    is_empty: bool


@dataclass
class Sum:
    """What one layer has gathered of one of its factors, see [Note: unequal micro-batches].

    Args:
        room: as columns for as long as they are no more.
        power: a part of n samples weighs n to this power: 1, -1, or 0 if all parts weigh the same.

    Attributes:
        unit: the number of samples that weighs 1, that of the first part whose number is known.
        weight: the sum of all weights.
    """

    room: int
    power: int
    value: BatchFactor | None = None
    unit: int | None = None
    weight: float = 0.0

    def add(self, part: BatchFactor | None, samples: int | None, weight: float = 1.0) -> None:
        """Add a part of so many samples, which may be changed; ``weight``: those in it, if it is a sum itself."""
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
        """Return the factor, or its columns, times ``scale``, and forget it; None: none."""
        value, self.value, self.unit, self.weight = self.value, None, None, 0.0
        if isinstance(value, Columns):
            return Columns(value.source * math.sqrt(scale))
        return None if value is None else value.mul_(scale)


@dataclass
class PassSums:
    """What one backward pass has brought of a layer so far: G, and the calls whose A belongs to it."""

    g: Sum
    calls: list[Call] = field(default_factory=list)


class LayerSums:
    """Both factors of one layer in one step, see [Note: on trial].

    Args:
        rooms: how many columns may be kept of A and of G.
        powers: by which both weigh the number of samples.

    Attributes:
        trials: by the number of the backward pass.
        open: calls whose A is counted nowhere.
        micro_batches: those in the weight's ``.grad`` that have samples.
    """

    def __init__(self, rooms: tuple[int, int], powers: tuple[int, int]) -> None:
        self.a, self.g = map(Sum, rooms, powers)
        self.trials: dict[int, PassSums] = {}
        self.open: weakref.WeakSet[Call] = weakref.WeakSet()
        self.micro_batches: set[int] = set()
        self._left: tuple[weakref.ref[Tensor], int] | None = None

    def trial(self, task: int) -> PassSums:
        return self.trials.setdefault(task, PassSums(Sum(self.g.room, self.g.power)))

    def commit(self, trial: PassSums) -> None:
        for call in sorted(trial.calls, key=lambda call: call.number):
            make_a, call.make_a = call.make_a, None
            self.open.discard(call)
            if make_a is not None:
                self.a.add(make_a(), call.forward.samples)
        self.g.add(trial.g.value, trial.g.unit, trial.g.weight)

    def left(self, gradient: Tensor | None, micro_batches: Iterable[int]) -> None:
        """Note how a pass that added to it has left ``.grad``."""
        self.micro_batches.update(micro_batches)
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def is_as_left(self, gradient: Tensor) -> bool:
        """Tell whether nothing was written to it since, as far as its version says."""
        return (
            self._left is not None
            and self._left[0]() is gradient
            and self._left[1] == gradient._version
        )

    def drop(self) -> None:
        """Forget what was committed: it was given up."""
        self.a, self.g = (Sum(old.room, old.power) for old in (self.a, self.g))
        self.micro_batches.clear()


class FactorCapture:
    """Record the factors of a model's layers while it trains, see [Note: one step of several calls].

    The hooks do something only while `active`, in training mode and with gradients enabled. A copy of the model
    (an average of its weights) has hooks that do nothing. Not collective; one rank may capture what another does
    not.

    Under ``torch.compile`` a hook runs outside of the graph, which is cut around each captured layer; make the capture
    before the model's first call, later hooks are not seen by what is already compiled.

    Args:
        layers: of `find_layers`; an index below is one of this list.
        model: its forward begins a micro-batch.
        loss_scale: read once per micro-batch.
        only: the indices to capture; default all. Others cost nothing.
        ranks: how many send columns of the same factor, see [Note: few columns]; 1: nobody.

    Attributes:
        active: whether anything is captured.
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
        self.active = True
        self._calls: Counter[int] = Counter()  # in the forward passes of this micro-batch
        self._layers = list(layers)
        shapes = [layer.shape for layer in layers]
        self._rooms = [(most_columns(s.a_dim, ranks), most_columns(s.g_dim, ranks)) for s in shapes]
        self._sharing = sharing
        self._loss_scale = loss_scale
        self._scale: float | None = None
        self._accumulated = accumulated
        self._powers = (
            (0, 0) if sharing == "kfac-pytorch" else (1, -1 if accumulated == "mean" else 1)
        )
        self._captured = frozenset(range(len(self._layers)) if only is None else only)
        # Of all layers: those that are not captured also show which micro-batches count.
        self._sums = self._new_sums()
        self._step = 0
        self._numbers = itertools.count()
        self._newest_task = _NO_BACKWARD
        self._told: set[str] = set()
        self._looked_beside = False
        self._seen: dict[
            int, bool
        ] = {}  # whether layers were, of those whose gradients came in this step
        self._forward = Forward()
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._samples: dict[int, int | None] = {}  # of each micro-batch
        self._gradients_came = False
        self._began_before_backward = False
        self._handles = list(self._hooked(unwrapped(model)))

    def _hooked(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for index, layer in enumerate(self._layers):
            for module in layer.modules if index in self._captured else ():
                hook = weak_hook(self, "_on_forward", index)
                # First of all hooks: another one may replace the output.
                yield module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            yield layer.weight.register_post_accumulate_grad_hook(
                weak_hook(self, "_on_accumulated", index)
            )
        yield model.register_forward_pre_hook(weak_hook(self, "_on_root"), with_kwargs=True)
        yield model.register_forward_hook(weak_hook(self, "_on_output"))

    def _new_sums(self) -> list[LayerSums]:
        return [LayerSums(rooms, self._powers) for rooms in self._rooms]

    @property
    def micro_batches(self) -> int:
        """How many micro-batches have their gradients in this step's so far; empty ones do not count."""
        return len(self._counted())

    def _counted(self) -> set[int]:
        return set().union(*(sums.micro_batches for sums in self._sums))

    def begin_step(self) -> None:
        """Forget all that was not taken, and count micro-batches anew."""
        if unseen := [
            self._layers[index].name for index, was_seen in self._seen.items() if not was_seen
        ]:
            if len(unseen) == len(self._seen):
                self._warn_once(_NOTHING_SEEN)
            else:
                self._warn_once(_UNSEEN, ", ".join(sorted(unseen)))
        self._seen.clear()
        for call in itertools.chain.from_iterable(sums.open for sums in self._sums):
            call.make_a = None
        self._sums = self._new_sums()
        self._step += 1
        self._forward = Forward(0, self._forward.samples)
        self._forwards.clear()
        self._samples.clear()
        self._calls.clear()
        self._gradients_came = False
        self._scale = None

    def begin_exchange(self) -> None:
        """The step's gradients are about to be exchanged: drop what was given up, if no layer's gradient did so."""
        if self.active:
            self._begin_pass()

    def take(self, index: int) -> tuple[BatchFactor | None, BatchFactor | None]:
        """Return A and G of a layer as of now, or their columns, and forget them; None if it had no gradient."""
        sums = self._sums[index]
        return sums.a.take(1 / (sums.a.weight or 1)), sums.g.take(self._output_scale(sums.g))

    def _output_scale(self, g: Sum) -> float:
        if self._sharing == "kfac-pytorch":
            return 1 / (g.weight or 1)
        sizes = [self._samples.get(each) for each in sorted(self._counted())]
        unit = g.unit or next(filter(None, sizes), 1)
        total = sum(unit if size is None else size for size in sizes) or unit
        return total / unit if self._accumulated == "mean" else unit / total

    def close(self) -> None:
        """Remove the hooks and forget what was captured."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.active = False
        self.begin_step()

    # --- forward ---------------------------------------------------------------------------------------------

    def _on_root(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Note that a forward of the model begins.

        Several forwards before a gradient comes (two views of a picture, a recomputed forward) are one micro-batch.
        """
        if not (self.active and torch.is_grad_enabled()):  # in eval mode, too: its parts may train
            return
        samples, number = _samples_of((*args, *kwargs.values())), self._forward.micro_batch
        is_same = number and (
            not self._gradients_came or (self._began_before_backward and _in_backward())
        )
        self._forward = Forward(number if is_same else number + 1, samples)
        self._forwards.add(self._forward)
        self._size_micro_batches()
        if is_same:
            return
        self._began_before_backward = not _in_backward()
        self._gradients_came = False
        self._scale = None
        self._calls.clear()

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
        # The layers' only argument: torch's call it input, transformers' Conv1D x.
        sums, (input,) = self._sums[index], args or kwargs.values()
        if input.layout is not torch.strided or input.is_nested:
            return
        in_forward = not _in_backward()
        if in_forward:
            sums.trials.clear()  # of passes that added to no gradient
        # Activation checkpointing calls a layer again, and with the kind that is not reentrant for nothing: then the
        # first output has the hook that will fire.
        make = self._made if in_forward else self._made_later
        is_empty = self._forward.samples == 0 or input.numel() == 0
        made = None if is_empty else make(index, module, input)
        call = Call(next(self._numbers), self._step, self._forward, made, is_empty)
        sums.open.add(call)
        _hook_output(output, lambda gradient: self._on_gradient(index, module, call, gradient))
        if in_forward:
            self._calls[index] += 1

    def _on_output(self, module: nn.Module, args: object, output: object) -> None:
        """Once: warn of weights of which K-FAC sees a part of the gradient only."""
        if self._looked_beside or not self._calls or not self._captures(module):
            return
        self._looked_beside = True
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
        """Return A of one call: now, or, of a layer that waits for many gradients at once, in the smallest form."""
        shape, room = self._layers[index].shape, self._rooms[index][0]
        columns = input_columns(module, shape, input, self._sharing)
        if room < columns.width < shape.a_dim and self._sums[index].open:
            return (
                columns.kept().factor
            )  # where activations are recomputed inputs may be changed in place
        made = _in_small(columns, room)
        return lambda: made

    def _made_later(
        self, index: int, module: nn.Module, input: Tensor
    ) -> Callable[[], BatchFactor]:
        version, shape = input._version, self._layers[index].shape

        def make() -> BatchFactor:
            columns = input_columns(module, shape, input, self._sharing)
            if input._version == version:
                return _in_small(columns, self._rooms[index][0])
            self._warn_once(_CHANGED, self._layers[index].name)
            return columns.factor().fill_(math.nan)

        return make

    # --- backward --------------------------------------------------------------------------------------------

    def _on_gradient(self, index: int, module: nn.Module, call: Call, gradient: Tensor) -> None:
        if not self._handles or call.step != self._step:
            return
        self._begin_pass()
        trial, shape = self._sums[index].trial(_task()), self._layers[index].shape
        trial.calls.append(call)
        if call.is_empty:
            return
        if self._scale is None:  # a GradScaler's makes the host wait for the device
            self._scale = self._loss_scale()
        columns = output_columns(module, shape, gradient, self._sharing, call.forward.samples)
        part = _in_small(columns, trial.g.room)
        if isinstance(part, Columns):
            part.source.div_(self._scale)
        else:
            part.div_(self._scale**2)
        trial.g.add(part, self._samples.get(call.forward.micro_batch))

    def _on_accumulated(self, index: int, weight: Tensor) -> None:
        """The gradient of a layer's weight was added to: what its pass has brought is the step's."""
        if not self.active:
            return
        sums, forward = self._sums[index], self._forward
        made_in = set() if forward.samples == 0 else {forward.micro_batch}
        if index in self._captured:
            trial = sums.trials.pop(_task(), None)
            self._seen[index] = trial is not None or self._seen.get(index, False)
            if trial is None:
                return
            made_in = {call.forward.micro_batch for call in trial.calls if not call.is_empty}
            sums.commit(trial)
        self._gradients_came = True
        sums.left(weight.grad, made_in)

    def _begin_pass(self) -> None:
        """Once per backward pass, before it adds to any gradient: drop what was given up."""
        if _task() <= self._newest_task:
            return
        self._newest_task = _task()
        self._size_micro_batches()
        written: list[tuple[LayerSums, Tensor]] = []
        for sums, layer in zip(self._sums, self._layers, strict=True):
            gradient = layer.weight.grad
            if not sums.micro_batches:
                continue
            if gradient is None:
                sums.drop()
            elif not sums.is_as_left(gradient):
                written.append((sums, gradient.detach().any()))  # cleared, or clipped, or scaled
        if written:
            found = torch.stack([something for _, something in written]).tolist()
            for (sums, _), something in zip(written, found, strict=True):
                if not something:
                    sums.drop()

    def _size_micro_batches(self) -> None:
        """Note the size of each micro-batch whose gradients are still to come, by the forwards that are left of it."""
        counted, sizes = self._counted(), Counter[int]()
        for forward in self._forwards:
            if forward.micro_batch not in counted:
                sizes[forward.micro_batch] = max(sizes[forward.micro_batch], forward.samples or 0)
        self._samples.update({number: size or None for number, size in sizes.items()})

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message, *arguments)


def _in_small(columns: Columns, room: int) -> BatchFactor:
    return columns.scaled() if 0 < columns.width <= room else columns.factor()


def _multiply(part: BatchFactor, factor: float) -> None:
    """Multiply in place."""
    if isinstance(part, Columns):
        part.source.mul_(math.sqrt(factor))
    else:
        part.mul_(factor)


def _samples_of(inputs: Sequence[object]) -> int | None:
    """Return how many samples a model is called with: the first dimension of the first tensor that has two or more.

    0: all tensors are empty. None: not known; a list of tensors may hold samples or parts of them.
    """
    found = next(_first_dimensions(inputs), None)
    if (
        found is None
        and (tensors := list(tensors_in(inputs)))
        and not any(map(torch.numel, tensors))
    ):
        return 0
    return found


def _first_dimensions(inputs: Iterable[object]) -> Iterator[int]:
    for each in inputs:
        if isinstance(each, Mapping):
            yield from _first_dimensions(each.values())
        elif isinstance(each, Tensor) and each.dim() > 1 and each.shape[0]:
            yield each.shape[0]


def _uses(outputs: Iterable[Tensor]) -> Counter[Tensor]:
    """Return how often each leaf was used to compute ``outputs``."""
    seen = {each.grad_fn for each in outputs if each.grad_fn is not None}
    ahead, users, uses = [*seen], Counter[object](), Counter[Tensor]()
    leaves: list[tuple[Tensor, Any]] = []
    while ahead:
        node = ahead.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            users[child] += 1
            if hasattr(child, "variable"):
                leaves.append((child.variable, node))
            elif child not in seen:
                seen.add(child)
                ahead.append(child)
    for leaf, node in leaves:  # autocast casts a weight once
        uses[leaf] += users[node] if node.name() == "ToCopyBackward0" else 1
    return uses


class WaitingDirections:
    """Knows which weights' gradients hold directions, see [Note: directions that wait].

    Args:
        layers: of the model.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # By layer: whether a pass has added to its direction; None: none has. A tensor: the host does not wait for it.
        self._waits: dict[int, Tensor | None] = {}
        self._found: dict[
            int, Tensor
        ] = {}  # not added to yet: ``torch.autograd.grad`` adds to nothing
        for index, layer in enumerate(layers):
            layer.weight.register_hook(weak_hook(self, "_before_adding", index))
            layer.weight.register_post_accumulate_grad_hook(weak_hook(self, "_added", index))

    def wait(self, layers: Iterable[int]) -> None:
        self._waits.update((index, None) for index in layers)

    def check(self, layers: Iterable[int]) -> None:
        for index in layers:
            added = self._waits.get(index)
            if added is not None and bool(added):
                weight = next(iter(self._layers[index].parameters))
                raise UnsupportedConfigurationError(
                    f"expected gradients that were cleared since the last exchange, got a second backward() added to "
                    f"the K-FAC direction of {weight}, which would be preconditioned twice; {_REMEDY}"
                )

    def _before_adding(self, index: int, _: Tensor) -> None:
        if index not in self._waits:
            return
        gradient, before = self._layers[index].weight.grad, self._waits[index]
        if gradient is None:
            del self._waits[index]
            return
        left = gradient.detach().any()
        self._found[index] = (
            left if before is None else before & left
        )  # once cleared, what is there is new

    def _added(self, index: int, _: Tensor) -> None:
        if index in self._waits:
            self._waits[index] = self._found.pop(index)


def _hook_output(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` called with the gradient of what ``output`` is now, see [Note: hooks on views]."""
    base = output._base if output._is_view() else None
    if base is None:
        output.register_hook(hook)
        return
    size, stride, base_stride = output.size(), output.stride(), base.stride()
    offset = int(output.storage_offset() - base.storage_offset())

    def on_gradient_of_base(gradient: Tensor) -> None:
        gradient = gradient.detach()
        if gradient.stride() != base_stride:
            gradient = gradient.new_empty_strided(gradient.size(), base_stride).copy_(gradient)
        hook(gradient.as_strided(size, stride, gradient.storage_offset() + offset))

    base.register_hook(on_gradient_of_base)


def _task() -> int:
    return torch._C._current_graph_task_id()


def _in_backward() -> bool:
    """Tell whether autograd is what runs this, on whichever thread."""
    return _task() != _NO_BACKWARD


def weak_hook(owner: object, method: str, *arguments: object) -> OwnHook:
    """Make a hook of a module or a parameter that knows its owner weakly, and whose copies do nothing."""
    known = weakref.ref(owner)

    def run(*given: object) -> None:
        if (found := known()) is not None:
            getattr(found, method)(*arguments, *given)

    # A compiler would trace what it sees of this moment, the sums and flags as constants.
    return OwnHook(uncompiled(run))
