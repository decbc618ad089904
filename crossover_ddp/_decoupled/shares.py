"""The buckets of one step while they are in our custody: from backward until their update is applied.

[Note: versions] A tensor counts its in-place changes. What we do to a bucket goes through an alias with a counter of
its own, so a change of the counter that gradients carry is somebody else's, made while they were averaged in parts.
Changes through ``.data`` are not counted: see [Note: changes that no counter sees].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from crossover_ddp._exchange.transfer import Deferred
from crossover_ddp.errors import UnsupportedConfigurationError

from .fingerprints import fingerprint
from .partial_optimizer import PartialOptimizer, StepPlan, Update

CHANGED: Final = (
    "expected the gradients that backward() left, got gradients that were changed in place (by "
    "torch.nn.utils.clip_grad_norm_ on a list of parameters made earlier, p.grad.mul_, p.grad.data.mul_) while only "
    "a part of them had been averaged; use state.clip_grad_norm_, or call state.flush() before that line"
)
WRITTEN: Final = (
    "expected parameters that nobody writes between optimizer.step() and their update, got some changed in place (by "
    "p.add_, p.data.clamp_, ... on parameters taken earlier); call state.flush() after step(), or go through "
    "model.parameters() in that line"
)
UNSTEPPED: Final = (
    "expected step() of the optimizer that DecoupledState was made with, got parameters that were written without it "
    "while only a part of their gradients had been averaged (by another optimizer, or p -= lr * p.grad on parameters "
    "taken earlier); call state.flush() before that line, or wrap the model again, with a DecoupledState of the "
    "optimizer that steps"
)


class _Separate(NamedTuple):
    """A gradient that is not a view of its bucket."""

    gradient: torch.Tensor
    view: torch.Tensor
    version: int


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of ``parameters`` in a bucket, laid out as DDP lays them out."""
    begin, views = 0, []
    for parameter in parameters:
        views.append(view_of(buffer, parameter, begin))
        begin += parameter.numel()
    return views


def view_of(buffer: torch.Tensor, parameter: torch.Tensor, begin: int) -> torch.Tensor:
    """Return what begins there in a flat buffer, laid out as DDP lays out the gradient of ``parameter``."""
    begin += int(buffer.storage_offset())
    return buffer.as_strided(parameter.shape, strides_in_bucket(parameter), begin)


