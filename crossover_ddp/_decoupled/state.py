"""The base class of states whose updates are applied in the next forward."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from crossover_ddp._ddp.checks import (
    check_copyable,
    check_forward,
    flat_gradients,
    names_of,
    needed,
)
from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, Turn
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.states import HookState
from crossover_ddp._owners.optimizer import check_not_intercepted, check_separable, intercept
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex

from .follow import Following
from .forward_turn import ForwardTurn
from .guards import Guards, compiled_modules
from .pending import Pending, Phase

logger = logging.getLogger(__name__)

_BUCKETS: Final = 16
_SMALLEST_BUCKET_BYTES: Final = 256 * 1024
# DDP's default for the first bucket, which dynamo takes for granted.
_SMALLEST_COMPILED_BUCKET_BYTES: Final = 2**20
_LARGEST_BUCKET_BYTES: Final = 25 * 2**20  # DDP's default


async def undeferred(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    """Average a bucket while backward waits for it, like `crossover_hook`."""
    turn.release()
    await bucket.computed()
    await link.all_reduce(bucket.flat, bucket.layout, halfway=turn.request)
    await turn.acquire()


class DeferredState(HookState):
    """A state whose updates are applied in the next forward.

    A subclass creates its `Pending`, starts the buckets' exchanges and takes steps.
    """

    mutex: GPUMutex | None
    _pending: Pending

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        mutex: GPUMutex | None,
        compare_replicas: bool,
        model: DistributedDataParallel | None,
    ) -> None:
        super().__init__(process_group, model, compare_replicas)
        self.mutex = mutex
        self._turn = cast(Turn | None, mutex)
        self._forward_turn = None if self._turn is None else ForwardTurn(self._turn)
        # Undoes all changes to the optimizers and the model.
        self._hooks = contextlib.ExitStack()

    def _intercept(self, pending: Pending, on_state: Callable[[], None] | None) -> None:
        """Override the optimizers' methods, so that `_step` takes their steps from now on.

        Args:
            pending: the optimizers' pending buckets and updates.
            on_state: a function to call before user code uses an optimizer's state.
        """
        self._pending = pending
        for number, optimizer in enumerate(pending.optimizers):
            methods = intercept(
                optimizer,
                on_step=functools.partial(pending.stepped, self._step, number),
                on_zero_grad=functools.partial(pending.drop, number),
                on_look=pending.look,
                on_state=on_state,
                flush=self.flush,
                unwatched=pending.unwatched,
            )
            self._hooks.enter_context(methods)

    def _step(self, number: int, original: Callable[[], Any]) -> Any:
        """Take a step of optimizer ``number``. Calling ``original`` would take it all at once."""
        raise NotImplementedError

    # --- for users -----------------------------------------------------------------------------

    @staticmethod
    def ddp_options(model: nn.Module, *, compiled: bool | None = None) -> dict[str, Any]:
        """Return ``DistributedDataParallel`` arguments that suit decoupled training.

        With these arguments, gradients are views of the buckets. A bucket holds a sixteenth of the
        gradients, but at least 256 KiB and at most 25 MiB: updates are deferred bucket by bucket,
        and each bucket costs processor time.

        Args:
            model: the module that you are going to wrap.
            compiled: whether any part of the wrapped module is compiled; torch then needs buckets
                of at least 1 MiB. Default: whether a part of it is already compiled. Pass True for
                ``torch.compile(ddp)``.

        Returns:
            Keyword arguments for ``DistributedDataParallel``.

        Not collective.

        Example::

            model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        """
        gradients_bytes = sum(
            p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
        )
        if compiled is None:
            compiled = any(True for _ in compiled_modules(model))
        smallest_bytes = _SMALLEST_COMPILED_BUCKET_BYTES if compiled else _SMALLEST_BUCKET_BYTES
        cap_bytes = min(max(gradients_bytes / _BUCKETS, smallest_bytes), _LARGEST_BUCKET_BYTES)
        return {"gradient_as_bucket_view": True, "bucket_cap_mb": cap_bytes / 2**20}

    def flush(self) -> None:
        """Complete all exchanges and updates, so that parameters and gradients are as in plain DDP.

        Between ``backward()`` and ``step()``, this completes ``p.grad`` for code that reads or
        changes gradients (but not with `OwnerState`, where only owners have the mean). After
        ``step()``, it applies the update. Not collective.

        On failure: ``ExchangeError`` if a peer has died; ``UnsupportedConfigurationError`` if user
        code has written to pending gradients or parameters.
        """
        self._pending.update_all()
        self._pending.make_whole()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, like ``torch.nn.utils.clip_grad_norm_``.

        That function works as well, and gives the same result. Call either before ``step()``. With
        another norm than the 2-norm, the gradients are completed first.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm, which may be infinity. Default 2.
            error_if_nonfinite: raise ``RuntimeError`` if the norm is infinite or NaN. Default
                False.

        Returns:
            The norm before clipping, the same on all ranks.

        On failure: ``UnsupportedConfigurationError`` if the last ``backward()`` raised.
        """
        self._pending.check_can_step()
        parameters = self._pending.parameters()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def follow(self, average: Any) -> Following:
        """Let a moving average follow the parameters without waiting for the network.

        The loop keeps its line ``average.update(model)`` after ``step()``. If the step is deferred,
        the call returns at once: buffers and counters are updated in it, and each parameter's
        average as soon as the parameter is updated, by the average's own code, with the arguments
        and counters of the call. Otherwise the average is updated in the call. The results are
        plain DDP's, bit for bit.

        Reading the average completes its updates first: its module and the modules in it, their
        forward, ``parameters()``, ``state_dict()``, ``copy``, ``pickle``, and with torch_ema all
        its methods and ``shadow_params``. Tensors that were taken from it earlier are not noticed;
        call `flush` before you read them.

        An average that treats tensors together, or draws random numbers (bfloat16 averages of
        ``ModelEmaV3`` with stochastic rounding), is updated in the call, which waits; that is
        logged at level INFO.

        Args:
            average: timm's ``ModelEmaV3`` or an earlier one, ``torch.optim.swa_utils``'
                ``AveragedModel``, torch_ema's ``ExponentialMovingAverage``, or an object like one
                of these: with ``update(model)`` or ``update_parameters(model)`` and a copy of the
                model in ``module``, or with ``update(parameters=None)`` and tensors in
                ``shadow_params``.

        Returns:
            A handle whose ``remove()`` completes the average's updates, and undoes the change of
            its class, which makes all this work. `close` does the same.

        On failure: ``TypeError`` if ``average`` is of another kind; ``UnsupportedConfigurationError``
        if a state follows it already.

        Not collective: one rank alone may have an average.

        Example::

            ema = ModelEmaV3(model, decay=0.9998)
            state.follow(ema)
        """
        following = Following(average, self._pending)
        self._hooks.callback(following.remove)
        return following

    def on_update(self, listener: Callable[[Sequence[torch.Tensor]], object]) -> RemovableHandle:
        """Call ``listener`` with the parameters that each step has just updated.

        This is for code that follows the parameters, such as a moving average, without waiting for
        the network. A step's update is applied in parts. Each trained parameter is passed to the
        listener once per step, before any other code reads it. The listener runs with gradient
        recording off, on the thread that applied the update, and must not read other parameters.

        Args:
            listener: a function that receives a sequence of the model's parameters. Its result is
                ignored. If it raises, the error appears where the parameters were to be read.

        Returns:
            A handle whose ``remove()`` ends the calls. `close` ends them as well.

        Not collective.

        Example::

            average = {p: p.detach().clone() for p in model.parameters()}
            state.on_update(
                lambda new: torch._foreach_lerp_([average[p] for p in new], new, 0.001)
            )
        """
        handle = RemovableHandle(self._pending.listeners)
        self._pending.listeners[handle.id] = listener
        return handle

    def _deferred_stats(self, **more: Any) -> dict[str, Any]:
        """Return the statistics of a state with deferred updates.

        ``more`` is passed on to `_common_stats`.
        """
        pending = self._pending
        return {
            **self._common_stats(not_deferred=self._why_not_deferred(), **more),
            "steps_deferred": pending.steps,
            "deferred": len(pending.unread),
        }

    def _why_not_deferred(self) -> str | None:
        """Return why the last step was not deferred; None if it was."""
        if self.agreement.disabled:
            return "CROSSOVER_DISABLE=1 is set"
        if self._pending.phase is Phase.CLOSED:
            return "close() was called"
        if self._pending.is_plain:
            return "the model is plain DDP, without a hook"
        return self._pending.why_whole

    def close(self) -> None:
        """Apply all updates, and release the optimizers and the model.

        Later steps run like the split hook's. Not collective. It is safe to call this more than
        once.
        """
        if self._pending.phase is Phase.CLOSED:
            return
        try:
            self.flush()
        finally:
            self._pending.close()
            self._hooks.close()

    # --- the model -----------------------------------------------------------------------------

    def _trained(self) -> set[int]:
        """Return the ids of the parameters that the model may train."""
        return {*map(id, self._pending.parameters())}

    def _check(self, bucket: dist.GradBucket) -> None:
        """Check the model and the parameters of a bucket that contains a new parameter."""
        flat_gradients(bucket)
        model = needed(self.bound_model.bind(bucket, self))
        check_forward(model, "parameters are updated in it")
        if self._pending.model() is None:
            self._adopt(model)
        trained = self._trained()
        foreign = [p for p in bucket.parameters() if id(p) not in trained]
        if foreign:
            raise UnsupportedConfigurationError(
                "expected all parameters of the model in the optimizer, got "
                f"{len(foreign)} that are not in it ({names_of(foreign, model.module)}); add them "
                "as a parameter group (with OwnerState: after add_param_group() make a new state "
                "and DDP model), or freeze them before the model is wrapped (requires_grad=False)"
            )
        self._pending.known.update(map(id, bucket.parameters()))

    def _adopt(self, model: DistributedDataParallel) -> None:
        """Guard the model's parameters, and register hooks on its forward."""
        if not model.gradient_as_bucket_view:
            check_copyable(model)
        pending = self._pending
        guards = Guards(
            model.module,
            is_fresh=pending.is_fresh,
            reads=pending.reads,
            before=pending.update_unguarded,
        )
        pending.model = self.bound_model.model
        pending.guards = guards
        self._hooks.callback(guards.close)
        before = OwnHook(uncompiled(pending.before_forward))
        after = OwnHook(uncompiled(pending.after_forward))
        self._hooks.callback(model.register_forward_pre_hook(before, prepend=True).remove)
        self._hooks.callback(model.register_forward_hook(after).remove)
        names = ", ".join([type(each).__name__ for each in pending.optimizers])
        logger.info("decoupled: %s with %s", type(model.module).__name__, names)


def check_optimizers(
    optimizer: Optimizer | Sequence[Optimizer],
) -> tuple[Optimizer, ...]:
    """Return the given optimizers as a tuple; refuse any whose step cannot be taken in parts."""
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not optimizers:
        raise ValueError(
            "expected at least one optimizer, got optimizer=(); pass those of the model"
        )
    for each in optimizers:
        check_separable(each)
        check_not_intercepted(each)
    return optimizers


def check_one_optimizer(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return the only optimizer; refuse more than one."""
    optimizers = check_optimizers(optimizer)
    if len(optimizers) > 1:
        raise UnsupportedConfigurationError(
            f"expected one optimizer, got {len(optimizers)}; use OwnerState, or one optimizer with "
            "several parameter groups"
        )
    return optimizers[0]
