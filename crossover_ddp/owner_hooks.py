"""Optimizers on owners: each parameter has one owner, which updates it for all ranks.

[Note: owners of whole parameters] If an optimizer treats each parameter by itself, one rank can
update a parameter for all ranks. SOAP and Shampoo with their preconditioners, Muon and AdamW are
such optimizers. Each bucket is packed by owner and reduce-scattered during backward. In ``step()``
each rank runs the optimizers' own step on the parameters that it owns, as their mean gradients
arrive. The gather brings the new values to all ranks while the next forward runs. The hook sends as
many bytes as plain DDP, and divides work and state by the number of ranks. With a codec it sends
fewer, see [Note: owners' updates] in ``_decoupled/owned.py``. Our design.

Owners update in ``step()`` itself, on the training thread, because optimizers and their schedulers
are not built for two threads. Little could run ahead anyway: the bucket that forward needs first is
the one that was reduced last.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._compression.codec import OwnersChoice, without_lossless
from crossover_ddp._compression.compression import Compression, ResidualState
from crossover_ddp._compression.lossless import LosslessLink, Traffic
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._decoupled.clipping import clip
from crossover_ddp._decoupled.owned import (
    OwnedBucket,
    OwnedPending,
    OwnedStep,
    PackedByOwner,
    Returns,
    withhold,
)
from crossover_ddp._decoupled.owner_costs import costs_of
from crossover_ddp._decoupled.pending import Phase, as_in_step, next_stage
from crossover_ddp._decoupled.state import DeferredState, check_optimizers, undeferred
from crossover_ddp._engine.buckets import (
    Bucket,
    JourneyTurn,
    contents_of,
    copy_parts,
    view_of,
)
from crossover_ddp._engine.exchange import Around, Exchange, run_hook
from crossover_ddp._engine.journeys import JourneyCoroutine
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.optimizer import PartialOptimizer, StepPlan, check_unhooked
from crossover_ddp._owners.owned_state import OwnedState, Owning
from crossover_ddp._owners.packing import Item, packing

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex

__all__ = ["OwnerState", "owner_hook"]

logger = logging.getLogger(__name__)


async def owned(bucket: Bucket, link: Link, turn: JourneyTurn, deferred: OwnedBucket) -> None:
    """Send gradients to the owners of their parameters, and updated parameters to all ranks.

    ``deferred.packed`` travels both ways, with one part per owner. The reduce-scatter runs while
    backward computes, ``step()`` waits for it and updates this rank's part, and the all-gather runs
    while the next forward computes.

    If a peer dies or the timeout passes, the ``await`` under way raises. That ends all exchange of
    the process group. The next call that waits for it raises the error: ``backward()``,
    ``step()``, or the first read of a parameter in forward.
    """
    turn.release()  # backward's compute is launched: a sibling may have the device
    await bucket.computed()
    # Afterwards this rank's part is the mean of the gradients of the parameters that it owns.
    own = await link.reduce_scatter(deferred.packed, deferred.layout)
    # Clipping and GradScaler ask for norms before step(), so all ranks get the sums of squares.
    await deferred.share_norms(own, link)
    # Suspend until step() of the model's last optimizer reaches this bucket, on the training
    # thread.
    step = await next_stage()
    # The updated parameters, or with a codec their changes, replace the gradients in this rank's
    # part.
    deferred.take_step(step)
    # Suspend until step() has updated all buckets. Then the last bucket goes first, because forward
    # needs its parameters first.
    await next_stage()
    await link.all_gather(deferred.packed, deferred.layout)
    # Suspend until a parameter of this bucket is first read. The thread that reads it runs the
    # rest. step() has acquired the turn, before it updated the first bucket.
    await next_stage()
    deferred.take_over()  # overwrites the other owners' parameters, or adds all changes


class OwnerState(DeferredState, ResidualState, Owning):
    """State of `owner_hook`: each parameter has an owner, which alone runs the optimizer on it.

    The owner keeps the optimizer state for its parameters. The second half of the exchange carries
    updated parameters instead of gradients. The hook sends as many bytes as plain DDP, and divides
    work and state by the number of ranks. Use it for SOAP, Shampoo, Muon and other optimizers that
    work on whole matrices, and for AdamW with less memory; see docs/owners.md. With one or two
    ranks the parameters equal those of plain DDP with the same optimizers, bit for bit. With more
    ranks they equal the result of applying the optimizers to the owner's sums.

    The training loop stays as it is. The last optimizer's ``step()`` updates this rank's own
    parameters. The other owners' parameters arrive in the next forward, just before they are first
    read.

    After ``backward()`` the gradients are NaN, since only the owner has the mean. Clip them with
    `clip_grad_norm_`; `flush` does not complete them. Call `checkpoint` on all ranks before
    ``optimizer.state_dict()``.

    With a codec, owners receive coded gradients and send coded changes of parameters, both with
    error feedback. All ranks, the owner included, add the decoded changes. So parameters are still
    the same on all ranks, but they differ from plain DDP's. `checkpoint` first adds the rest of the
    changes, which owners keep, to the parameters on all ranks. So nothing is lost.

    Args:
        optimizer: a torch optimizer that treats each parameter by itself, or a sequence of such
            optimizers. Together they must hold all parameters of the model.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        codec: a pair of codecs: for gradients on their way to owners, and for changes of parameters
            on their way back. One codec, such as ``Int8()``, is used for both ways.
            One-dimensional parameters travel exactly, and so do the first two steps and the two
            after a checkpoint. Parameters must be float32. With `Lossless`, alone or second in a
            pair, parameters return without a change of a bit. Default: no codec.
        mutex: the mutex for taking turns with sibling jobs. Owners update inside the turn. Default:
            no turns.
        loss_scale: only with ``codec``: the factor by which the loss is multiplied before
            ``backward()``, or a function that returns it, such as ``scaler.get_scale``. Default 1.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    On failure: like `DecoupledState`. ``TypeError`` for an object that is not a codec. If a step is
    skipped, the messages that other ranks sent to owners are lost, as with `CompressedState`.

    **Collective**: all ranks create the state, with optimizers that are built alike, and register
    the hook. If ``CROSSOVER_DISABLE=1`` is set before that, the hook is a plain all-reduce.

    Example::

        model = DistributedDataParallel(model, **OwnerState.ddp_options(model))
        model.register_comm_hook(OwnerState(optimizer), owner_hook)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: OwnersChoice | None = None,
        mutex: GPUMutex | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
    ) -> None:
        optimizers = check_optimizers(optimizer)
        self._partials = [PartialOptimizer(each) for each in optimizers]
        for each in self._partials:
            if not each.is_own:
                raise UnsupportedConfigurationError(
                    f"expected {type(each.optimizer).__name__}'s own step() where parameters have "
                    "owners, got one that something was put around, which owners would not call; "
                    "make the OwnerState first, or act after step()"
                )
        super().__init__(process_group, mutex, compare_replicas, model)
        coded, is_lossless = without_lossless(codec)
        # An owner keeps a part of a parameter's change, which has no loss scale.
        settings = {"has_work": True, "scales_rest": False, "codes_back": not is_lossless}
        self._use_codec(coded, loss_scale, **settings)
        self.codec = codec
        # The bytes of parameters that return without loss; None if they do not.
        self._lossless = Traffic() if is_lossless else None
        self.optimizer = optimizer
        pending = OwnedPending(optimizers, self._check, self._forward_turn)
        self._owned = pending
        # The owner of each parameter: in the order of the optimizers' groups, and by the
        # parameter's id.
        self._ranks: tuple[int, ...] | None = None
        self._owner_of: dict[int, int] = {}
        # Each optimizer's name, with the shapes of its parameters.
        self._contents: list[tuple[str, list[tuple[int, ...]]]] = []
        # The error that this rank's own step raised. Other ranks then wait for its parameters.
        self._failure: BaseException | None = None
        if not self.agreement.disabled:
            self._assign(optimizers)
        self._intercept(pending, on_state=None)

    def _assign(self, optimizers: Sequence[Optimizer]) -> None:
        """Choose the owners by the cost of their parameters, and set up their state."""
        parameters = self._owned.parameters()
        costs = [cost for each in optimizers for cost in costs_of(each)]
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            raise UnsupportedConfigurationError(
                "expected each parameter in one optimizer, got one that is in several; give it to "
                "one of them"
            )
        if any(parameter.is_complex() for parameter in parameters):
            raise UnsupportedConfigurationError(
                "expected real parameters for OwnerState, got complex ones; use DecoupledState"
            )
        for number, optimizer in enumerate(optimizers):
            shapes = [tuple(p.shape) for p in self._owned.parameters(number)]
            self._contents.append((type(optimizer).__name__, shapes))
        group = resolve_group(self.process_group)
        self._ranks = assign(costs, group.size()).owners
        self._owner_of = {id(p): rank for p, rank in zip(parameters, self._ranks, strict=True)}
        self._owned_state = OwnedState(optimizers, self._owner_of, group.rank())
        self._hooks.enter_context(self._owned_state.hooks)

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that all ranks must have in common."""
        return {
            "state": type(self).__name__,
            **super().fingerprint(bucket),
            "parameters in the optimizers": self._contents,
            "owners of the parameters": self._ranks,
        }

    # --- for users -----------------------------------------------------------------------------

    @property
    def owners(self) -> tuple[int, ...] | None:
        """The rank that owns each parameter, in the order of the optimizers' groups.

        It is None with ``CROSSOVER_DISABLE=1``.
        """
        return self._ranks

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, like ``torch.nn.utils.clip_grad_norm_``.

        For the 2-norm that function works as well, and gives the same result. For any other norm,
        call this one: the ranks then exchange one number for each parameter. Arguments, result and failures are
        those of `DecoupledState.clip_grad_norm_`.

        **Collective**: all ranks of the job.
        """
        if norm_type == 2.0:
            return super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        group = resolve_group(self.process_group)
        return clip(self._owned, group, max_norm, float(norm_type), error_if_nonfinite)

    def stats(self) -> dict[str, Any]:
        """Return the common statistics and those of deferring; see `DecoupledState.stats`.

        With a codec, they include "sent_bytes" and "residual_bytes". Not collective.
        """
        coded = None if self.compression is None else self.compression.stats()
        if self._lossless is not None:
            coded = self._lossless.stats(coded)
        return {**(coded or {}), **self._deferred_stats(codec=self.codec, coded=coded)}

    def memory_usage(self) -> dict[str, int]:
        """Return how many bytes this rank keeps.

        "state" counts the optimizers' state, and "buffers" counts the current step's exchange
        buffers. The dictionary is empty with ``CROSSOVER_DISABLE=1``. Not collective.
        """
        if self._owned_state is None:
            return {}
        under_way = {*self._owned.owned, *self._owned.owned_unread}
        return {
            "state": self._owned_state.nbytes,
            "buffers": sum(each.packed.nbytes for each in under_way),
        }

    def state_dict(self) -> dict[str, Any]:
        """Apply pending updates; return an empty dictionary, or with a codec this rank's residuals.

        These are the residuals of gradients. They do not contain the rest of the changes that this
        rank keeps as an owner. Call `checkpoint`, which adds it to the parameters, or `drain`
        before the last step. Otherwise it is lost, and a warning is logged. Not collective.
        """
        self.flush()
        if self.compression is None:
            return {}
        if self.compression.has_rest:
            logger.warning(
                "this state dict lacks the rest of coded changes of parameters, which owners keep; "
                "save checkpoint(), or call drain() before the step before"
            )
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, or of a checkpoint with or without a codec.

        On failure: ``ValueError`` for any other dictionary. Not collective.
        """
        # The first key was in state dicts of version 0.1.
        given = {key: value for key, value in state.items() if key != "forward_order"}
        if given or self.compression is not None:
            super().load_state_dict(given or {"residuals": {}, "loss_scale": None})

    def close(self) -> None:
        """Apply all updates, and release the optimizers and the model.

        Later steps work like those of the split hook. Not collective, but call `checkpoint` on all
        ranks first. It is safe to call more than once.

        On failure: ``UnsupportedConfigurationError`` if this rank would keep only a part of the
        optimizers' state.
        """
        if self._owned_state is not None and self._owned.phase is not Phase.CLOSED:
            self._owned_state.check_whole()
        super().close()

    def _finish(self) -> None:
        self.flush()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        self.flush()
        if self.compression is not None:
            self._add_rest(self.compression)
        ResidualState._bring_together(self, optimizers, to)
        Owning._bring_together(self, optimizers, to)

    def _add_rest(self, compression: Compression) -> None:
        """Add the rest of changes, which owners keep, to all ranks' parameters. **Collective**."""
        exchange = Exchange.of(self.process_group)
        with torch.no_grad(), self._owned.unwatched():
            for parameter, rest in compression.gather_rest(exchange):
                parameter.add_(view_of(rest, parameter))

    # --- backward ------------------------------------------------------------------------------

    def _trained(self) -> set[int]:
        """Return the ids of the parameters that got an owner when the state was created."""
        return {*self._owner_of}

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``. Raises if it cannot be exchanged."""
        pending = self._owned
        if pending.phase is Phase.CLOSED:
            return exchange.send(bucket, undeferred, state=self).future
        if self._failure is not None:
            raise UnsupportedConfigurationError(
                f"step() of this rank's own parameters raised {type(self._failure).__name__}: "
                f"{self._failure}; other ranks wait for its parameters: restart the job"
            ) from self._failure
        pending.check_backward()
        pending.begin_with(exchange, bucket)
        deferred: OwnedBucket
        around = None

        # With a codec, the codec packs the bucket; otherwise making its journey does.
        @functools.cache
        def pack() -> PackedByOwner:
            return self._packed(bucket, exchange.size)

        def make(taken: Bucket, link: Link, turn: JourneyTurn) -> JourneyCoroutine:
            nonlocal deferred
            deferred = self._deferred(pack(), bucket.buffer(), taken)
            return deferred.travel(functools.partial(owned, taken, link, turn, deferred))

        if self.compression is not None:
            around = self.compression.around(bucket, exchange, pack)
        if self._lossless is not None and exchange.size > 1:
            around = self._around(self._lossless, bucket, exchange, around)
        taken = exchange.send(
            bucket, make, turn=self._turn, state=self, around=around, hands_back=True
        )
        pending.hand_back(deferred)
        return taken.future

    @torch.no_grad()
    def _packed(self, bucket: dist.GradBucket, world_size: int) -> PackedByOwner:
        """Pack a bucket's gradients by owner."""
        buffer = bucket.buffer()
        contents = contents_of(bucket, buffer)
        parameters = [each.parameter for each in contents]
        if any(each.dtype != buffer.dtype for each in parameters):
            raise UnsupportedConfigurationError(
                f"expected gradients of the parameters' own type, got {buffer.dtype} ones; updated "
                "parameters travel in their place: use DecoupledState"
            )
        items = [Item(self._owner_of[id(p)], p.numel(), p.numel()) for p in parameters]
        plan = packing(world_size, tuple(items))
        packed = buffer.new_empty(sum(plan.there))
        placed = [*zip(contents, plan.items, strict=True)]
        copy_parts(buffer, packed, [(each.span, place.there) for each, place in placed])
        return PackedByOwner(packed, plan.there, placed)

    @torch.no_grad()
    def _deferred(self, packed: PackedByOwner, buffer: torch.Tensor, bucket: Bucket) -> OwnedBucket:
        """Return the bucket that travels, and withhold its gradients from DDP's own buffer."""
        withhold(buffer)
        model = self._owned.model()
        parameters = [each.parameter for each, _ in packed.placed]
        return OwnedBucket(
            bucket,
            self._owned.gradients.cuts(parameters, buffer, bucket.layout),
            self._owned.begin_sums(),
            self._owned.gradients,
            # If DDP copies gradients out of its bucket, this is empty, and none is copied back.
            None if model is not None and model.gradient_as_bucket_view else {},
            packed=packed.flat,
            layout=packed.layout,
            pieces=packed.pieces(),
            own=packed.owned_by(bucket.link.rank),
            returns=self._returns(bucket.link),
        )

    def _returns(self, link: Link) -> Returns:
        if link.size == 1 or self.codec is None:  # a single rank sends nothing
            return Returns.PARAMETERS
        return Returns.CHANGES if self._lossless is None else Returns.BITS

    def _around(
        self, traffic: Traffic, bucket: dist.GradBucket, exchange: Exchange, coded: Around | None
    ) -> Around:
        """Return a function that wraps a link, so that parameters return without loss.

        Args:
            traffic: counts the bytes.
            bucket: the bucket. Raises if it cannot return like this.
            exchange: the exchange of its group.
            coded: a function that wraps the link in a codec for gradients, or None.
        """
        device = bucket.buffer().device
        if device.type != "cpu" or exchange.networks[device].in_program_order:
            raise UnsupportedConfigurationError(
                f"expected CPU tensors over gloo with Lossless(), got tensors on {device}: it "
                "compresses on the host; use Half() or Int8() for the way back, or no codec"
            )
        return lambda link: LosslessLink(link if coded is None else coded(link), traffic)

    # --- step() --------------------------------------------------------------------------------

    def _step(self, number: int, original: Callable[[], Any]) -> Any:
        """Note an optimizer's step. When all have stepped, update this rank's parameters."""
        pending = self._owned
        partial = self._partials[number]
        if self._owned_state is None:  # CROSSOVER_DISABLE=1
            return original()
        if not pending.plans:
            self._check_foreign(self._owned_state)
            pending.collect()
        if not pending.awaiting_step:
            has_gradients = any(p.grad is not None for p in pending.parameters(number))
            if has_gradients and not self._owned_state.only_makes_state(partial.optimizer):
                raise UnsupportedConfigurationError(
                    "step() found gradients that were not exchanged, or whose step was taken; call "
                    "step() once after each backward() with owner_hook, outside of no_sync()"
                )
            return original()
        check_unhooked(partial.optimizer)
        if number in pending.plans:
            raise UnsupportedConfigurationError(
                f"expected step() of all optimizers once after each backward(), got a second one "
                f"of {type(partial.optimizer).__name__} before all had stepped; call each once, "
                "one after the other"
            )
        with pending.unwatched():
            pending.add_plan(number, partial.plan())
        plans = pending.take_plans()
        if plans is not None:
            buckets = pending.owned
            self._update(buckets, plans)
            if self._owned_state.is_whole:
                self._owned_state.stepped()
            self._gather(buckets, plans)
        return None

    def _check_foreign(self, owned_state: OwnedState) -> None:
        """Refuse state that other code, such as a Lookahead, keeps for other ranks' parameters."""
        if owned_state.is_whole:
            return
        rank = resolve_group(self.process_group).rank()
        for number, partial in enumerate(self._partials):
            for parameter in self._owned.parameters(number):
                owner = self._owner_of.get(id(parameter))
                state = partial.optimizer.state.get(parameter)
                if state and owner not in (None, rank):
                    raise UnsupportedConfigurationError(
                        "expected state of this rank's own parameters in "
                        f"{type(partial.optimizer).__name__}, got {sorted(state)} of one that rank "
                        f"{owner} owns, which differs from rank to rank (a Lookahead around it?); "
                        "use DecoupledState"
                    )

    def _update(self, buckets: Sequence[OwnedBucket], plans: Mapping[int, StepPlan]) -> None:
        """Update this rank's own parameters, bucket after bucket as gradients arrive."""
        pending = self._owned
        pending.take_turn(buckets[0].bucket.own_shard.wait)
        step = OwnedStep(self._partials, plans)
        with as_in_step(buckets[0].bucket.flat.device.type), pending.unwatched():
            for each in buckets:
                try:
                    each.bucket.own_shard.wait()  # the end of the journey's first stage
                    each.stages.run(step)
                except BaseException as error:  # Ctrl-C as well: a notebook continues after it
                    self._failure = error
                    pending.break_step()
                    # Other ranks wait for the parameters.
                    Exchange.of(self.process_group).fail(_name_of(each), error)
                    raise

    def _gather(self, buckets: Sequence[OwnedBucket], plans: Mapping[int, StepPlan]) -> None:
        """Start to gather updated parameters. Forward first needs what backward reduced last."""
        pending = self._owned
        exchange = Exchange.of(self.process_group)
        for each in reversed(buckets):
            # With a codec all parameters may receive the rest of an earlier change.
            if each.returns is not Returns.CHANGES:
                each.updated = [p for p in each.parameters if pending.number_of[id(p)] in plans]
            each.arriving = exchange.begin(
                each.gather,
                each.packed,
                _name_of(each),
                deferred=True,
                link=each.bucket.link,
                meter=each.bucket.meter,
            )
        pending.defer(None)
        if not pending.is_settled:  # DDP may still rebuild its buckets
            pending.update_all()


def _name_of(deferred: OwnedBucket) -> str:
    """Return the name that error messages give to a bucket's updated parameters."""
    return f"the parameters of bucket {deferred.bucket.index}, updated in step()"


def owner_hook(state: OwnerState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start to send the bucket's gradients to their owners, and let backward continue.

    ``step()`` updates the parameters on their owners, and the next forward gathers them; see
    `OwnerState`.

    Args:
        state: the model's state; create one per model.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that is already complete. The bucket holds NaN.

    On failure: the hook itself raises nothing; see `OwnerState`.

    **Collective**: DDP calls it on all ranks in the same order. Our design.
    """

    def refused() -> None:
        if isinstance(state, OwnerState):
            state._owned.refuse()

    return run_hook(
        state,
        bucket,
        OwnerState,
        "pass OwnerState(optimizer), or register the hook of that state",
        lambda exchange: state._take(exchange, bucket),
        refused=refused,
    )