def strides_in_bucket(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that DDP gives a gradient in its bucket."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:  # with gaps, or overlapping
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()


@dataclass(eq=False, slots=True)
class Share:
    """A bucket of one step: on its way, then waiting for ``step()``, then for somebody who needs its parameters.

    Args:
        deferred: its exchange.
        parameters: those whose gradients it holds.
        buffer: DDP's buffer, of which the gradients are views.
        urgency: when forward first needs one of them.
        place: its number in backward.
        views: of ``deferred.bucket``, one for each parameter, if gradients are not views of the buffer themselves. The
            mean is copied into them then; DDP allows nothing else.

    ``needs``: what else must have come before its gradients are whole. ``pending``: its update is still to come.
    ``unseen``: it is not known that forward reads all of it through guards.
    """

    deferred: Deferred
    parameters: list[torch.Tensor]
    buffer: torch.Tensor
    urgency: int
    place: int
    views: list[torch.Tensor] | None = None
    updates: list[Update] = field(default_factory=list)
    plan: StepPlan | None = None
    factor: torch.Tensor | None = None
    pending: bool = False
    unseen: bool = False
    needs: list[Deferred] = field(default_factory=list)
    _version: int = field(init=False)
    _parameter_versions: list[int] = field(default_factory=list)
    _bits: torch.Tensor | None = None
    _separate: dict[int, _Separate] = field(default_factory=dict)
    _parameter_bits: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self._version = self.buffer._version

    def collect(self) -> None:
        """Note which gradients are to be applied; one that the user has dropped is not."""
        self.check_gradients()
        self.updates = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if not self._is_ours(parameter, gradient):
                raise UnsupportedConfigurationError(
                    "expected the gradients that backward() left, got others in their place; "
                    "call flush() before you replace p.grad"
                )
            self.updates.append(Update(parameter, gradient))

    def note_separate(self) -> None:
        """Note the gradients that DDP has just written, where they are not views; call it when backward has ended."""
        if self.views is not None:
            self._separate = {
                id(parameter): _Separate(parameter.grad, view, parameter.grad._version)
                for parameter, view in zip(self.parameters, self.views, strict=True)
                if parameter.grad is not None
            }

    def land(self) -> None:
        """Put the mean, which is whole and scaled, where gradients are."""
        if self._separate:
            gradients = [each.gradient.data for each in self._separate.values()]  # counts no version
            torch._foreach_copy_(gradients, [each.view for each in self._separate.values()])

    def _is_ours(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        if self.views is None:
            return gradient.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        noted = self._separate.get(id(parameter))
        return noted is not None and noted.gradient is gradient

    def _gradient_bits(self) -> torch.Tensor:
        if self.views is None:
            return fingerprint(self.buffer)
        return torch.cat([fingerprint(each.gradient).reshape(-1) for each in self._separate.values()])

    def note_gradients(self) -> None:
        """Note the gradients, which are whole, and the parameters, so that changes show that count no version."""
        self.land()
        self._bits = self._gradient_bits()
        self._parameter_bits = [fingerprint(parameter) for parameter in self.parameters]

    def note_parameters(self) -> None:
        """Note the parameters at the end of backward: code that writes them before ``step()`` may read gradients."""
        self._parameter_versions = [parameter._version for parameter in self.parameters]

    @property
    def is_written(self) -> bool:
        """Whether somebody has written the parameters since the end of backward; before `take_step`."""
        if [parameter._version for parameter in self.parameters] != self._parameter_versions:
            return True
        noted = zip(self.parameters, self._parameter_bits or (), strict=False)
        return any([not torch.equal(fingerprint(parameter), bits) for parameter, bits in noted])

    def take_step(self, plan: StepPlan, *, checked: bool) -> None:
        """Note that the collected gradients are to be applied as ``plan`` says; ``checked``: note the parameters."""
        self.plan = plan
        self._parameter_versions = [update.parameter._version for update in self.updates]
        self._parameter_bits = [fingerprint(update.parameter) for update in self.updates] if checked else None

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed, see [Note: versions]."""
        separate = self._separate.values()
        if self.buffer._version != self._version or any([e.gradient._version != e.version for e in separate]):
            raise UnsupportedConfigurationError(CHANGED)
        if self._bits is not None and not torch.equal(self._gradient_bits(), self._bits):
            raise UnsupportedConfigurationError(CHANGED)

    def check_parameters(self) -> None:
        """Refuse parameters that somebody has written since ``step()``."""
        if [update.parameter._version for update in self.updates] != self._parameter_versions:
            raise UnsupportedConfigurationError(WRITTEN)
        for update, bits in zip(self.updates, self._parameter_bits or (), strict=False):
            if not torch.equal(fingerprint(update.parameter), bits):
                raise UnsupportedConfigurationError(WRITTEN)

    def wait(self) -> None:
        """Wait for what the update needs of other ranks."""
        self.await_mean()

    def await_mean(self) -> None:
        """Wait until its gradients are whole."""
        for each in self.needs:
            each.wait()
        self.deferred.wait()

    def apply(self, partial: PartialOptimizer) -> None:
        """Update the parameters, after `wait`."""
        assert self.plan is not None
        self.scale()
        self.land()
        partial.apply(self.plan, self.updates)

    def clip(self, factor: torch.Tensor) -> None:
        """Have the gradients scaled when they are whole."""
        self.factor = factor if self.factor is None else self.factor * factor

    def scale(self) -> None:
        """Scale the gradients, which are whole."""
        if self.factor is not None:
            self.deferred.bucket.mul_(self.factor)
            self.factor = self._bits = None

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the part of the mean that ``rank``, this one, owns, without gradients that are not applied."""
        own = self.deferred.own_part()
        part = self.deferred.layout.part(rank)
        for update in self.updates:
            noted = self._separate.get(id(update.parameter))
            place = update.gradient if noted is None else noted.view
            reals = place.element_size() // self.buffer.element_size()  # DDP shows complex as real
            begin = place.storage_offset() * reals - self.buffer.storage_offset()
            first, stop = max(begin, part.start), min(begin + update.gradient.numel() * reals, part.stop)
            if first < stop:
                yield own[first - part.start : stop - part.start]
