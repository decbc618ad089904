"""The buckets of one step while they are in our custody: from backward until their update is applied."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.links import parts
from crossover_ddp._owners.partial_optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp.errors import UnsupportedConfigurationError

from .seals import Seal

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


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the gradients of ``parameters``, by their ids, in a bucket, laid out as DDP lays them out."""
    begin, views = 0, {}
    for parameter in parameters:
        views[id(parameter)] = view_of(buffer, parameter, begin)
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
        bucket: on its way.
        parameters: those whose gradients it holds.
        buffer: DDP's buffer, of which the gradients are views.
        place: its number in backward; forward needs the last one first.
        views: of ``bucket.flat``, by the parameter's id, if gradients are not views of the buffer themselves. The
            mean is copied into them then; DDP allows nothing else.

    ``pending``: its update is still to come.
    ``unseen``: it is not known that forward reads all of it through guards.
    """

    bucket: Bucket
    parameters: list[torch.Tensor]
    buffer: torch.Tensor
    place: int
    views: Mapping[int, torch.Tensor] | None = None
    updates: list[Update] = field(default_factory=list)
    plan: StepPlan | None = None
    factor: torch.Tensor | None = None
    pending: bool = False
    unseen: bool = False
    _gradient_seal: Seal = field(init=False)
    _parameter_seal: Seal | None = None
    _separate: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gradient_seal = Seal([self.buffer])

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
        self._separate = {id(p): p.grad for p in self.parameters if p.grad is not None}
        self._gradient_seal = Seal(self._separate.values())

    def land(self) -> None:
        """Put the mean, which is whole and scaled, where gradients are."""
        if self.views is None or not self._separate:
            return
        gradients = [gradient.data for gradient in self._separate.values()]  # counts no version
        torch._foreach_copy_(gradients, [self.views[key] for key in self._separate])

    def _is_ours(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        if self.views is None:
            return gradient.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        return self._separate.get(id(parameter)) is gradient

    def _sealed(self) -> list[torch.Tensor]:
        return [self.buffer] if self.views is None else [*self._separate.values()]

    def note_gradients(self) -> None:
        """Note the gradients, which are whole, and the parameters, so that changes show that count no version."""
        self.land()
        self._gradient_seal = Seal(self._sealed(), bits=True)
        self._parameter_seal = Seal(self.parameters, bits=True)

    def note_parameters(self) -> None:
        """Note the parameters at the end of backward: code that writes them before ``step()`` may read gradients."""
        self._parameter_seal = Seal(self.parameters)

    @property
    def is_written(self) -> bool:
        """Whether somebody has written the parameters since they were noted."""
        return self._parameter_seal is not None and self._parameter_seal.is_broken

    def take_step(self, plan: StepPlan, *, checked: bool) -> None:
        """Note that the collected gradients are to be applied as ``plan`` says; ``checked``: note the parameters."""
        self.plan = plan
        self._parameter_seal = Seal([update.parameter for update in self.updates], bits=checked)

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed, see [Note: versions]."""
        if self._gradient_seal.is_broken:
            raise UnsupportedConfigurationError(CHANGED)

    def check_parameters(self) -> None:
        """Refuse parameters that somebody has written since ``step()``."""
        if self.is_written:
            raise UnsupportedConfigurationError(WRITTEN)

    def wait(self) -> None:
        """Wait for what the update needs of other ranks."""
        self.await_mean()

    def await_mean(self) -> None:
        """Wait until its gradients are whole."""
        self.bucket.wait()

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
            self.bucket.flat.mul_(self.factor)
            self.factor, self._gradient_seal = None, Seal(self._sealed())

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the part of the mean that ``rank``, this one, owns, without gradients that are not applied."""
        self.bucket.wait_for_sum()
        layout, own = self.bucket.layout, parts(self.bucket.flat, self.bucket.layout)[rank]
        start = sum(layout[:rank])
        for update in self.updates:
            place = update.gradient if self.views is None else self.views[id(update.parameter)]
            reals = place.element_size() // self.buffer.element_size()  # DDP shows complex as real
            begin = place.storage_offset() * reals - self.buffer.storage_offset()
            first = max(begin, start)
            stop = min(begin + update.gradient.numel() * reals, start + own.numel())
            if first < stop:
                yield own[first - start : stop - start]
