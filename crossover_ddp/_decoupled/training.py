"""What happens to a model and its optimizer between two forwards when they are trained decoupled.

The hook hands in buckets, the optimizer its steps, forward asks for parameters; see `DecoupledState`.
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import (
    Bucket,
    check_copyable,
    check_forward,
    flat_gradients,
    model_of,
    names_of,
)
from crossover_ddp._ddp.compiled import called_by_compiled_code, uncompiled
from crossover_ddp._ddp.module_buffers import BufferCopy
from crossover_ddp._engine.buckets import after_backward
from crossover_ddp._engine.turns import Turn
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.own_hook import OwnHook
from crossover_ddp._exchange.transfer import MakeMessages, Payload
from crossover_ddp._owners.interception import guard_groups, intercept
from crossover_ddp._owners.partial_optimizer import PartialOptimizer
from crossover_ddp.errors import UnsupportedConfigurationError

from .clipping import check_finite, clip_whole, gradient_norm
from .coded import Coding
from .guards import Guards
from .round import Round, parameters_of
from .shares import CHANGED, Share, views_of
from .trial import Trial
from .updates import Updates

logger = logging.getLogger(__name__)


class DecoupledTraining:
    """One model and its optimizer, with what is under way between them.

    Args:
        optimizers: the user's; one but with owners.
        turn: taken before forward, if there is one.
        coding: how buckets become messages.
        always: defer every step, without trying whether that is worth it.
        updates: other ones than those of `PartialOptimizer`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        turn: Turn | None,
        coding: Coding,
        *,
        always: bool = False,
        updates: Updates | None = None,
    ) -> None:
        self.optimizers = optimizers
        self.coding = coding
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
        exchange = self.exchange = Exchange.of(process_group)
        messages = self.coding.messages(bucket, process_group)
        if self._closed:
            return exchange.submit(bucket, messages=messages, payload=self._payload_of(bucket), state=state)
        round_, times = self.updates.round, self.updates.times
        if isinstance(bucket, dist.GradBucket) and round_.begins_with(bucket):
            self.coding.await_former(round_.shares)
            if round_.shares:
                _settle(bucket.buffer().device)  # nobody has waited for them, and their memory goes
            round_.begin()
            # Only where no forward came between, as when Join answers for a rank that is through with its inputs.
            self.updates.update_all()
        parameters = self._checked_parameters(bucket, state)
        if self.trial is not None and not self.trial.defers:
            future = self._average_now(exchange, process_group, bucket, messages, state)
            if bucket.is_last():
                self._end_trial_step(bucket)
            return future
        future, share = self._defer(exchange, bucket, parameters, messages, state)
        if share is None:
            self.break_round()
        else:
            round_.shares.append(share)
            times.bucket_ready(share.buffer.numel() * share.buffer.element_size())
            self._buffers = share.deferred.buffers
        if bucket.is_last():
            self._has_turn = self._turn is None
            self._end_round()
            self._end_trial_step(bucket)
        return future

    def _defer(
        self,
        exchange: Exchange,
        bucket: dist.GradBucket,
        parameters: list[torch.Tensor],
        messages: MakeMessages | None,
        state: object,
    ) -> tuple[torch.futures.Future[torch.Tensor], Share | None]:
        urgency, payload = self._urgency(bucket, parameters), self._payload_of(bucket)
        future, deferred = exchange.defer(
            bucket, turn=self._turn, urgency=urgency, messages=messages, payload=payload, state=state
        )
        if deferred is None:
            return future, None
        place, views = len(self.updates.round.shares), _views(self.model(), deferred.bucket, parameters)
        return future, Share(deferred, parameters, bucket.buffer(), urgency, place, views)

    def _urgency(self, bucket: dist.GradBucket, parameters: list[torch.Tensor]) -> int:
        return self.updates.urgency(bucket.index(), parameters)

    def _payload_of(self, bucket: dist.GradBucket) -> Callable[[], Payload] | None:
        """Return what makes the payload that travels in the bucket's place; None: the bucket does."""

    def _average_now(
        self,
        exchange: Exchange,
        process_group: dist.ProcessGroup,
        bucket: dist.GradBucket,
        messages: MakeMessages | None,
        state: object,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of a step that is not deferred, to the same bits."""
        # Two addends have one sum, and DDP's way costs least.
        if self._turn is None and exchange.world_size <= 2 and messages is None:
            return allreduce_hook(process_group, bucket)
        self._has_turn = True  # the exchange gives it away, and takes the next one before backward ends
        return exchange.submit(bucket, turn=self._turn, messages=messages, state=state)

    def _end_trial_step(self, bucket: dist.GradBucket) -> None:
        if self.trial is not None and self.updates.round.is_settled and self.exchange is not None:
            device = bucket.buffer().device
            agree = functools.partial(self.exchange.journeys.gather_numbers, device=device)
            self.trial.backward_ended(agree, functools.partial(_settle, device))

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

    def _checked_parameters(self, bucket: Bucket, state: object) -> list[torch.Tensor]:
        """Return the bucket's parameters; look at each once in its life."""
        flat_gradients(bucket)
        assert isinstance(bucket, dist.GradBucket)
        parameters = bucket.parameters()
        if self._known.issuperset(map(id, parameters)):
            return parameters
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
            self.exchange.begin_compute()
        updates.times.begin()

    def _unpack_buffers(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.unpack()

    def _take_turn(self) -> None:
        """Take the turn, unless it is held, once there is something to compute: the first gradients have come."""
        if self._turn is None or self._has_turn or self.exchange is None:
            return
        first = min([*self.updates.stale.values()], key=lambda share: share.urgency, default=None)
        if first is not None:
            # Alone the host runs ahead of the device as it would without a mutex.
            if self._turn.shared:
                first.deferred.wait_on_host()
            else:
                first.deferred.wait()
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
    model = model_of(bucket, state=state)
    if model is None:
        raise UnsupportedConfigurationError(
            "expected the DDP model of these gradients among all objects that Python's collector knows, got none; "
            "call gc.freeze() after the first backward(), not before"
        )
    check_forward(model, "parameters are updated in it")
    return model


def _views(
    model: DistributedDataParallel | None, buffer: torch.Tensor, parameters: list[torch.Tensor]
) -> dict[int, torch.Tensor] | None:
    """Return where the means of gradients come that are no views of their bucket; None for views."""
    return views_of(buffer, parameters) if copies_gradients(model) else None


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
