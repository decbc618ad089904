"""Decoupled training with an owner for each parameter: it alone runs the optimizer on it, and the result travels.

[Note: owners of whole parameters] Whatever treats parameters one by one may run on one rank for all: SOAP and Shampoo
with their preconditioners, Muon, AdamW. A bucket is packed by owner and reduce-scattered during backward. In
``step()`` each rank takes the optimizers' own step for the parameters that it owns, as their sums arrive; the gather
brings the new values to everybody, while the next forward runs. Wire bytes are those of plain DDP; work and state are
divided by the number of ranks. Of torch's Muon directions travel instead, see below. Our design.

Owners update in ``step()`` itself, on the training thread: an optimizer and its schedulers are not made for two
threads, and forward needs first what was reduced last, so that little could run ahead.

[Note: two buffers] The gradients of a bucket are packed by owner into one buffer, which is summed. What owners send
back has places of its own where it is not as large: a direction of torch's Muon takes two bytes a number, in a second
buffer of the bucket's type. Without directions the same buffer goes both ways.

[Note: gradients that are withheld] Whatever looks at such a gradient must not take it for the mean. So it is NaN, a
signalling one: arithmetic makes an ordinary NaN of it, so that a change of it shows in its bits, even one that counts
no version, as those by GradScaler and through ``.data`` do not. Copies keep the bits.

[Note: directions in the next forward] The owner of a matrix keeps its momentum and computes its direction in
``step()``. The direction takes two bytes a number, as torch computes it, in the place of the new values. Each rank,
the owner too, applies it when it arrives, with the learning rate, weight decay and ``adjust_lr_fn`` of the moment at
which ``step()`` was called. Both halves are torch's own, see [Note: torch's own arithmetic]. Our design.

[Note: trial of owners] `check_separable` has compared whole steps with parts, on tiny parameters. An owner's step must
also do without the other ranks: an optimizer with collectives of its own would wait for ever. So it takes two steps on
a stand-in for each different parameter, of its real shape. There collectives are refused. What it keeps afterwards is
what the parameter costs: sides, preconditioners and limits of sizes are the optimizer's own affair. What depends on
the values of gradients, such as clipping that begins at a large norm, does not show here.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from crossover_ddp._ddp.checks import check_not_joined
from crossover_ddp._ddp.contents import contents_of, part_of, view_of
from crossover_ddp._engine.buckets import Bucket, Turn
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.kept import Kept, tensors_in
from crossover_ddp._owners.muon import (
    check_torch,
    direction_numel,
    direction_of,
    direction_view,
    momentum_in,
    put_momentum,
    take_step,
)
from crossover_ddp._owners.optimizer import Group, PartialOptimizer, StepPlan, Update, copy_on
from crossover_ddp._owners.packing import Item, Packing, packing
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .pending import Pending, Share, as_in_step, check_not_scaled

logger = logging.getLogger(__name__)

Pieces = Mapping[int, torch.Tensor]
"""By a parameter's id: what its owner sends of it."""

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")
_TRIED_STEPS: Final = 2
_SKIPPED_STEPS_TO_WARN: Final = 3
TOUCHED: Final = (
    "expected the gradients that backward() left, got gradients that were changed (by "
    "torch.nn.utils.clip_grad_norm_, GradScaler, p.grad.mul_): with owners='layers' they are NaN, and only a "
    "parameter's owner has its mean; use state.clip_grad_norm_ to clip, and bfloat16 instead of a GradScaler"
)


# By the gradient's type: the type of its bits, and their value.
_MARKS: Final = {
    torch.float16: (torch.int16, 0x7D00),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float32: (torch.int32, 0x7FA00000),
    torch.float64: (torch.int64, 0x7FF4000000000000),
}


def withhold(gradient: torch.Tensor) -> None:
    """Mark what owners alone have; counts no version."""
    bits, value = _MARKS[gradient.dtype]
    gradient.data.view(bits).fill_(value)


