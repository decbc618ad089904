"""Decoupled training with an owner for each parameter: it alone runs the optimizer on it, and the result travels.

[Note: owners of whole parameters] Whatever treats parameters one by one may run on one rank for all: SOAP and Shampoo
with their preconditioners, Muon, AdamW. A bucket is packed by owner and reduce-scattered during backward. In
``step()`` each rank takes the optimizers' own step for the parameters that it owns, as their sums arrive; the gather
brings the new values to everybody, while the next forward runs. Wire bytes are those of plain DDP; work and state are
divided by the number of ranks. Our design.

Owners update in ``step()`` itself, on the training thread: an optimizer and its schedulers are not made for two
threads, and forward needs first what was reduced last, so that little could run ahead.

[Note: gradients that are withheld] Whatever looks at such a gradient must not take it for the mean. So it is NaN, a
signalling one: arithmetic makes an ordinary NaN of it, so that a change of it shows in its bits, even one that counts
no version, as those by GradScaler and through ``.data`` do not. Copies keep the bits.

[Note: trial of owners] `check_separable` has compared whole steps with parts, on tiny parameters. An owner's step must
also do without the other ranks: an optimizer with collectives of its own would wait for ever. So it takes two steps on
a stand-in for each different parameter, of its real shape. There collectives are refused. What it keeps afterwards is
what the parameter costs: sides, preconditioners and limits of sizes are the optimizer's own affair. What depends on
the values of gradients, such as clipping that begins at a large norm, does not show here.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from crossover_ddp._ddp.checks import check_not_joined
from crossover_ddp._ddp.contents import contents_of, part_of, view_of
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, Turn
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.optimizer import (
    Group,
    PartialOptimizer,
    StepPlan,
    Update,
    check_unhooked,
    copy_on,
)
from crossover_ddp._owners.owned_state import OwnedState, tensors_in
from crossover_ddp._owners.packing import Item, Packing, packing
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .pending import Pending, Share, as_in_step, check_not_scaled

logger = logging.getLogger(__name__)

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")
_TRIED_STEPS: Final = 2
_SKIPPED_STEPS_TO_WARN: Final = 3
TOUCHED: Final = (
    "expected the gradients that backward() left, got gradients that were changed (by "
    "torch.nn.utils.clip_grad_norm_, GradScaler, p.grad.mul_): with owners='layers' they are NaN, and only a "
    "parameter's owner has its mean; use state.clip_grad_norm_ to clip, and bfloat16 instead of a GradScaler"
)
UNOWNED: Final = (
    "expected step() of the optimizers that DecoupledState was made with, got parameters that were written without it, "
    "and gradients that were dropped (by another optimizer, a SAM step on exchanged gradients, or p -= lr * p.grad): "
    "with owners='layers' gradients are NaN, and only a parameter's owner has its mean. Restore the parameters from a "
    "checkpoint; to train with another optimizer wrap the model again, with a DecoupledState of it; for SAM keep the "
    "first pass in model.no_sync(), or use owners=None"
)
UNEXCHANGED: Final = (
    "expected the gradients that backward() left, got others in their place: either p.grad was replaced, which "
    "owners='layers' does not allow, or model.require_backward_grad_sync was changed between forward and backward, so "
    "that this backward() was not exchanged; set it before forward, or use model.no_sync()"
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


class Owners:
    """Several optimizers of a model; every parameter has an owner, which alone updates it and keeps what that needs.

    ``take_turn``: called before this rank computes, with what waits until there is something to compute.
    """

    def __init__(
        self,
        partials: Sequence[PartialOptimizer],
        group: dist.ProcessGroup,
        pending: Pending,
        take_turn: Callable[[Callable[[], None]], None],
    ) -> None:
        optimizers = [each.optimizer for each in partials]
        costs = [cost for each in optimizers for cost in costs_of(each)]
        parameters = pending.parameters()
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            raise UnsupportedConfigurationError(
                "expected each parameter in one optimizer, got one that is in several; give it to one of them"
            )
        if any(parameter.is_complex() for parameter in parameters):
            raise UnsupportedConfigurationError(
                "expected real parameters for owners='layers', got complex ones; use owners=None"
            )
        self.rank, self.size = group.rank(), group.size()
        self.ranks = assign(costs, self.size).owners
        self.owner_of = {id(p): owner for p, owner in zip(parameters, self.ranks, strict=True)}
        self.number_of = {id(p): n for n in range(len(optimizers)) for p in pending.parameters(n)}
        self.owned_state = OwnedState(optimizers, self.owner_of, self.rank)
        self._partials = partials
        # What all ranks must have in common; groups may be added later.
        shapes = [[tuple(p.shape) for p in pending.parameters(n)] for n in range(len(optimizers))]
        names = [type(each).__name__ for each in optimizers]
        self.said: dict[str, object] = {
            "parameters in the optimizers": [*zip(names, shapes, strict=True)],
            "owners of the parameters": self.ranks,
        }
        self._group, self._pending, self._take_turn = group, pending, take_turn
        self._packings: dict[tuple[int, ...], Packing] = {}
        self._dropped: set[int] = set()
        self._skipped = 0
        self._failure: BaseException | None = None

    def memory_usage(self) -> dict[str, int]:
        """Return bytes: "state" of the optimizers, "buffers" of what is under way."""
        under_way = _owned([*self._pending.shares, *dict.fromkeys(self._pending.stale.values())])
        return {
            "state": self.owned_state.nbytes,
            "buffers": sum(share.packed.nbytes for share in under_way),
        }

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

    @torch.no_grad()
    def send(
        self, bucket: dist.GradBucket, *, state: object, turn: Turn | None, copies: bool
    ) -> "OwnedShare":
        """Send a bucket's gradients to their owners, and withhold them in the bucket.

        Its journey ends there, and passes no gate: ``step()`` begins the way back on the same link, see `_update`.
        ``copies``: DDP copies gradients out of its bucket.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        key = tuple([*map(id, parameters)])
        if (plan := self._packings.get(key)) is None:  # looked at once in a bucket's life
            contents_of(bucket, buffer)  # refuses a layout that is not known
            if any(each.dtype != buffer.dtype for each in parameters):
                raise UnsupportedConfigurationError(
                    f"expected gradients of the parameters' own type, got {buffer.dtype} ones; updated parameters "
                    "travel in their place: use owners=None"
                )
            items = [
                Item(self.owner_of[id(each)], each.numel(), each.numel()) for each in parameters
            ]
            plan = self._packings[key] = packing(self.size, tuple(items))
        packed = buffer.new_empty(sum(plan.there))
        places = [part_of(packed, place.there) for place in plan.items]
        torch._foreach_copy_(places, buffer.split([p.numel() for p in parameters]))
        withhold(buffer)

        async def summed(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
            turn.release()
            await bucket.computed()
            await link.reduce_scatter(packed, plan.there)

        taken = Exchange.of(self._group).carry(
            bucket, summed, turn=turn, state=state, hands_back=True
        )
        return OwnedShare(
            taken,
            parameters,
            {} if copies else None,  # `land` copies none
            packed=packed,
            layout=plan.there,
            pieces={id(p): view_of(place, p) for p, place in zip(parameters, places, strict=True)},
            own={
                id(p)
                for p, place in zip(parameters, plan.items, strict=True)
                if place.owner == self.rank
            },
        )

    def before_forward(self, model: DistributedDataParallel | None) -> None:
        """Refuse a forward that some optimizers have not stepped for; let a step go whose gradients were dropped."""
        self._pending.check_all_stepped()
        self._forget_dropped()
        if model is not None:
            check_not_joined(
                model, "a rank without data takes no step, and so updates nothing that it owns"
            )

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
            plans, pending.plans = pending.plans, {}
            pending.guard()
            for share in shares:
                with contextlib.suppress(ExchangeError):  # final: the next backward pass raises it
                    share.bucket.own_sum.wait()  # its memory goes
            if not pending.is_broken:  # a refused backward has added to the gradients
                self._check_dropped(shares)
            if plans:
                names = [
                    type(self._partials[number].optimizer).__name__ for number in sorted(plans)
                ]
                raise UnsupportedConfigurationError(
                    "expected step() of all optimizers after each backward(), or of none, got gradients that were "
                    f"dropped after step() of {', '.join(names)} alone: owners update when all have stepped, so that "
                    "step is lost; call step() of all of them, or pass owners=None"
                )
            self._skipped += 1
            if self._skipped == _SKIPPED_STEPS_TO_WARN:
                logger.warning(
                    "%d steps in a row were skipped: with owners='layers' gradients are NaN until step(), "
                    "finite or not; a loop that skips such steps never trains: look at what state.clip_grad_norm_ says",
                    self._skipped,
                )

    def _check_dropped(self, shares: Sequence["OwnedShare"]) -> None:
        """Refuse to drop a step whose gradients, which are NaN, user code has used."""
        if any([share.is_written() for share in shares]):
            raise UnsupportedConfigurationError(UNOWNED)
        if any([is_computed_with(each) for share in shares for each in share.sealed()]):
            raise UnsupportedConfigurationError(
                TOUCHED
            )  # the user may be skipping steps because of the NaNs

    # --- step() ----------------------------------------------------------------------------------------------

    def step(self, number: int, original: Callable[[], Any]) -> Any:
        """The user calls ``step()`` of an optimizer; what it does is done when the last one has stepped."""
        pending, partial, plans = self._pending, self._partials[number], self._pending.plans
        if not plans:
            self._check_foreign()
            pending.collect()
        if not pending.shares:
            has_gradients = any(
                parameter.grad is not None for parameter in pending.parameters(number)
            )
            if has_gradients and not self.owned_state.only_makes_state(partial.optimizer):
                raise UnsupportedConfigurationError(
                    "expected a backward() with decoupled_hook before each step(), got gradients that were not "
                    "exchanged, or whose step was taken; call step() once after each exchange, outside of no_sync()"
                )
            return original()
        check_not_scaled(partial.optimizer, TOUCHED)
        check_unhooked(partial.optimizer)
        if number in plans:
            raise UnsupportedConfigurationError(
                f"expected step() of all optimizers once after each backward(), got a second one of "
                f"{type(partial.optimizer).__name__} before all had stepped; call each once, one after the other"
            )
        with pending.unwatched():
            plans[number] = partial.plan()
        updates = [update for share in pending.shares for update in share.updates]
        if {self.number_of[id(update.parameter)] for update in updates} <= {*plans}:
            pending.plans = {}
            self._update(_owned(pending.shares), plans)
        return None

    def _check_foreign(self) -> None:
        """Refuse what somebody else keeps in the optimizers for parameters of other ranks, as a Lookahead does."""
        for number, partial in enumerate(() if self.owned_state.is_whole else self._partials):
            for parameter in self._pending.parameters(number):
                owner, kept = (
                    self.owner_of.get(id(parameter)),
                    partial.optimizer.state.get(parameter),
                )
                if kept and owner not in (None, self.rank):
                    raise UnsupportedConfigurationError(
                        f"expected state of this rank's own parameters in {type(partial.optimizer).__name__}, got "
                        f"{sorted(kept)} of one that rank {owner} owns, which differs from rank to rank (a Lookahead "
                        "around it?); use owners=None"
                    )

    def _update(self, shares: list["OwnedShare"], plans: dict[int, StepPlan]) -> None:
        """Take the step for what this rank owns, as the sums arrive; send what comes of it to the others."""
        exchange = Exchange.of(self._group)
        self._take_turn(shares[0].bucket.own_sum.wait)
        with as_in_step(shares[0].bucket.flat.device.type), self._pending.unwatched():
            for share in shares:
                try:
                    own = share.receive()
                    for number, plan in plans.items():
                        updates = [each for each in own if id(each.parameter) in plan.group_of]
                        self._partials[number].apply(plan, updates)
                    for parameter, _ in own:
                        share.pieces[id(parameter)].copy_(parameter)
                except BaseException as error:  # Ctrl-C, too, after which a notebook goes on
                    self._failure, self._pending.is_broken = error, True
                    exchange.fail(share.made, error)  # other ranks wait for it
                    raise
                for _, gradient in own:
                    withhold(gradient)
        if self.owned_state.is_whole:
            self.owned_state.stepped()
        self._skipped = 0
        # Forward needs first what backward has made last.
        for share in reversed(shares):
            share.told = [p for p in share.parameters if self.number_of[id(p)] in plans]
            share.arriving = exchange.begin(
                share.bring_back,
                share.packed,
                share.made,
                deferred=True,
                link=share.bucket.link,
                meter=share.bucket.meter,
            )
        self._pending.defer(lambda share: cast(OwnedShare, share).take_over())
        if not self._pending.is_settled:  # DDP may still rebuild its buckets
            self._pending.update_all()


def _owned(shares: Sequence[Share]) -> list["OwnedShare"]:
    return cast(list["OwnedShare"], shares)


@dataclass(eq=False, slots=True, kw_only=True)
class OwnedShare(Share):
    """A bucket of one step; see `Share`.

    Args:
        packed: by owner: gradients, which are summed, and then what owners have made of their parameters.
        layout: of ``packed``.
        pieces: of ``packed``, by the parameter's id.
        own: ids of the parameters that this rank owns.
    """

    changed: ClassVar[str] = TOUCHED  # see [Note: gradients that are withheld]
    replaced: ClassVar[str] = UNEXCHANGED
    packed: torch.Tensor
    layout: tuple[int, ...]
    pieces: Mapping[int, torch.Tensor]
    own: set[int]

    @property
    def made(self) -> str:
        """Name of what comes back, in errors."""
        return f"what step() made of bucket {self.bucket.index}"

    def receive(self) -> list[Update]:
        """Wait for the mean, scale it, and put it where the optimizers of this rank, if it is the owner, see it.

        The mean goes where plain DDP would leave it: sums over matrices may depend on where these begin in memory.
        """
        # Aliases: what the optimizer does to them is not the user's doing, see [Note: versions].
        own = [Update(p, gradient.data) for p, gradient in self.updates if id(p) in self.own]
        means, factor, self.factor = [*self.own_pieces()], self.factor, None
        if factor is not None:
            for mean in means:
                mean.mul_(factor)
        if own:
            torch._foreach_copy_([gradient for _, gradient in own], means)
        return own

    def own_pieces(self) -> Iterator[torch.Tensor]:
        """Yield the mean gradients that this rank owns."""
        self.bucket.own_sum.wait()
        for parameter, _ in self.updates:
            if id(parameter) in self.own:
                yield self.pieces[id(parameter)]

    async def bring_back(self, link: Link) -> None:
        """Bring what owners have made of it to all."""
        await link.all_gather(self.packed, self.layout)

    def take_over(self) -> None:
        """Update parameters by what their owners have sent."""
        others = [parameter for parameter, _ in self.updates if id(parameter) not in self.own]
        if others:
            torch._foreach_copy_(others, [self.pieces[id(parameter)] for parameter in others])


def costs_of(optimizer: Optimizer) -> list[int]:
    """Return the bytes that each parameter costs, in the order of the groups; raise if it cannot run on owners alone.

    A parameter costs itself and what the optimizer keeps of it; a frozen one nothing.

    Not collective; takes the time of two steps on one parameter of each shape.
    """
    if modes := [
        f"{name}()" for name in ("train", "eval") if callable(getattr(optimizer, name, None))
    ]:
        raise UnsupportedConfigurationError(
            f"expected an optimizer without modes of its own, got {type(optimizer).__name__} with {modes}, which need "
            "the state of all parameters, where a rank keeps only its own; use owners=None"
        )
    known: dict[object, int] = {}
    costs = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if parameter.requires_grad and key not in known:
                known[key] = _tried_alone(optimizer, group, parameter)
            costs.append(known[key] if parameter.requires_grad else 0)
    return costs


class _NoCollectives(TorchDispatchMode):
    """Refuses an optimizer that talks to other ranks."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = type(optimizer).__name__

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise UnsupportedConfigurationError(
                f"expected an optimizer that leaves the exchange to the hook, got {self._name}, whose step() calls "
                f"{func} itself; pass the optimizer that it was made from, for one process"
            )
        return func(*args, **(kwargs or {}))


def _tried_alone(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> int:
    stand_in = _wave(parameter, 0).requires_grad_()
    tried = copy_on(optimizer, [(group, [stand_in])])
    if optimizer.state.get(parameter):
        tried.state[stand_in] = copy.deepcopy(optimizer.state[parameter])
    partial = PartialOptimizer(tried)
    try:
        with torch.random.fork_rng(), _NoCollectives(optimizer):
            for step in range(_TRIED_STEPS):
                partial.apply(partial.plan(), [Update(stand_in, _wave(parameter, step + 1))])
    except UnsupportedConfigurationError:
        raise
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
