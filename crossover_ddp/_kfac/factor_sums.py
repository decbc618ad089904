"""What one layer has gathered of its factors in a step, and what is still on trial.

[Note: on trial] Only the gradients that `optimizer.step()` will see may form factors. A forward may be followed by no
backward at all (its loss was not finite), by ``torch.autograd.grad`` (an adversarial attack, a gradient penalty),
which leaves ``p.grad`` alone, or by a backward whose gradients are thrown away by ``zero_grad()``. So A of a call is
held by the call's own place in autograd's graph, and is gone with it. What a backward pass brings is a `PassSums`,
which is committed when the same pass has added to the weight's ``.grad``, and only then. And what was committed is
dropped when that ``.grad`` was cleared since (`GradientMark`).
"""

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .factors import BatchFactor, Gram, multiplied


class ColumnRoom(NamedTuple):
    """How many columns of a layer's factors this rank may send, see [Note: few columns]; 0: none."""

    a: int = 0
    g: int = 0


@dataclass(eq=False)
class Call:
    """One call of a layer with gradients enabled; autograd's graph holds it.

    Args:
        number: the order of calls.
        step, micro_batch: in which it was made.
        make_a: returns A, or its columns. None: A is counted already.
    """

    number: int
    step: int
    micro_batch: int
    make_a: Callable[[], BatchFactor] | None


@dataclass
class Sum:
    """What one layer has gathered of one of its factors."""

    value: BatchFactor | None = None
    calls: int = 0

    def add(self, part: BatchFactor | None, room: int, calls: int = 1) -> None:
        """Add the factor of some calls, or its columns, as columns for as long as there is ``room``."""
        self.calls += calls
        if self.value is None or part is None:
            self.value = part if self.value is None else self.value
        elif (
            isinstance(self.value, Gram) and isinstance(part, Gram) and self.value.width + part.width <= room
        ):
            self.value = Gram(torch.cat([self.value.columns, part.columns], dim=2))
        else:
            self.value = multiplied(self.value).add_(multiplied(part))

    def take(self, scale: Callable[[int], float]) -> BatchFactor | None:
        """Return the factor, or its columns, times ``scale`` of the number of calls; None if there is none."""
        if isinstance(self.value, Gram):
            return Gram(self.value.columns * math.sqrt(scale(self.calls)))
        return None if self.value is None else self.value.mul_(scale(self.calls))


@dataclass
class PassSums:
    """What one backward pass has brought of a layer so far: G, and the calls whose A belongs to it."""

    g: Sum = field(default_factory=Sum)
    calls: list[Call] = field(default_factory=list)


class GradientMark:
    """How the ``.grad`` of one weight was left by the last pass that added to it.

    Attributes:
        micro_batches: those of this step that are in it.
    """

    def __init__(self) -> None:
        self.micro_batches: set[int] = set()
        self._gradient: Callable[[], Tensor | None] = _nothing
        self._version = -1

    def left(self, gradient: Tensor | None, micro_batches: Iterable[int]) -> None:
        """A pass has added the gradient of ``micro_batches``."""
        self.micro_batches.update(micro_batches)
        self._gradient = _nothing if gradient is None else weakref.ref(gradient)
        self._version = -1 if gradient is None else gradient._version

    def is_as_left(self, gradient: Tensor) -> bool:
        """Tell whether nothing was written to it since, as far as its version says."""
        return self._gradient() is gradient and self._version == gradient._version

    def clear(self) -> None:
        """Nothing of this step is in it any more."""
        self.micro_batches.clear()
        self._gradient = _nothing


class LayerSums:
    """Both factors of one layer in one step, see [Note: on trial].

    Attributes:
        spoiled: whether A that was sent ahead of backward turned out not to be the step's.
    """

    def __init__(self) -> None:
        self.a, self.g = Sum(), Sum()
        self.trials: dict[int, PassSums] = {}  # by the number of the backward pass, see [Note: on trial]
        self.open: weakref.WeakSet[Call] = weakref.WeakSet()  # whose A is counted nowhere
        # Numbers of calls whose A was taken ahead, and whose backward has not come.
        self._ahead: set[int] = set()
        self._took_ahead = False
        self._spoiled = False

    @property
    def spoiled(self) -> bool:
        """Whether the sums hold what must not be used."""
        return self._spoiled or bool(self._ahead)

    def trial(self, task: int) -> PassSums:
        """Return what the backward pass ``task`` has brought."""
        return self.trials.setdefault(task, PassSums())

    def commit(self, trial: PassSums, room: ColumnRoom) -> None:
        """The pass of ``trial`` has added to the weight's gradient."""
        for call in sorted(trial.calls, key=lambda call: call.number):
            self._ahead.discard(call.number)
            self._count(call, room.a)
        self.g.add(trial.g.value, room.g, trial.g.calls)

    def take_input(self) -> BatchFactor | None:
        """Return A of what was committed, and forget it."""
        taken, self.a = self.a, Sum()
        return taken.take(lambda calls: 1 / calls)

    def take_input_ahead(self, room: int) -> BatchFactor | None:
        """Return A of what was committed and of all calls so far, assuming that their backward will come."""
        for call in sorted(self.open, key=lambda call: call.number):
            self._ahead.add(call.number)
            self._count(call, room)
        self._took_ahead = True
        return self.take_input()

    def take_output(self, scale: Callable[[int], float]) -> BatchFactor | None:
        """Return G of what was committed, and forget it."""
        taken, self.g = self.g, Sum()
        return taken.take(scale)

    def drop(self) -> None:
        """What was committed in this step was given up."""
        self.a, self.g = Sum(), Sum()
        self._spoiled = self._spoiled or self._took_ahead

    def _count(self, call: Call, room: int) -> None:
        make_a, call.make_a = call.make_a, None
        self.open.discard(call)
        if make_a is not None:
            self.a.add(make_a(), room)


def _nothing() -> None:
    return None
