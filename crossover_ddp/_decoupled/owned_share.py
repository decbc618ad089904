"""A bucket whose parameters have owners: they make new values or directions of its sums, and everybody takes them.

[Note: two buffers] The gradients of a bucket are packed by owner into one buffer, which is summed. What owners send
back has places of its own where it is not as large: a direction of torch's Muon takes two bytes a number, in a second
buffer of the bucket's type. Without directions the same buffer goes both ways.

[Note: gradients that are withheld] Whatever looks at such a gradient must not take it for the mean. So it is NaN, a
signalling one: arithmetic makes an ordinary NaN of it, so that a change of it shows in its bits, even one that counts
no version, as those by GradScaler and through ``.data`` do not. Copies keep the bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from crossover_ddp._ddp.contents import Sharded, contents_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.trips import Trip
from crossover_ddp._owners.packing import Item, packing
from crossover_ddp._owners.partial_optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp.errors import UnsupportedConfigurationError

from .owned_optimizers import OwnedOptimizer, OwnedOptimizers, OwnedUpdate
from .shares import Share, view_of

TOUCHED: Final = (
    "expected the gradients that backward() left, got gradients that were changed (by "
    "torch.nn.utils.clip_grad_norm_, GradScaler, p.grad.mul_): with owners='layers' they are NaN, and only a "
    "parameter's owner has its mean; use state.clip_grad_norm_ to clip, and bfloat16 instead of a GradScaler"
)


class _BitPattern(NamedTuple):
    bits: torch.dtype
    value: int


_MARKS: Final = {
    torch.float16: _BitPattern(torch.int16, 0x7D00),
    torch.bfloat16: _BitPattern(torch.int16, 0x7FA0),
    torch.float32: _BitPattern(torch.int32, 0x7FA00000),
    torch.float64: _BitPattern(torch.int64, 0x7FF4000000000000),
}


def withhold(gradient: torch.Tensor) -> None:
    """Mark what owners alone have; counts no version."""
    mark = _MARKS[gradient.dtype]
    gradient.data.view(mark.bits).fill_(mark.value)


def is_computed_with(gradient: torch.Tensor) -> bool:
    """Tell whether somebody has changed a withheld gradient by arithmetic; dropping or zeroing it is none."""
    mark = _MARKS[gradient.dtype]
    return bool((gradient.isnan() & (gradient.view(mark.bits) != mark.value)).any())


class Packed(NamedTuple):
    """A bucket's parameters by owner, see [Note: two buffers].

    Args:
        there: what is summed.
        back: what owners send; the same buffer where new values travel.
        gradients: by the parameter's id, in ``there``.
        pieces: what comes back of it, in ``back``.
    """

    there: Sharded
    back: Sharded
    gradients: Mapping[int, torch.Tensor]
    pieces: Mapping[int, torch.Tensor]


@torch.no_grad()
def pack(bucket: dist.GradBucket, owned: OwnedOptimizers, world_size: int) -> Packed:
    """Return the bucket's gradients by owner, and withhold them in the bucket."""
    buffer = bucket.buffer()
    contents = contents_of(bucket, buffer)
    if any(each.parameter.dtype != buffer.dtype for each in contents):
        raise UnsupportedConfigurationError(
            f"expected gradients of the parameters' own type, got {buffer.dtype} ones; updated parameters travel "
            "in their place: use owners=None"
        )
    parameters = [each.parameter for each in contents]
    items = [
        Item(
            owned.owner_of[id(parameter)],
            span.numel,
            owned.of(parameter).returning_numel(span.numel, buffer.itemsize),
        )
        for parameter, _, span in contents
    ]
    plan = packing(world_size, tuple(items))
    there = buffer.new_empty(plan.there.numel)
    # No piece is larger than its gradient: as many elements in all means as many of each.
    back = there if plan.back.numel == plan.there.numel else buffer.new_empty(plan.back.numel)
    for each, place in zip(contents, plan.items, strict=True):
        _part(there, place.there).copy_(_part(buffer, each.span))
    withhold(buffer)
    placed = [*zip(parameters, plan.items, strict=True)]
    gradients = {id(p): view_of(there, p, place.there.start) for p, place in placed}
    pieces = {id(p): owned.of(p).piece(_part(back, place.back), p) for p, place in placed}
    return Packed(Sharded(there, plan.there), Sharded(back, plan.back), gradients, pieces)


