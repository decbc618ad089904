"""Decoupled training with an owner for each parameter: it alone runs the optimizer on it, and the result travels.

[Note: owners of whole parameters] Whatever treats parameters one by one may run on one rank for all: SOAP and Shampoo
with their preconditioners, Muon, AdamW. A bucket is packed by owner and reduce-scattered during backward. In
``step()`` each rank takes the optimizers' own step for the parameters that it owns, as their sums arrive; the gather
brings the new values to everybody, while the next forward runs. Wire bytes are those of plain DDP; work and state are
divided by the number of ranks. Of torch's Muon directions travel instead, see [Note: directions in the next forward] in
`owned.py`. Our design.

Owners update in ``step()`` itself, on the training thread: an optimizer and its schedulers are not made for two
threads, and forward needs first what was reduced last, so that little could run ahead.

[Note: two buffers] The gradients of a bucket are packed by owner into one buffer, which is summed. What owners send
back has places of its own where it is not as large: a direction of torch's Muon takes two bytes a number, in a second
buffer of the bucket's type. Without directions the same buffer goes both ways.

[Note: gradients that are withheld] Whatever looks at such a gradient must not take it for the mean. So it is NaN, a
signalling one: arithmetic makes an ordinary NaN of it, so that a change of it shows in its bits, even one that counts
no version, as those by GradScaler and through ``.data`` do not. Copies keep the bits.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import check_not_joined
from crossover_ddp._ddp.contents import Sharded, contents_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.turns import Turn
from crossover_ddp._owners.optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp._owners.packing import Item, packing
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .owned import OwnedOptimizer, OwnedOptimizers, OwnedUpdate, owned_optimizer
from .pending import Share, Updates, as_in_step, view_of
from .training import DecoupledTraining, copies_gradients

logger = logging.getLogger(__name__)

_SKIPPED_STEPS_TO_WARN: Final = 3
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
    there = buffer.new_empty(sum(plan.there))
    # No piece is larger than its gradient: as many elements in all means as many of each.
    back = there if sum(plan.back) == sum(plan.there) else buffer.new_empty(sum(plan.back))
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


async def summed(packed: Packed, link: Link) -> None:
    """Bring a bucket's gradients to their owners; its journey ends there, and passes no gate.

    ``step()`` begins the way back as a journey of its own on the same link, see `OwnedTraining._update_owned`.
    """
    await link.reduce_scatter(packed.there.tensor, packed.there.layout)


async def _brought_back(back: Sharded, link: Link) -> None:
    """Bring what owners have made of them to all."""
    await link.all_gather(back.tensor, back.layout)


class OwnedUpdates(Updates):
    """Updates that arrive: before ``step()`` nobody can make gradients whole.

    Args:
        partial: of any of the optimizers.

    ``plans``: by number, of the optimizers that have stepped, until all have.
    """

    def __init__(self, partial: PartialOptimizer) -> None:
        super().__init__(partial)
        self.plans: dict[int, StepPlan] = {}

    def look(self) -> None:
        """Refuse a read while only some of the optimizers have stepped: their updates have not begun."""
        if self.plans:
            raise UnsupportedConfigurationError(
                "expected step() of all optimizers before parameters are read, got a read while some have not stepped; "
                "call all of them after each backward(), one after the other"
            )

    def check_stepped(self) -> None:
        """Refuse parameters that were written in the place of ``step()``."""
        with self.lock:
            if self.round.is_written:
                raise UnsupportedConfigurationError(
                    "expected step() of the optimizers that DecoupledState was made with, got parameters that were "
                    "written without it after backward(); with owners='layers' only owners have gradients to step with"
                )

    def make_round_whole(self) -> None:
        """Do nothing: owners keep the mean until ``step()``."""


class OwnedTraining(DecoupledTraining):
    """One model and its optimizers, with owners; see `DecoupledTraining`.

    Args:
        optimizers: the user's.
        turn: taken before the owners' step, if there is one.
        group: the job's ranks.
    """

    def __init__(self, optimizers: Sequence[Optimizer], turn: Turn | None, group: dist.ProcessGroup) -> None:
        each = [owned_optimizer(optimizer) for optimizer in optimizers]
        self.owned = OwnedOptimizers(each, group.rank(), group.size())
        self._rank, self._world_size = group.rank(), group.size()
        self._owned_updates = OwnedUpdates(self.owned.each[0].partial)
        self._dropped: set[int] = set()
        self._skipped = 0
        self._failure: Exception | None = None
        super().__init__(optimizers, turn, always=True, updates=self._owned_updates)
        self._hooks.enter_context(self.owned.kept.hooks)

    def said(self) -> dict[str, object]:
        """Return what all ranks must have in common."""
        return {
            "parameters in the optimizers": [
                (
                    type(each.optimizer).__name__,
                    type(each).__name__,
                    [tuple(p.shape) for p in each.parameters],
                )
                for each in self.owned.each
            ],
            "owners of the parameters": self.owned.owners,
        }

    # --- the state's methods ---------------------------------------------------------------------------------

    def consolidate(self, group: dist.ProcessGroup, to: int | None) -> None:
        """See `DecoupledState.consolidate`. **Collective**."""
        self.flush()
        self.owned.kept.consolidate(group, to)

    def memory_usage(self) -> dict[str, int]:
        """Return bytes: "state" of the optimizers, "buffers" of what is under way."""
        under_way = [*self.updates.round.shares, *dict.fromkeys(self.updates.stale.values())]
        return {
            "state": self.owned.kept.nbytes,
            "buffers": sum(cast(OwnedShare, share).travelling_bytes for share in under_way),
        }

    def close(self) -> None:
        """See `DecoupledState.close`."""
        if not self._closed:
            self.owned.kept.check_whole()
        super().close()

    # --- the hook --------------------------------------------------------------------------------------------

    def _take(
        self, state: object, process_group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        round_ = self.updates.round
        if round_.shares and not round_.is_open and not self._closed:
            if (failure := self._failure) is not None:
                raise UnsupportedConfigurationError(
                    "expected step() of this rank's own parameters to end, got a second backward() after "
                    f"{type(failure).__name__}: {failure}; other ranks wait for what it has not sent: restart the job"
                ) from failure
            raise UnsupportedConfigurationError(
                "expected step() between two exchanges, got a second backward() without it; accumulate gradients in "
                "model.no_sync(), or drop them by zero_grad() of all optimizers if the step is to be skipped"
            )
        if not round_.is_open:
            self._dropped.clear()
        return super()._take(state, process_group, bucket)

    def _checked_parameters(self, bucket: dist.GradBucket, state: object) -> list[torch.Tensor]:
        parameters = super()._checked_parameters(bucket, state)
        new = [p for p in parameters if id(p) not in self.owned.owner_of]
        if new:
            raise UnsupportedConfigurationError(
                f"expected the parameters that the optimizers had when the state was made, got {len(new)} more, of "
                "shape "
                f"{tuple(new[0].shape)} the first; after add_param_group() make the state and its DDP model anew"
            )
        return parameters

    def _defer(
        self,
        bucket: dist.GradBucket,
        parameters: list[torch.Tensor],
        process_group: dist.ProcessGroup,
        state: object,
    ) -> Share:
        packed = pack(bucket, self.owned, self._world_size)
        taken = Exchange.of(process_group).carry(
            bucket, lambda _, link: summed(packed, link), turn=self._turn, state=state, hands_back=True
        )
        views = packed.gradients if copies_gradients(self.model()) else None
        return OwnedShare(
            taken,
            parameters,
            bucket.buffer(),
            len(self.updates.round.shares),
            views,
            packed=packed,
            owner_of=self.owned.owner_of,
            rank=self._rank,
        )

    # --- around forward --------------------------------------------------------------------------------------

    def _before_forward(self, *args: Any) -> None:
        if self._owned_updates.plans:
            self._owned_updates.plans.clear()
            raise UnsupportedConfigurationError(
                "expected step() of all optimizers between backward() and the next forward, got only some that have "
                "stepped; call all of them, or give the model's parameters to one"
            )
        self._forget_dropped()
        if (model := self.model()) is not None:
            check_not_joined(model, "a rank without data takes no step, and so updates nothing that it owns")
        super()._before_forward(*args)

    def _forget_dropped(self) -> None:
        """Let a step go that is not going to be taken: its gradients were dropped."""
        round_ = self.updates.round
        if round_.is_open or not round_.shares:
            return
        parameters = [p for share in round_.shares for p in share.parameters]
        numbers = {self.owned.number_of[id(p)] for p in parameters}
        if numbers <= self._dropped or all(p.grad is None for p in parameters):
            shares, round_.shares = cast(list[OwnedShare], round_.shares), []
            self.updates.lower_guards()
            for share in shares:
                with contextlib.suppress(ExchangeError):  # final: the next backward pass tells it
                    share.bucket.wait_for_sum()  # its memory goes
                if not round_.is_broken:  # else a refused backward has added to it
                    share.check_dropped()
            self._skipped += 1
            if self._skipped == _SKIPPED_STEPS_TO_WARN:
                logger.warning(
                    "%d steps in a row were skipped: with owners='layers' gradients are NaN until step(), whatever "
                    "they are on their owners; who skips steps for that never trains: ask state.clip_grad_norm_",
                    self._skipped,
                )

    # --- the optimizers --------------------------------------------------------------------------------------

    def _zeroed(self, number: int) -> None:
        """Note that an optimizer has no gradients any more."""
        self._dropped.add(number)
        self._forget_dropped()

    def _stepped(self, number: int, original: Callable[[], Any]) -> Any:
        """The user calls ``step()`` of an optimizer."""
        try:
            with self.updates.lock:
                result = self._step_of(number, original)
        except Exception as error:
            self._failure = error
            raise
        self._failure = None
        return result

    def _step_of(self, number: int, original: Callable[[], Any]) -> Any:
        updates, round_, owned = self.updates, self.updates.round, self.owned.each[number]
        updates.update_all()
        self._guard_groups()
        if self._closed:
            return original()
        plans = self._owned_updates.plans
        if not plans:
            self.owned.kept.check_foreign()
            round_.collect(self.optimizers, self._known)
        if not round_.shares:
            if not self.owned.kept.only_makes_state(owned.optimizer):
                _check_without_gradients(owned)
            return original()
        _check_plain(owned)
        owned.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler wants to see
        if number in plans:
            raise UnsupportedConfigurationError(
                f"expected step() of all optimizers once after each backward(), got a second one of "
                f"{type(owned.optimizer).__name__} before all had stepped; call each once, one after the other"
            )
        with updates.watch.unwatched():
            plans[number] = owned.partial.plan()
        needed = {
            self.owned.number_of[id(each.parameter)] for share in round_.shares for each in share.updates
        }
        if needed <= {*plans}:
            self._owned_updates.plans = {}
            self._update_owned(cast(list[OwnedShare], round_.shares), plans)
        return None

    def _update_owned(self, shares: list[OwnedShare], plans: dict[int, StepPlan]) -> None:
        """Take the step for what this rank owns, as the sums arrive; send what comes of it to the others."""
        assert self.exchange is not None
        if not self._has_turn:
            shares[0].bucket.wait_for_sum()  # there is something to compute
            self._take_turn()
        with as_in_step(shares[0].buffer.device.type), self.updates.watch.unwatched():
            for share in shares:
                share.receive()
                try:
                    for number, plan in plans.items():
                        own = [each for each in share.owned_updates(plan) if each.is_own]
                        self.owned.each[number].compute(plan, own)
                except Exception as error:
                    self.exchange.fail(_made_of(share), error)  # other ranks wait for it
                    raise
                share.clear()
                share.steps = [(self.owned.each[number], plan) for number, plan in plans.items()]
        self.owned.kept.stepped()
        self._skipped = 0
        # Forward needs first what backward has made last.
        for share in reversed(shares):
            back = share.packed.back
            share.gathered = self.exchange.begin(
                functools.partial(_brought_back, back),
                back.tensor.device,
                _made_of(share),
                deferred=True,
                link=share.bucket.link,
            )
        is_settled = self.updates.round.is_settled
        self.updates.defer(next(iter(plans.values())))
        if not is_settled:  # DDP may still rebuild its buckets
            self.updates.update_all()


def _made_of(share: OwnedShare) -> str:
    return f"what step() made of bucket {share.bucket.index}"


def _check_without_gradients(owned: OwnedOptimizer) -> None:
    if any(parameter.grad is not None for parameter in owned.parameters):
        raise UnsupportedConfigurationError(
            "expected a backward() with decoupled_hook before each step(), got gradients that were not exchanged, or "
            "whose step was taken; call step() once after each exchange, outside of no_sync()"
        )


def _check_plain(owned: OwnedOptimizer) -> None:
    if any(getattr(owned.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise UnsupportedConfigurationError(TOUCHED)
    if owned.partial.is_watched():
        raise UnsupportedConfigurationError(
            "expected no step hooks with owners='layers', got some (register_step_pre_hook, register_step_post_hook, a "
            "profiler's): parameters are not all updated when step() returns; remove them, or use owners=None"
        )
