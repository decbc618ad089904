"""What happens to a model and its optimizer between two forwards when they are trained decoupled.

The hook hands in buckets, the optimizer its steps, forward asks for parameters; see `DecoupledState`.

[Note: coded and deferred] What decoupled training gathers late are mean gradients, not parameters: each rank applies
them with its own optimizer. So the way back is coded as under any other hook: the owner encodes the mean with its
residual, and all ranks, the owner too, decode the same bytes. Replicas stay equal to the last bit, and no parameter is
ever rounded. A bucket's messages stay where they were, so no message of a step is written before the step before it is
decoded; forward sees to that anyway, since it waits for all of its parameters.

[Note: K-FAC decoupled] Owners precondition as soon as a bucket is reduced. What forward needs first is gathered first.
But nothing may be applied before the KL clip is known, which scales every direction by one number made of all layers:
each bucket's journey waits for it. So the training is that of `kfac_hook`, to the last bit. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import (
    check_copyable,
    check_forward,
    flat_gradients,
    names_of,
    needed_model_of,
)
from crossover_ddp._ddp.compiled import OwnHook, called_by_compiled_code, uncompiled
from crossover_ddp._ddp.module_buffers import BufferCopy
from crossover_ddp._engine.buckets import Bucket, after_backward, split
from crossover_ddp._engine.exchange import Around, Exchange
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.turns import Turn
from crossover_ddp._owners.optimizer import PartialOptimizer, guard_groups, intercept
from crossover_ddp.errors import UnsupportedConfigurationError

from .clipping import check_finite, clip_whole, gradient_norm
from .deferrable import Deferrable
from .guards import Guards
from .pending import CHANGED, Round, Share, Updates, parameters_of, views_of
from .trial import Trial

logger = logging.getLogger(__name__)


async def deferred(bucket: Bucket, link: Link) -> None:
    """Average a bucket that was handed back; what forward needs first comes back first."""
    await link.reduce_scatter(bucket.flat, bucket.layout)
    if await bucket.summed():
        await link.all_gather(bucket.flat, bucket.layout)


class DecoupledTraining:
    """One model and its optimizer, with what is under way between them.

    Args:
        optimizers: the user's; one but with owners.
        turn: taken before forward, if there is one.
        around: makes what a bucket's codec puts around its link, see [Note: coded and deferred]; None: no codec.
        kfac: the state that preconditions gradients, if there is one, see [Note: K-FAC decoupled].
        always: defer every step, without trying whether that is worth it.
        updates: other ones than those of `PartialOptimizer`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        turn: Turn | None,
        *,
        around: Callable[[dist.GradBucket, dist.ProcessGroup], Around | None] | None = None,
        kfac: Deferrable | None = None,
        always: bool = False,
        updates: Updates | None = None,
    ) -> None:
        self.optimizers = optimizers
        self.kfac, self._around = kfac, around
        self.model: Callable[[], DistributedDataParallel | None] = _no_model
        self.exchange: Exchange | None = None
        self.take = uncompiled(self._take)  # backward may have been called by compiled code
        self._turn = turn
        self._partial = PartialOptimizer(optimizers[0])
        self.updates = updates or Updates(self._partial)
        self.trial = None if always else Trial()
        self._known: set[int] = set()
        self._closed = False
        self._buffers: BufferCopy | None = None
        self._has_turn = turn is None
        self._hooks = contextlib.ExitStack()
        for number, each in enumerate(optimizers):
            methods = intercept(
                each,
                on_step=functools.partial(self._stepped, number),
                on_zero_grad=functools.partial(self._zeroed, number),
                on_look=self._look,
                flush=self.flush,
                unwatched=self.updates.watch.unwatched,
            )
            self._hooks.enter_context(methods)

    # --- the state's methods ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """See `DecoupledState.flush`."""
        self.updates.update_all()
        self.updates.make_round_whole()

    def clip(
        self, group: dist.ProcessGroup, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """See `DecoupledState.clip_grad_norm_`. **Collective**."""
        round_, norm_type = self.updates.round, float(norm_type)
        round_.collect(self.optimizers, self._known)
        parameters = parameters_of(self.optimizers)
        if self.kfac is not None:  # no rank has its own part before the KL clip is known
            self.updates.make_round_whole()
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        norm = gradient_norm(round_.shares, norm_type, group, parameters[0].device)
        if norm is None:
            self.updates.make_round_whole()
            return clip_whole(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for share in round_.shares:
            share.clip(factor)
        return norm

    def forward_order(self) -> list[str]:
        """Return the names of the parameters in the order in which forward reads them."""
        model = self.model()
        return [] if model is None else self.updates.watch.names_in_order(model.module)

    def close(self) -> None:
        """See `DecoupledState.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            self._unpack_buffers()
        finally:
            self.updates.round.is_open = self.updates.round.is_broken = False
            self.updates.round.shares = []
            self._hooks.close()

    # --- the hook --------------------------------------------------------------------------------------------

    def _take(
        self, state: object, process_group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``; for `decoupled_hook`. Raises what makes it impossible."""
        self.exchange = Exchange.of(process_group)
        if self._closed:
            return self._carry(bucket, process_group, state, None, hands_back=False).future
        if self.kfac is not None:
            self.kfac.enter(bucket)  # before anybody waits for the backward pass before
        round_, times = self.updates.round, self.updates.times
        if round_.begins_with(bucket):
            for share in round_.shares:
                share.bucket.drop()
            round_.begin()
            # Only where no forward came between, as when Join answers for a rank that is through with its inputs.
            self.updates.update_all()
        try:
            parameters = self._checked_parameters(bucket, state)
        except Exception:
            if self.kfac is not None:
                self.kfac.refuse(bucket)
            raise
        if bucket.is_last():
            self._has_turn = self._turn is None
        if self.trial is not None and not self.trial.defers:
            # The exchange gives the turn away, and takes the next one before backward ends.
            taken = self._carry(bucket, process_group, state, self._turn, hands_back=False)
            self._has_turn = True
        else:
            share = self._defer(bucket, parameters, process_group, state)
            taken = share.bucket
            round_.shares.append(share)
            times.bucket_ready(share.buffer.numel() * share.buffer.element_size())
            if bucket.is_last():
                self._end_round()
        if bucket.is_last():
            self._buffers = taken.buffers
            self._end_trial_step(bucket)
        return taken.future

    def _defer(
        self,
        bucket: dist.GradBucket,
        parameters: list[torch.Tensor],
        process_group: dist.ProcessGroup,
        state: object,
    ) -> Share:
        taken = self._carry(bucket, process_group, state, self._turn, hands_back=True)
        views = views_of(taken.flat, parameters) if copies_gradients(self.model()) else None
        return Share(taken, parameters, bucket.buffer(), len(self.updates.round.shares), views)

    def _carry(
        self,
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        state: object,
        turn: Turn | None,
        *,
        hands_back: bool,
    ) -> Bucket:
        """Send a bucket on its way; ``hands_back``: backward does not wait for it."""
        if self.kfac is not None:
            return self.kfac.exchange(group, bucket, state=state, turn=turn, hands_back=hands_back)
        around = None if self._around is None else self._around(bucket, group)
        return Exchange.of(group).carry(
            bucket,
            deferred if hands_back else split,
            turn=turn,
            state=state,
            around=around,
            hands_back=hands_back,
            late_buffers=not self._closed,  # in all steps alike
        )

    def _end_trial_step(self, bucket: dist.GradBucket) -> None:
        if self.trial is not None and self.updates.round.is_settled and self.exchange is not None:
            device = bucket.buffer().device
            exchange = self.exchange
            self.trial.backward_ended(
                lambda numbers: exchange.gather_numbers(numbers, device), lambda: _settle(device)
            )

    def break_round(self) -> None:
        """Note that a bucket was refused; for `decoupled_hook`. ``step()`` is refused until the next backward."""
        self.updates.round.is_broken = True

    def _end_round(self) -> None:
        model = self.model()
        for share in self.updates.round.shares:
            if share.views is not None:
                after_backward(share.note_separate)
        same = self.updates.round.end(rebuilt_after=2 if model is not None and model.static_graph else 1)
        self.updates.times.end()
        if not same:
            self.updates.times.forget()
        if self.updates.checks.on:
            after_backward(self.updates.note_gradients)
        self.updates.raise_guards()

    def _checked_parameters(self, bucket: dist.GradBucket, state: object) -> list[torch.Tensor]:
        """Return the bucket's parameters; look at each once in its life."""
        parameters = bucket.parameters()
        if self._known.issuperset(map(id, parameters)):
            return parameters
        flat_gradients(bucket)
        new = [p for p in parameters if id(p) not in self._known]
        model, known = _model_behind(bucket, state), self.model()
        if known is not None and model is not known:
            raise UnsupportedConfigurationError(
                "expected one model for each DecoupledState, got a second one; make a state and an optimizer for it"
            )
        if known is None:
            self._adopt(model)
        _check_in_optimizer(new, self.optimizers, model)
        self._known.update(id(p) for p in new)
        return parameters

    def _adopt(self, model: DistributedDataParallel) -> None:
        if not model.gradient_as_bucket_view:
            check_copyable(model)
        guards = Guards(model.module, self.updates.watch)
        self.model = weakref.ref(model)
        self.updates.guards = guards
        self._hooks.callback(guards.close)
        before = model.register_forward_pre_hook(OwnHook(uncompiled(self._before_forward)), prepend=True)
        after = model.register_forward_hook(OwnHook(uncompiled(self._after_forward)))
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        logger.info(
            "decoupled: %s with %s",
            type(model.module).__name__,
            ", ".join([type(each).__name__ for each in self.optimizers]),
        )

    # --- around forward --------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        updates, compiled = self.updates, called_by_compiled_code()
        updates.check_stepped()
        updates.in_forward = True
        if compiled or not updates.round.is_settled:
            self.flush()
        else:
            updates.update_unseen()
            updates.make_round_whole()  # nobody has stepped, and forward's own reads are no early looks
        updates.watch.recording = torch.is_grad_enabled() and not compiled
        if updates.watch.recording and not updates.recorded:
            updates.raise_guards()
        self._unpack_buffers()
        if torch.is_grad_enabled():
            self._take_turn()
        if self.exchange is not None:
            self.exchange.compute_begins()
        updates.times.begin()

    def _unpack_buffers(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.unpack()

    def _take_turn(self) -> None:
        """Take the turn, unless it is held, once there is something to compute: the first gradients have come."""
        if self._turn is None or self._has_turn or self.exchange is None:
            return
        first = max([*self.updates.stale.values()], key=lambda share: share.place, default=None)
        if first is not None:
            # Alone the host runs ahead of the device as it would without a mutex.
            first.bucket.wait(on_host=self._turn.shared)
        since_s = time.monotonic()
        self._turn.acquire()
        self.exchange.waited(since_s)
        self._has_turn = True

    def _after_forward(self, *_: Any) -> None:
        """Leave nothing open that backward would write into."""
        updates = self.updates
        updates.recorded |= updates.watch.recording
        updates.watch.recording = False
        self.flush()
        updates.lower_guards()
        updates.times.forward_ends()
        updates.in_forward = False

    # --- the optimizer ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Somebody is about to go through the optimizer's parameters."""
        self.updates.watch.reads(())
        if self.updates.stale:
            self.updates.watch.reads(parameters_of(self.optimizers))

    def _zeroed(self, number: int) -> None:
        """The user has called ``zero_grad()`` of an optimizer."""

    def _stepped(self, number: int, original: Callable[[], Any]) -> Any:
        """The user calls ``step()`` of an optimizer."""
        self.updates.update_all()
        self._guard_groups()
        with self.updates.lock:  # a thread that saves may be making gradients whole
            return self._step_on(self.updates, self.updates.round, self.optimizers[number], original)

    def _guard_groups(self) -> None:
        for each in self.optimizers:
            guard_groups(each, self._look)

    def _step_on(
        self, updates: Updates, round_: Round, optimizer: Optimizer, original: Callable[[], Any]
    ) -> Any:
        round_.collect(self.optimizers, self._known)
        if not round_.shares:
            return original()
        _check_not_scaled(optimizer)
        if not round_.is_settled or self._partial.is_watched():
            # DDP may still rebuild its buckets, or somebody wants to see the parameters after this step.
            updates.make_round_whole()
            return original()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler wants to see
        with self.updates.watch.unwatched():
            updates.defer(self._partial.plan())
        return None


def _model_behind(bucket: dist.GradBucket, state: object) -> DistributedDataParallel:
    model = needed_model_of(bucket, state=state)
    check_forward(model, "parameters are updated in it")
    return model


def copies_gradients(model: DistributedDataParallel | None) -> bool:
    """Return whether gradients are no views of their bucket, so that their means have to be copied there."""
    return model is not None and not model.gradient_as_bucket_view


def _check_in_optimizer(
    parameters: list[torch.Tensor], optimizers: Sequence[Optimizer], model: DistributedDataParallel
) -> None:
    known = {id(p) for p in parameters_of(optimizers)}
    foreign = [p for p in parameters if id(p) not in known]
    if foreign:
        raise UnsupportedConfigurationError(
            f"expected all parameters of the model in the optimizer, got {len(foreign)} that are not in it "
            f"({names_of(foreign, model)}); add them as a parameter group, or freeze them before the model is "
            "wrapped (requires_grad=False)"
        )


def _check_not_scaled(optimizer: Optimizer) -> None:
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise UnsupportedConfigurationError(CHANGED)


def _settle(device: torch.device) -> None:
    """Let the device finish, where the host does not wait for it anyway."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _no_model() -> None:
    return None
