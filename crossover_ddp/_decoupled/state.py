"""Decoupled training: gradients are gathered, and parameters updated, while the next forward runs.

After DeAR (arXiv 2302.12445): reduce-scatter during backward, all-gather during the next forward. Our design: the
order of the gathers, updates by the user's own optimizer, and guards against reading a parameter before its update.

[Note: coded and deferred] What is gathered late are mean gradients, not parameters. So the way back is coded as under
any other hook, and no parameter is ever rounded. A bucket's messages stay where they were: no message of a step is
written before the step before it is decoded, since forward waits for all of its parameters.

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
from typing import Any, Final, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from crossover_ddp._compression.codec import in_words
from crossover_ddp._compression.compression import Compression
from crossover_ddp._compression.planning import AnyCodec
from crossover_ddp._ddp.checks import (
    check_copyable,
    check_forward,
    flat_gradients,
    names_of,
    needed_model_of,
    resolve_group,
)
from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._ddp.contents import contents_of
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, Turn, after_backward
from crossover_ddp._engine.exchange import Exchange, answered
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.observe import step_begins
from crossover_ddp._engine.states import Agreement
from crossover_ddp._owners.optimizer import (
    PartialOptimizer,
    check_not_intercepted,
    check_separable,
    guard_groups,
    guard_state,
    intercept,
    is_watched,
)
from crossover_ddp._owners.owned_state import Owning
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex

from .clipping import clip
from .guards import Guards, called_by_compiled_code, compiled_modules
from .owned import Owners
from .pending import BEGINS, CHANGED, Pending, Share, check_not_scaled
from .trial import Trial

logger = logging.getLogger(__name__)

_BUCKETS: Final = 16
_SMALLEST_BUCKET_BYTES: Final = 256 * 1024
# DDP's default for the first one, which dynamo takes for granted:
_SMALLEST_COMPILED_BUCKET_BYTES: Final = 2**20
_LARGEST_BUCKET_BYTES: Final = 25 * 2**20  # DDP's default


async def decoupled(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    """Average a bucket over the ranks; a deferred one is gathered while the next forward runs.

    Forward needs the last bucket first, so gathers begin in that order when all buckets are reduced.
    """
    turn.release()  # this step's compute is launched: a sibling may have the device
    await bucket.computed()
    if bucket.deferred:
        await link.reduce_scatter(bucket.flat, bucket.layout)
        if await bucket.summed():
            await link.all_gather(bucket.flat, bucket.layout)
    else:
        await link.all_reduce(bucket.flat, bucket.layout, halfway=turn.request)
        await turn.acquire()


class _Deferrable(Protocol):
    """A state of another hook whose buckets may come back late; ``KFACState`` is one.

    ``defer``: become part of a state of the same process group and mutex, whose ``flush`` finishes what is under way.
    ``exchange``: start the exchange of a bucket, after ``before``; raises what makes it impossible.
    """

    def defer(self, state: Any) -> None: ...
    def said(self, bucket: dist.GradBucket) -> dict[str, object]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def exchange(
        self,
        exchange: Exchange,
        bucket: dist.GradBucket,
        *,
        state: object,
        turn: Turn | None,
        hands_back: bool = False,
        before: Callable[[], object] = nothing,
    ) -> Bucket: ...


class DecoupledState(Owning):
    """State of `decoupled_hook`: lets gradients arrive, and ``optimizer.step()`` take effect, in the next forward.

    The training loop stays as it is. ``optimizer.step()`` returns at once; each parameter is updated by the optimizer's
    own code, with the hyper-parameters of that moment, just before it is read for the first time: by a module's
    forward, ``state_dict()``, ``parameters()`` or ``module.weight``. Losses and parameters are those of plain DDP, to
    the last bit with one or two ranks, and up to the order of additions with more.

    What cannot be seen is a tensor taken earlier (``p = model.weight``) and read directly after ``step()``, and its
    ``p.grad`` between ``backward()`` and the next forward, which holds the mean only in parts. Call `flush` before.
    What is changed through them is refused, see docs/decoupled.md; ``CROSSOVER_CHECK=1`` looks harder, in every step.

    Args:
        optimizer: any torch optimizer that treats each parameter by itself, with all parameters of the model; with
            ``owners="layers"`` also several, which have them together.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: take turns with sibling jobs: the turn is given away when backward's compute is done, and taken before
            the next forward's. Default: no turns.
        defer: "auto": try in the first thirty to ninety steps whether deferring is worth it, and keep what is faster
            for this model on this link; see `deferring`. "always": do not try. The results are the same either way.
        codec: compresses both halves, with error feedback; one for both, or a pair: to owners, to all. Such as
            ``crossover_ddp.codecs.Int8()``; see `CompressedState`. Parameters are then not those of plain DDP, but the
            same on all ranks to the last bit. Default: none.
        loss_scale: for ``codec``: what the loss is multiplied by before ``backward()``, such as ``scaler.get_scale``.
        owners: None: every rank updates every parameter. "layers": each parameter has an owner, which alone runs the
            optimizer on it and keeps its state; updated parameters travel instead of gradients. The bytes are the same,
            work and state are divided by the number of ranks, ``defer`` has no effect. For SOAP, Shampoo, Muon and
            other optimizers that work on whole matrices, and for AdamW with less memory; see docs/owners.md.
        kfac: a new ``KFACState(model, optimizer)`` of the same process group and mutex: layers are preconditioned on
            their owners when backward has reduced them, and directions are gathered in the next forward. The training
            is that of ``kfac_hook``, to the last bit; ``defer`` has no effect. Its own methods, such as its state dict,
            stay in use. See docs/kfac.md. Default: none.
        compare_replicas: raise ``ReplicasDifferError`` if parameters differ after 1, 2, 4, … steps, and every thousand.

    With owners, gradients are NaN after ``backward()``, since only the owner has the mean: clip by `clip_grad_norm_`;
    `flush` does not fill them. Call `consolidate` on all ranks before ``optimizer.state_dict()``.

    On failure: combinations that cannot work raise ``UnsupportedConfigurationError``, here or from the first
    ``backward()`` or ``step()``. When a peer dies, code that waits for its gradients gets ``ExchangeError``, in bounded
    time.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` makes it a plain all-reduce.

    Example::

        model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        defer: Literal["auto", "always"] = "auto",
        codec: AnyCodec = None,
        loss_scale: float | Callable[[], float] = 1.0,
        owners: Literal["layers"] | None = None,
        kfac: _Deferrable | None = None,
        compare_replicas: bool = True,
    ) -> None:
        if defer not in ("auto", "always"):
            raise ValueError(
                f"expected defer='auto' or 'always', got defer={defer!r}; see DecoupledState"
            )
        optimizers = _checked(optimizer, owners)
        self.process_group, self.compare_replicas = process_group, compare_replicas
        self.optimizer, self.mutex = optimizer, mutex
        if kfac is not None and not hasattr(kfac, "defer"):
            raise TypeError(
                f"expected a KFACState, got kfac={type(kfac).__name__}; see DecoupledState"
            )
        if sum(each is not None for each in (codec, owners, kfac)) > 1:
            raise UnsupportedConfigurationError(
                f"expected one of codec=, owners= and kfac= at most, got codec={codec!r}, owners={owners!r} and "
                f"kfac={kfac!r}: owners send updated parameters, whose rounding no residual would mend, and layers of "
                "K-FAC have owners already, whose directions travel; use one of them"
            )
        self.codec = codec
        self.agreement = Agreement()
        self._settings = {
            "codec": in_words(codec),
            "defer": defer,
            "owners": owners,
            "kfac": kfac is not None,
        }
        self._compression = None if codec is None else Compression(codec, loss_scale, self)
        if self.agreement.disabled:
            kfac = owners = None
        self._kfac, self._turn = kfac, cast(Turn | None, mutex)
        if kfac is not None:
            kfac.defer(self)
        self._hooks = contextlib.ExitStack()
        self._pending = Pending(optimizers, withheld=owners is not None)
        self._partials = [PartialOptimizer(each) for each in optimizers]
        self._owners: Owners | None = None
        if owners is not None:
            group = resolve_group(process_group)
            self._owners = Owners(self._partials, group, self._pending, self._take_turn)
            self._owned_state = self._owners.owned_state
            self._hooks.enter_context(self._owned_state.hooks)
        self._trial = Trial() if kfac is None and owners is None and defer == "auto" else None
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._exchange: Exchange | None = None
        self._has_turn, self._closed = mutex is None, False
        for number, each in enumerate(optimizers):
            drop = nothing if self._owners is None else functools.partial(self._owners.drop, number)
            methods = intercept(
                each,
                on_step=functools.partial(self._stepped, number),
                on_zero_grad=drop,
                on_look=self._look,
                on_state=None if self._owners is not None else self._pending.state_is_read,
                flush=self.flush,
                unwatched=self._pending.unwatched,
            )
            self._hooks.enter_context(methods)

    def said(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return what all ranks must have in common."""
        owned = {} if self._owners is None else self._owners.said
        return {
            **self._settings,
            **owned,
            **({} if self._kfac is None else self._kfac.said(bucket)),
        }

    # --- for users -------------------------------------------------------------------------------------------

    @staticmethod
    def ddp_options(model: nn.Module, *, compiled: bool | None = None) -> dict[str, Any]:
        """Return arguments of ``DistributedDataParallel`` that suit decoupled training of ``model``.

        Gradients are views of the buckets, and a bucket holds a sixteenth of them, but at least 256 KiB and at most
        25 MiB: what is deferred must come in pieces, of which each costs processor time.

        Args:
            model: the module that is going to be wrapped.
            compiled: whether something of it is compiled while it is wrapped: torch then wants buckets of 1 MiB at
                least. None: look whether something of it is compiled by now; say True for ``torch.compile(ddp)``.

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

    @property
    def owners(self) -> tuple[int, ...] | None:
        """Rank of each parameter in the order of the optimizers' groups; None without ``owners="layers"``."""
        return None if self._owners is None else self._owners.ranks

    @property
    def deferring(self) -> bool | None:
        """Whether steps are deferred, the same on all ranks; None while that is being tried."""
        trial = self._trial
        return True if trial is None else trial.defers if trial.is_over else None

    def flush(self) -> None:
        """Finish what is under way: parameters and gradients are those of plain DDP afterwards. Not collective.

        Between ``backward()`` and ``step()`` it makes ``p.grad`` whole, for code that reads or changes
        gradients; after ``step()`` it applies the update.
        """
        self._pending.update_all()
        self._pending.make_whole()

    def on_update(self, listener: Callable[[Sequence[torch.Tensor]], object]) -> RemovableHandle:
        """Have ``listener`` called when a step has updated parameters, with those that are new.

        For what follows the parameters, such as a moving average, without waiting for the network: a step's updates
        take effect in parts, and each trained parameter is in one call per step, before anything else reads it. It
        runs without gradients, on the thread that has updated, and must read no other parameters.

        Args:
            listener: takes parameters of the model; what it returns is ignored, what it raises is raised where the
                parameters were to be read.

        Returns:
            A handle; its ``remove()`` ends the calls. `close` ends them, too.

        Not collective.

        Example::

            average = {p: p.detach().clone() for p in model.parameters()}
            state.on_update(lambda new: torch._foreach_lerp_([average[p] for p in new], new, 0.001))
        """
        handle = RemovableHandle(self._pending.listeners)
        self._pending.listeners[handle.id] = listener
        return handle

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_``; call it before ``step()``.

        Each rank looks at its own parts only; three numbers per rank are exchanged. The gradients are scaled when
        they are applied. If some rank has called `flush` since ``backward()``, all do, and each clips by itself.

        Args:
            max_norm: greatest norm that is left.
            norm_type: p of the p-norm; may be infinity.
            error_if_nonfinite: raise ``RuntimeError`` if the norm is infinite or not a number.

        Returns:
            The norm before clipping, the same on all ranks.

        **Collective**: all ranks of the job.
        """
        pending = self._pending
        if self._kfac is not None:  # no rank has its own part before the KL clip is known
            pending.collect()
            pending.make_whole()
            return nn.utils.clip_grad_norm_(
                pending.parameters(), max_norm, norm_type, error_if_nonfinite
            )
        group = resolve_group(self.process_group)
        with (
            pending.lock
        ):  # a thread that saves would make gradients whole, and take the shares away
            return clip(pending, group, max_norm, float(norm_type), error_if_nonfinite)

    def drain(self) -> None:
        """Let the next step travel exact, residuals included; see `CompressedState.drain`. **Collective**."""
        if self._compression is not None:
            self._compression.drain()

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, and "deferred", buckets whose updates are still to come. Not collective.

        "steps_deferred" counts the steps whose updates did not come within ``optimizer.step()``. The table is in
        docs/troubleshooting.md.
        """
        coded = None if self._compression is None else self._compression.stats()
        common = self._told(codec=self.codec, coded=coded, not_deferred=self._why_not_deferred())
        under_way = [*self._pending.stale.values()]  # a share for each of its parameters
        return {**common, "steps_deferred": self._pending.steps, "deferred": len({*under_way})}

    def _why_not_deferred(self) -> str | None:
        """Return why the last step was not deferred; None if it was."""
        if self.agreement.disabled or self._closed:
            return "CROSSOVER_DISABLE=1 is set" if self.agreement.disabled else "close() was called"
        if self._trial is None or self._trial.defers:
            return self._pending.why_whole
        found = "the trial has found steps faster that are not deferred"
        return (
            found
            if self._trial.is_over
            else "some steps are not, while a trial finds out what is faster"
        )

    def _finish(self) -> None:
        self.flush()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        super()._bring_together(optimizers, to)
        if self._compression is not None:
            self._compression.share(resolve_group(self.process_group))

    def _kept_by_hook(self) -> dict[str, Any]:
        return {
            **self.state_dict(),
            **({} if self._kfac is None else {"kfac": self._kfac.state_dict()}),
        }

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps with ``owners="layers"``: "state", "buffers". Not collective."""
        return {} if self._owners is None else self._owners.memory_usage()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, under "codec", if it has one; else nothing.

        They differ from rank to rank, unless `checkpoint` was called right before. Updates under way are applied first,
        so that model and optimizer may be saved right after.
        """
        self.flush()
        return {} if self._compression is None else {"codec": self._compression.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, the residuals of a codec, or what a checkpoint holds, also of K-FAC."""
        unknown = {*state} - {
            "forward_order",
            "codec",
            "kfac",
        }  # the first one was in those of version 0.1
        if unknown:
            raise ValueError(
                f"expected a state dict of a DecoupledState, got keys {sorted(state)}; pass what state_dict() returned"
            )
        if self._compression is not None and "codec" in state:
            self._compression.load(state["codec"]["residuals"], state["codec"]["loss_scale"])
        if self._kfac is not None and "kfac" in state:
            self._kfac.load_state_dict(state["kfac"])

    def close(self) -> None:
        """Finish what is under way and let the optimizer and the model go; later steps are those of the split hook.

        Not collective.
        """
        if self._closed:
            return
        if self._owned_state is not None:
            self._owned_state.check_whole()
        self._closed, pending = True, self._pending
        try:
            self.flush()
        finally:
            pending.is_open = pending.is_broken = False
            pending.shares = []
            self._hooks.close()

    # --- the hook --------------------------------------------------------------------------------------------

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``; for `decoupled_hook`. Raises what makes it impossible."""
        self._exchange, pending = exchange, self._pending
        if self._closed:
            return self._carry(exchange, bucket, None, hands_back=False).future
        if self._owners is not None:
            self._owners.check_stepped()
        if self._kfac is None:
            self._begin_with(bucket)
        if self._trial is not None and not self._trial.defers:
            # The exchange gives the turn away, and takes the next one before backward ends.
            taken = self._carry(exchange, bucket, self._turn, hands_back=False)
            self._has_turn, pending.is_open = True, not bucket.is_last()
        else:
            share = self._share(exchange, bucket)
            taken = share.bucket
            pending.shares.append(share)
            if bucket.is_last():
                model = self._model()
                pending.end(rebuilt_after=2 if model is not None and model.static_graph else 1)
                pending.is_open = after_backward(
                    pending.note_gradients
                )  # without views DDP still copies
        if bucket.is_last() and self._trial is not None and pending.is_settled:
            self._trial.backward_ended(exchange, taken.flat.device)
        return taken.future

    def _begin_with(self, bucket: dist.GradBucket) -> None:
        """Note the next bucket, and look at each parameter once in its life."""
        self._pending.begin_with(bucket)
        if not self._pending.known.issuperset(map(id, bucket.parameters())):
            self._check(bucket)
        if bucket.is_last():
            self._has_turn = self._turn is None

    def _share(self, exchange: Exchange, bucket: dist.GradBucket) -> Share:
        """Send a bucket on its way that backward does not wait for."""
        if self._owners is not None:
            return self._owners.send(bucket, state=self, turn=self._turn, copies=self._copies)
        taken = self._carry(exchange, bucket, self._turn, hands_back=True)
        contents = (
            contents_of(bucket, taken.flat) if self._copies else ()
        )  # K-FAC has found the model
        return Share(
            taken, bucket.parameters(), {id(p): g for p, g, _ in contents} if self._copies else None
        )

    @property
    def _copies(self) -> bool:
        """Whether DDP copies gradients out of its buckets."""
        model = self._model()
        return model is not None and not model.gradient_as_bucket_view

    def _carry(
        self, exchange: Exchange, bucket: dist.GradBucket, turn: Turn | None, *, hands_back: bool
    ) -> Bucket:
        """Send a bucket on its way; ``hands_back``: backward does not wait for it."""
        if self._kfac is not None:
            # K-FAC first ends what a backward pass has left, for which `_begin_with` may wait.
            before = nothing if self._closed else functools.partial(self._begin_with, bucket)
            return self._kfac.exchange(
                exchange, bucket, state=self, turn=turn, hands_back=hands_back, before=before
            )
        return exchange.carry(
            bucket,
            decoupled,
            turn=turn,
            state=self,
            around=None
            if self._compression is None
            else self._compression.around(bucket, exchange),
            hands_back=hands_back,
        )

    def _check(self, bucket: dist.GradBucket) -> None:
        """Look at new parameters of a bucket, and at the model."""
        flat_gradients(bucket)
        model, former = needed_model_of(bucket, state=self), self._model()
        check_forward(model, "parameters are updated in it")
        if former is not None and model is not former:
            raise UnsupportedConfigurationError(
                "expected one model for each DecoupledState, got a second one; make a state and an optimizer for it"
            )
        if former is None:
            self._adopt(model)
        # Owners know what the optimizers had when the state was made.
        known = (
            {*map(id, self._pending.parameters())}
            if self._owners is None
            else self._owners.owner_of
        )
        if foreign := [p for p in bucket.parameters() if id(p) not in known]:
            raise UnsupportedConfigurationError(
                f"expected all parameters of the model in the optimizer, got {len(foreign)} that are not in it "
                f"({names_of(foreign, model.module)}); add them as a parameter group (with owners: after "
                "add_param_group() make a new state and DDP model), or freeze them before the model is wrapped "
                "(requires_grad=False)"
            )
        self._pending.known.update(map(id, bucket.parameters()))

    def _adopt(self, model: DistributedDataParallel) -> None:
        if not model.gradient_as_bucket_view:
            check_copyable(model)
        pending = self._pending
        guards = Guards(
            model.module,
            is_fresh=pending.is_fresh,
            reads=pending.reads,
            before=pending.update_unseen,
        )
        self._model = weakref.ref(model)
        pending.guards = guards
        self._hooks.callback(guards.close)
        before, after = (
            uncompiled(self._before_forward),
            uncompiled(lambda *_: pending.forward_ends()),
        )
        self._hooks.callback(model.register_forward_pre_hook(OwnHook(before), prepend=True).remove)
        self._hooks.callback(model.register_forward_hook(OwnHook(after)).remove)
        names = ", ".join([type(each).__name__ for each in pending.optimizers])
        logger.info("decoupled: %s with %s", type(model.module).__name__, names)

    # --- around forward --------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        pending, compiled = self._pending, called_by_compiled_code()
        if self._owners is not None:
            self._owners.before_forward(self._model())
        pending.check_stepped()
        pending.in_forward = True
        (pending.update_all if compiled or not pending.is_settled else pending.update_unseen)()
        pending.make_whole()  # nobody has stepped, and forward's own reads are no early looks
        pending.forward_begins(may_record=torch.is_grad_enabled() and not compiled)
        if torch.is_grad_enabled():
            self._take_turn(self._wait_for_first)
        if self._exchange is not None:
            self._exchange.compute_begins()

    def _take_turn(self, until_needed: Callable[[], None]) -> None:
        """Take the turn, unless it is held, once there is something to compute, which ``until_needed`` waits for."""
        if self._turn is None or self._has_turn or self._exchange is None:
            return
        until_needed()
        since_s = time.monotonic()
        self._turn.acquire()
        self._exchange.waited(since_s)
        self._has_turn = True

    def _wait_for_first(self) -> None:
        """Wait for the gradients that forward needs first."""
        first = max(
            [*self._pending.stale.values()], key=lambda share: share.bucket.index, default=None
        )
        if first is not None and self._turn is not None:
            # Alone the host runs ahead of the device as it would without a mutex.
            first.bucket.wait(on_host=self._turn.awaits_device)

    # --- the optimizer ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Somebody is about to go through the optimizer's parameters."""
        self._pending.reads(self._pending.parameters() if self._pending.stale else ())

    def _stepped(self, number: int, original: Callable[[], Any]) -> Any:
        """The user calls ``step()`` of an optimizer."""
        with self._pending.lock:  # a thread that saves may be making gradients whole
            if self._closed:  # a scheduler may still call ours
                return original()
            self._pending.update_all()
            for each in self._pending.optimizers:
                guard_groups(each, self._look)
                if self._owners is None:
                    guard_state(each, self._pending.state_is_read)

            def whole() -> Any:
                updated = [p for p in self._pending.parameters(number) if p.requires_grad]
                result = original()
                self._pending.tell(updated)
                return result

            step_begins(self._pending.optimizers[number])
            return self._step(whole) if self._owners is None else self._owners.step(number, whole)

    def _step(self, original: Callable[[], Any]) -> Any:
        pending, partial = self._pending, self._partials[0]
        pending.collect()
        if not pending.shares:
            pending.why_whole = (
                "parameters or gradients are looked at between backward() and step()"
            )
            return original()
        check_not_scaled(partial.optimizer, CHANGED)
        if not pending.is_settled or is_watched(partial.optimizer) or not partial.is_own:
            # DDP may still rebuild its buckets, or somebody wants to see the parameters after this step.
            watched = "a hook of the optimizer's step, or what was put around it, sees parameters"
            pending.why_whole = watched if pending.is_settled else BEGINS
            pending.make_whole()
            return original()
        with pending.unwatched():
            plan = partial.plan()
            pending.defer(
                lambda share: partial.apply(plan, share.updates), plan.attributes["state"]
            )
        return None


def _checked(
    optimizer: Optimizer | Sequence[Optimizer], owners: str | None
) -> tuple[Optimizer, ...]:
    """Return the optimizers; refuse those that do not treat parameters one by one, or have a state already."""
    if owners not in (None, "layers"):
        raise ValueError(
            f"expected owners=None or 'layers', got owners={owners!r}; see DecoupledState"
        )
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not optimizers:
        raise ValueError(
            "expected at least one optimizer, got optimizer=(); pass those of the model"
        )
    for each in optimizers:
        check_separable(each)
        check_not_intercepted(each)
        if owners is not None and not PartialOptimizer(each).is_own:
            raise UnsupportedConfigurationError(
                f"expected {type(each).__name__}'s own step() where parameters have owners, got one that something was "
                "put around, which owners would not call; make the DecoupledState first, or act after step()"
            )
    if owners is None and len(optimizers) > 1:
        raise UnsupportedConfigurationError(
            f"expected one optimizer with owners=None, got {len(optimizers)}; pass owners='layers', or one optimizer "
            "with several parameter groups"
        )
    return optimizers


def decoupled_hook(
    state: DecoupledState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Start to average the bucket, and let backward go on; see `DecoupledState`.

    The bucket is reduce-scattered during backward. Gathers begin by themselves when the last bucket is reduced, its own
    first; the next forward only waits for them, and updates. ``p.grad`` holds the mean from then on, or after
    `DecoupledState.flush`. A step that is not deferred goes the split hook's way.

    Args:
        state: made once per model and optimizer.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already; in a step that is not deferred, of the mean.

    On failure: nothing leaves the hook; see `DecoupledState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: after DeAR (arXiv 2302.12445); see the module.
    """

    def refused() -> None:
        if isinstance(state, DecoupledState):
            state._pending.is_broken = True  # ``step()`` is refused until the next backward

    remedy = "pass DecoupledState(optimizer), or register the hook of that state"
    return answered(
        state,
        bucket,
        DecoupledState,
        remedy,
        lambda exchange: state._take(exchange, bucket),
        refused=refused,
    )