def is_computed_with(gradient: torch.Tensor) -> bool:
    """Tell whether somebody has changed a withheld gradient by arithmetic; dropping or zeroing it is none."""
    bits, value = _MARKS[gradient.dtype]
    return bool((gradient.isnan() & (gradient.view(bits) != value)).any())


class OwnedOptimizer:
    """One optimizer, whose step is taken for some of its parameters.

    Args:
        optimizer: the user's, with its own ``step``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        modes = [f"{name}()" for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
        if modes:
            raise UnsupportedConfigurationError(
                f"expected an optimizer without modes of its own, got {type(optimizer).__name__} with {modes}, which "
                "need the state of all parameters, where a rank keeps only its own; use owners=None"
            )
        self.optimizer = optimizer
        self.partial = PartialOptimizer(optimizer)
        self.costs = costs_of(optimizer)
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]

    def returning_numel(self, numel: int, itemsize: int) -> int:
        """Return how many elements of ``itemsize`` bytes come back for a parameter of ``numel``: its new values."""
        return numel

    def piece(self, flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return what comes back for a parameter, of the elements ``flat`` that it has in the buffer."""
        return view_of(flat, parameter)

    def compute(self, plan: StepPlan, own: Sequence[Update], pieces: Pieces) -> None:
        """Update owned parameters as ``plan`` says, and put their new values where they travel."""
        self.partial.apply(plan, own)
        for parameter, _ in own:
            pieces[id(parameter)].copy_(parameter)

    def take_over(
        self, plan: StepPlan, parameters: Sequence[torch.Tensor], pieces: Pieces, own: Collection[int]
    ) -> None:
        """Update parameters by what their owners have sent; ``plan``: of the step; ``own``: ids of this rank's."""
        others = [parameter for parameter in parameters if id(parameter) not in own]
        if others:
            torch._foreach_copy_(others, [pieces[id(parameter)] for parameter in others])