def _part(flat: torch.Tensor, span: Span) -> torch.Tensor:
    return flat[span.start : span.stop]


@dataclass(eq=False, slots=True, kw_only=True)
class OwnedShare(Share):
    """A bucket of one step; see `Share`.

    Args:
        packed: where each parameter travels.
        owner_of: rank by the parameter's id.
        rank: this one.

    ``steps``: the optimizers that have stepped, and what ``step()`` has used.
    """

    packed: Packed
    owner_of: Mapping[int, int]
    rank: int
    steps: Sequence[tuple[OwnedOptimizer, StepPlan]] = ()
    gathered: Trip | None = None

    @property
    def travelling_bytes(self) -> int:
        """Memory of what travels."""
        buffers = {id(each.tensor): each.tensor for each in (self.packed.there, self.packed.back)}
        return sum(buffer.nbytes for buffer in buffers.values())

    def own_part(self) -> torch.Tensor:
        """Wait for the sums, and return those that this rank owns."""
        self.bucket.wait_for_sum()
        return self.packed.there.part(self.rank)

    def receive(self) -> None:
        """Wait for the mean, scale it, and put it where the optimizers of this rank, if it is the owner, see it.

        The mean goes where plain DDP would leave it: sums over matrices may depend on where these begin in memory.
        """
        own = self.own_part()
        if self.factor is not None:
            own.mul_(self.factor)
            self.factor = None
        for update, gradient in self._own_gradients():
            update.gradient.data.copy_(gradient)  # counts no version

    def owned_updates(self, plan: StepPlan) -> list[OwnedUpdate]:
        """Return what comes of the updates of one optimizer, that of ``plan``, which may reuse gradients' memory."""
        return [
            OwnedUpdate(
                # An alias: what the optimizer does to it is not the user's doing, see [Note: versions].
                Update(update.parameter, update.gradient.data),
                self.packed.pieces[id(update.parameter)],
                self._is_own(update),
            )
            for update in self.updates
            if id(update.parameter) in plan.group_of
        ]

    def clear(self) -> None:
        """Withhold the mean of owned parameters again."""
        for update in self.updates:
            if self._is_own(update):
                withhold(update.gradient)

    def check_dropped(self) -> None:
        """Refuse to drop a step whose gradients somebody has computed with: he may skip all for what he saw."""
        if any([is_computed_with(gradient) for gradient in self._sealed()]):
            raise UnsupportedConfigurationError(TOUCHED)

    def _own_gradients(self) -> Iterator[tuple[Update, torch.Tensor]]:
        for update in self.updates:
            if self._is_own(update):
                yield update, self.packed.gradients[id(update.parameter)]

    def _is_own(self, update: Update) -> bool:
        return self.owner_of[id(update.parameter)] == self.rank

    # --- as of `Share` ---------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed, see [Note: gradients that are withheld]."""
        try:
            Share.check_gradients(self)
        except UnsupportedConfigurationError:
            raise UnsupportedConfigurationError(TOUCHED) from None

    def wait(self) -> None:
        """Wait for what owners have sent."""
        assert self.gathered is not None
        self.gathered.wait()

    def apply(self, partial: PartialOptimizer) -> None:
        """Take over what owners have sent."""
        for owned, plan in self.steps:
            owned.take_over(plan, self.owned_updates(plan))

    def land(self) -> None:
        """Leave gradients as they are: nobody but the owner has the mean."""

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the mean gradients that this rank owns."""
        self.own_part()
        for _, gradient in self._own_gradients():
            yield gradient