class OwnedMuon(OwnedOptimizer):
    """A ``torch.optim.Muon``, whose directions travel; see `OwnedOptimizer`."""

    def returning_numel(self, numel: int, itemsize: int) -> int:
        """Return how many elements of a buffer a direction takes; the last one may be used in part."""
        return direction_numel(numel, itemsize)

    def piece(self, flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return the direction of a matrix, in the order in memory that torch's has."""
        return direction_view(flat, parameter.shape)

    def compute(self, plan: StepPlan, own: Sequence[Update], pieces: Pieces) -> None:
        """Update the momentum of owned matrices, and put their directions where they travel."""
        for matrix, gradient in own:
            state: dict[str, Any] = self.optimizer.state[matrix]
            if (momentum := momentum_in(state)) is None:
                momentum = torch.zeros_like(gradient, memory_format=torch.preserve_format)
                put_momentum(state, momentum)
            pieces[id(matrix)].copy_(direction_of(gradient, momentum, momentum, _group(plan, matrix)))

    def take_over(
        self, plan: StepPlan, parameters: Sequence[torch.Tensor], pieces: Pieces, own: Collection[int]
    ) -> None:
        """Apply directions, to owned matrices as to others."""
        for matrix in parameters:
            take_step(matrix, pieces[id(matrix)], _group(plan, matrix))


def owned_optimizer(optimizer: Optimizer) -> OwnedOptimizer:
    """Return how ``optimizer`` runs on owners: directions travel of torch's Muon itself, and of no class made of it.

    Raises ``UnsupportedConfigurationError`` for a Muon of a torch whose step has other halves.
    """
    if type(optimizer) is not Muon or not PartialOptimizer(optimizer).runs(Muon.step):
        return OwnedOptimizer(optimizer)
    check_torch()
    return OwnedMuon(optimizer)


def _group(plan: StepPlan, matrix: torch.Tensor) -> Group:
    return plan.groups[plan.group_of[id(matrix)]]


class Owners:
    """Several optimizers of a model; every parameter has an owner, which alone updates it and keeps what that needs.

    Args:
        optimizers: the user's; each has other parameters.
        group: the job's ranks.
        pending: what is under way.
        take_turn: called before this rank computes, with what waits until there is something to compute.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        group: dist.ProcessGroup,
        pending: Pending,
        take_turn: Callable[[Callable[[], None]], None],
    ) -> None:
        self.each = [owned_optimizer(optimizer) for optimizer in optimizers]
        self.rank, self.size = group.rank(), group.size()
        parameters = [p for owned in self.each for p in owned.parameters]
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            raise UnsupportedConfigurationError(
                "expected each parameter in one optimizer, got one that is in several; give it to one of them"
            )
        if any(parameter.is_complex() for parameter in parameters):
            raise UnsupportedConfigurationError(
                "expected real parameters for owners='layers', got complex ones; use owners=None"
            )
        self.ranks = assign([cost for owned in self.each for cost in owned.costs], self.size).owners
        self.owner_of = {id(p): owner for p, owner in zip(parameters, self.ranks, strict=True)}
        self.number_of = {id(p): number for number, owned in enumerate(self.each) for p in owned.parameters}
        self.kept = Kept(optimizers, self.owner_of, self.rank)
        self._group, self._pending, self._take_turn = group, pending, take_turn
        self._packings: dict[tuple[int, ...], Packing] = {}
        self._dropped: set[int] = set()
        self._skipped = 0
        self._failure: Exception | None = None

    def of(self, parameter: torch.Tensor) -> OwnedOptimizer:
        """Return the optimizer that has a parameter."""
        return self.each[self.number_of[id(parameter)]]

    def said(self) -> dict[str, object]:
        """Return what all ranks must have in common."""
        return {
            "parameters in the optimizers": [
                (
                    type(each.optimizer).__name__,
                    type(each).__name__,
                    [tuple(p.shape) for p in each.parameters],
                )
                for each in self.each
            ],
            "owners of the parameters": self.ranks,
        }

    def memory_usage(self) -> dict[str, int]:
        """Return bytes: "state" of the optimizers, "buffers" of what is under way."""
        under_way = _owned([*self._pending.shares, *dict.fromkeys(self._pending.stale.values())])
        buffers = {id(each): each.nbytes for share in under_way for each in (share.there, share.back)}
        return {"state": self.kept.nbytes, "buffers": sum(buffers.values())}

    # --- backward and forward --------------------------------------------------------------------------------

    def check_stepped(self) -> None:
        """Refuse a second backward pass without a step; call it before each bucket."""
        if self._pending.is_open:
            return
        self._dropped.clear()
        if (failure := self._failure) is not None:
            raise UnsupportedConfigurationError(
                "expected step() of this rank's own parameters to end, got a second backward() after "
                f"{type(failure).__name__}: {failure}; other ranks wait for what it has not sent: restart the job"
            ) from failure
        if self._pending.shares:
            raise UnsupportedConfigurationError(
                "expected step() between two exchanges, got a second backward() without it; accumulate gradients in "
                "model.no_sync(), or drop them by zero_grad() of all optimizers if the step is to be skipped"
            )

    def _packing_of(self, bucket: dist.GradBucket) -> Packing:
        """Return where the bucket's parameters lie by owner; looked at once in a bucket's life."""
        parameters, buffer = bucket.parameters(), bucket.buffer()
        key = tuple([*map(id, parameters)])
        if (found := self._packings.get(key)) is None:
            contents_of(bucket, buffer)  # refuses a layout that is not known
            if any(each.dtype != buffer.dtype for each in parameters):
                raise UnsupportedConfigurationError(
                    f"expected gradients of the parameters' own type, got {buffer.dtype} ones; updated parameters "
                    "travel in their place: use owners=None"
                )
            items = [
                Item(
                    self.owner_of[id(each)],
                    each.numel(),
                    self.of(each).returning_numel(each.numel(), buffer.itemsize),
                )
                for each in parameters
            ]
            found = self._packings[key] = packing(self.size, tuple(items))
        return found

    @torch.no_grad()
    def send(
        self,
        bucket: dist.GradBucket,
        parameters: list[torch.Tensor],
        *,
        state: object,
        turn: Turn | None,
        copies: bool,
    ) -> "OwnedShare":
        """Send a bucket's gradients to their owners, and withhold them in the bucket.

        Its journey ends there, and passes no gate: ``step()`` begins the way back on the same link, see `_update`.
        ``copies``: DDP copies gradients out of its bucket.
        """
        buffer, plan = bucket.buffer(), self._packing_of(bucket)
        there = buffer.new_empty(sum(plan.there))
        # No piece is larger than its gradient: as many elements in all means as many of each.
        back = there if sum(plan.back) == sum(plan.there) else buffer.new_empty(sum(plan.back))
        places = [part_of(there, place.there) for place in plan.items]
        torch._foreach_copy_(places, buffer.split([p.numel() for p in parameters]))
        withhold(buffer)
        placed = [*zip(parameters, plan.items, places, strict=True)]

        async def summed(_: Bucket, link: Link) -> None:
            await link.reduce_scatter(there, plan.there)

        taken = Exchange.of(self._group).carry(bucket, summed, turn=turn, state=state, hands_back=True)
        return OwnedShare(
            taken,
            parameters,
            {} if copies else None,  # `land` copies none
            there=there,
            back=back,
            layout=plan.back,
            gradients={id(p): view_of(own, p) for p, place, own in placed if place.owner == self.rank},
            pieces={id(p): self.of(p).piece(part_of(back, place.back), p) for p, place, _ in placed},
        )

    def before_forward(self, model: DistributedDataParallel | None) -> None:
        """Refuse a forward that some optimizers have not stepped for; let a step go whose gradients were dropped."""
        if self._pending.plans:
            self._pending.plans.clear()
            raise UnsupportedConfigurationError(
                "expected step() of all optimizers between backward() and the next forward, got only some that have "
                "stepped; call all of them, or give the model's parameters to one"
            )
        self._forget_dropped()
        if model is not None:
            check_not_joined(model, "a rank without data takes no step, and so updates nothing that it owns")

    def drop(self, number: int) -> None:
        """Note that an optimizer has no gradients any more."""
        self._dropped.add(number)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Let a step go that is not going to be taken: its gradients were dropped."""
        pending = self._pending
        if pending.is_open or not pending.shares:
            return
        parameters = [p for share in pending.shares for p in share.parameters]
        numbers = {self.number_of[id(p)] for p in parameters}
        if numbers <= self._dropped or all(p.grad is None for p in parameters):
            shares, pending.shares = _owned(pending.shares), []
            pending.lower_guards()
            for share in shares:
                with contextlib.suppress(ExchangeError):  # final: the next backward pass tells it
                    share.bucket.wait_for_sum()  # its memory goes
                if not pending.is_broken:  # else a refused backward has added to it
                    share.check_dropped()
            self._skipped += 1
            if self._skipped == _SKIPPED_STEPS_TO_WARN:
                logger.warning(
                    "%d steps in a row were skipped: with owners='layers' gradients are NaN until step(), "
                    "finite or not; a loop that skips such steps never trains: look at what state.clip_grad_norm_ says",
                    self._skipped,
                )

    # --- step() ----------------------------------------------------------------------------------------------

    def step(self, number: int, original: Callable[[], Any]) -> Any:
        """The user calls ``step()`` of an optimizer; what it does is done when the last one has stepped."""
        pending, owned = self._pending, self.each[number]
        plans = pending.plans
        if not plans:
            self.kept.check_foreign()
            pending.collect()
        if not pending.shares:
            if not self.kept.only_makes_state(owned.optimizer):
                _check_without_gradients(owned)
            return original()
        check_not_scaled(owned.optimizer, TOUCHED)
        if owned.partial.is_watched():
            raise UnsupportedConfigurationError(
                "expected no step hooks with owners='layers', got some (register_step_pre_hook, "
                "register_step_post_hook, a profiler's): parameters are not all updated when step() returns; remove "
                "them, or use owners=None"
            )
        if number in plans:
            raise UnsupportedConfigurationError(
                f"expected step() of all optimizers once after each backward(), got a second one of "
                f"{type(owned.optimizer).__name__} before all had stepped; call each once, one after the other"
            )
        with pending.unwatched():
            plans[number] = owned.partial.plan()
        updates = [update for share in pending.shares for update in share.updates]
        if {self.number_of[id(update.parameter)] for update in updates} <= {*plans}:
            pending.plans = {}
            self._update(_owned(pending.shares), plans)
        return None

    def _update(self, shares: list["OwnedShare"], plans: dict[int, StepPlan]) -> None:
        """Take the step for what this rank owns, as the sums arrive; send what comes of it to the others."""
        exchange = Exchange.of(self._group)
        self._take_turn(shares[0].bucket.wait_for_sum)
        with as_in_step(shares[0].bucket.flat.device.type), self._pending.unwatched():
            for share in shares:
                try:
                    share.receive()
                    for number, plan in plans.items():
                        self.each[number].compute(plan, share.own_updates(plan), share.pieces)
                except Exception as error:
                    self._failure = error
                    exchange.fail(share.made, error)  # other ranks wait for it
                    raise
                share.clear()
        self.kept.stepped()
        self._skipped = 0
        # Forward needs first what backward has made last.
        for share in reversed(shares):
            share.arriving = exchange.begin(
                share.bring_back,
                share.bucket.flat.device,
                share.made,
                deferred=True,
                link=share.bucket.link,
                meter=share.bucket.meter,
            )

        def take_over(share: Share) -> None:
            pieces, own = cast(OwnedShare, share).pieces, cast(OwnedShare, share).gradients
            for number, plan in plans.items():
                parameters = [p for p, _ in share.updates if id(p) in plan.group_of]
                self.each[number].take_over(plan, parameters, pieces, own)

        self._pending.defer(take_over)
        if not self._pending.is_settled:  # DDP may still rebuild its buckets
            self._pending.update_all()


def _owned(shares: Sequence[Share]) -> list["OwnedShare"]:
    return cast(list["OwnedShare"], shares)


def _check_without_gradients(owned: OwnedOptimizer) -> None:
    if any(parameter.grad is not None for parameter in owned.parameters):
        raise UnsupportedConfigurationError(
            "expected a backward() with decoupled_hook before each step(), got gradients that were not exchanged, or "
            "whose step was taken; call step() once after each exchange, outside of no_sync()"
        )


@dataclass(eq=False, slots=True, kw_only=True)
class OwnedShare(Share):
    """A bucket of one step; see `Share`.

    Args:
        there: what is summed, see [Note: two buffers].
        back: what owners send; the same buffer where new values travel.
        layout: of ``back``.
        gradients: by the parameter's id, in ``there``, of what this rank owns.
        pieces: what comes back of it, in ``back``.
    """

    changed: ClassVar[str] = TOUCHED  # see [Note: gradients that are withheld]
    there: torch.Tensor
    back: torch.Tensor
    layout: tuple[int, ...]
    gradients: Pieces
    pieces: Pieces

    @property
    def made(self) -> str:
        """Name of what comes back, in errors."""
        return f"what step() made of bucket {self.bucket.index}"

    def receive(self) -> None:
        """Wait for the mean, scale it, and put it where the optimizers of this rank, if it is the owner, see it.

        The mean goes where plain DDP would leave it: sums over matrices may depend on where these begin in memory.
        """
        self.bucket.wait_for_sum()
        own, factor, self.factor = self._own(), self.factor, None
        if factor is not None:
            for _, mean in own:
                mean.mul_(factor)
        if own:
            seen = [gradient.data for (_, gradient), _ in own]  # counts no version
            torch._foreach_copy_(seen, [mean for _, mean in own])

    async def bring_back(self, link: Link) -> None:
        """Bring what owners have made of it to all."""
        await link.all_gather(self.back, self.layout)

    def own_updates(self, plan: StepPlan) -> list[Update]:
        """Return those of ``plan`` that this rank owns; the optimizer may reuse the gradients' memory."""
        # An alias: what the optimizer does to it is not the user's doing, see [Note: versions].
        return [Update(p, gradient.data) for (p, gradient), _ in self._own() if id(p) in plan.group_of]

    def clear(self) -> None:
        """Withhold the mean of owned parameters again."""
        for (_, gradient), _ in self._own():
            withhold(gradient)

    def check_dropped(self) -> None:
        """Refuse to drop a step whose gradients somebody has computed with: he may skip all for what he saw."""
        if any([is_computed_with(gradient) for gradient in self._sealed()]):
            raise UnsupportedConfigurationError(TOUCHED)

    def _own(self) -> list[tuple[Update, torch.Tensor]]:
        """Return the updates that this rank owns, each with its mean as it has arrived."""
        means = self.gradients
        return [(each, means[id(each.parameter)]) for each in self.updates if id(each.parameter) in means]

    # --- as of `Share` ---------------------------------------------------------------------------------------

    def land(self) -> None:
        """Leave gradients as they are: nobody but the owner has the mean."""

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the mean gradients that this rank owns."""
        self.bucket.wait_for_sum()
        for _, mean in self._own():
            yield mean


def costs_of(optimizer: Optimizer) -> list[int]:
    """Return the bytes that each parameter costs, in the order of the groups; raise if it cannot run on owners alone.

    A parameter costs itself and what the optimizer keeps of it; a frozen one nothing.

    Not collective; takes the time of two steps on one parameter of each shape.
    """
    known: dict[object, int] = {}
    costs = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if not parameter.requires_grad:
                costs.append(0)
                continue
            if key not in known:
                known[key] = _tried_alone(optimizer, group, parameter)
            costs.append(known[key])
    return costs


class _NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise _CollectiveError(str(func))
        return func(*args, **(kwargs or {}))


class _CollectiveError(Exception):
    """An optimizer talks to other ranks."""


def _tried_alone(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    stand_in = _wave(parameter, 0).requires_grad_()
    tried = copy_on(optimizer, [(group, [stand_in])])
    if optimizer.state.get(parameter):
        tried.state[stand_in] = copy.deepcopy(optimizer.state[parameter])
    partial = PartialOptimizer(tried)
    try:
        with torch.random.fork_rng(), _NoCollectives():  # type: ignore[no-untyped-call]
            for step in range(_TRIED_STEPS):
                partial.apply(partial.plan(), [Update(stand_in, _wave(parameter, step + 1))])
    except _CollectiveError as error:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that leaves the exchange to the hook, got {type(optimizer).__name__}, whose step() "
            f"calls {error} itself; pass the optimizer that it was made from, for one process"
        ) from None
    except Exception as error:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that works on one parameter alone, got {type(optimizer).__name__}, which failed on "
            f"one of shape {tuple(parameter.shape)} ({type(error).__name__}: {error}); use owners=None, or another hook"
        ) from error
    return parameter.nbytes + sum(each.nbytes for each in tensors_in(tried.state.get(stand_in, {})))


def _wave(like: torch.Tensor, phase: int) -> torch.Tensor:
    """Return numbers between -1 and 1, of the shape, type and order in memory of ``like``."""
    made = torch.empty_like(like, requires_grad=False)
    numbers = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    return made.copy_(torch.sin(0.7 * numbers + phase).view(like.shape))
