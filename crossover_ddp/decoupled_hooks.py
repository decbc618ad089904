"""Decoupled training: gradients are gathered, and parameters updated, while the next forward runs.

The method follows DeAR (arXiv 2302.12445): reduce-scatter during backward, and all-gather during
the next forward. The order of the gathers, the updates by the user's own optimizer, and the guards
against reading a parameter before its update are our design.

[Note: coded and deferred] The deferred gather carries mean gradients, not parameters. So it is
coded as under any other hook, and no parameter is ever rounded. A bucket keeps its message buffers
from step to step. No step's message is written before the previous step's message is decoded, since
forward waits for all of its parameters.

[Note: K-FAC decoupled] Owners precondition a bucket as soon as it is reduced. The directions that
forward needs first are gathered first. But no direction may be applied before the KL clip is known,
because the clip scales every direction by one number that depends on all layers. Each bucket's
journey waits for that number. So the training equals that of `kfac_hook`, bit for bit. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._compression.codec import CodecChoice, in_words
from crossover_ddp._compression.compression import Compression
from crossover_ddp._compression.planning import AnyCodec
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._ddp.compiled import PieceBackend
from crossover_ddp._decoupled.pending import DeferredBucket, Pending, Phase, defer_step, next_stage
from crossover_ddp._decoupled.race import DEFERRED, WHOLE, Race
from crossover_ddp._decoupled.state import DeferredState, check_one_optimizer, undeferred
from crossover_ddp._engine.buckets import Bucket, BucketJourney, JourneyTurn, Turn
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.journeys import JourneyCoroutine
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.states import CODEC_OF_RANKS
from crossover_ddp._owners.optimizer import PartialOptimizer

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex
from .owner_hooks import OwnerState, owner_hook

__all__ = ["DecoupledKFACState", "DecoupledState", "compiled", "decoupled_hook"]


async def decoupled(
    bucket: Bucket, link: Link, turn: JourneyTurn, deferred: DeferredBucket
) -> None:
    """Average a bucket without holding up backward, and update its parameters in the next forward.

    The reduce-scatter runs while backward computes, and the all-gather after it, while the next
    forward computes. That forward acquires the turn before it computes, so the coroutine does not.
    It waits for a bucket only where it first reads one of the bucket's parameters.

    If a peer dies or the timeout passes, the ``await`` under way raises. That ends all exchange of
    the process group. The next call that waits for it raises the error: ``backward()``,
    ``step()``, or the first read of a parameter in forward.
    """
    turn.release()  # backward's compute is launched: a sibling may have the device
    await bucket.computed()
    own = await link.reduce_scatter(bucket.flat, bucket.layout)
    # Clipping and GradScaler ask for norms before step(). They need not wait for the gathers: sums
    # of squares travel first.
    await deferred.share_norms(own, link)
    # No gather begins before all buckets are reduced. Then the last bucket goes first, because
    # forward needs its parameters first.
    if not await bucket.all_reduced():
        return  # backward ended early on all ranks, and a later backward pass uses this memory
    await link.all_gather(bucket.flat, bucket.layout)
    # Suspend until, after step(), a parameter of this bucket is first read. The thread that reads
    # it runs the rest. By then forward has acquired the turn.
    step = await next_stage()
    deferred.complete()  # scales the mean if gradients are clipped
    step.apply(deferred.updates)  # the optimizer's own code updates the parameters


async def apply_directions(deferred: DeferredBucket) -> None:
    """Update parameters in the next forward. K-FAC's own coroutine brings the directions.

    Nothing travels here. The first read of a parameter raises an error of the optimizer, or of
    K-FAC's coroutine.
    """
    # Suspend until, after step(), a parameter of this bucket is first read. The thread that reads it
    # first waits for K-FAC's coroutine, and then runs the rest.
    step = await next_stage()
    deferred.complete()
    step.apply(deferred.updates)


class DecoupledState(DeferredState):
    """State of `decoupled_hook`: gradients arrive, and the step takes effect, in the next forward.

    The training loop stays as it is. ``optimizer.step()`` returns at once. The optimizer's own code
    updates each parameter, with the hyper-parameters at the time of ``step()``, just before the
    parameter is first read: by a module's forward, ``state_dict()``, ``parameters()`` or
    ``module.weight``. With one or two ranks, losses and parameters equal those of plain DDP bit for
    bit. With more ranks they are equal up to the order of additions.

    Two reads cannot be detected. One is a read, directly after ``step()``, of a tensor that was
    taken earlier (``p = model.weight``). The other is a read of its ``p.grad`` between
    ``backward()`` and the next forward, when ``p.grad`` holds only parts of the mean. Call `flush`
    before such reads. Writes through such tensors are refused, see docs/decoupled.md.
    ``CROSSOVER_CHECK=1`` checks more strictly, in every step.

    Args:
        optimizer: any torch optimizer that treats each parameter by itself. It must hold all
            parameters of the model.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        mutex: the mutex for taking turns with sibling jobs. The turn is given away when backward's
            computation is done, and taken again before the next forward computes. Default: no
            turns.
        defer: with "auto" the first ten to sixty steps try whether deferring is faster for this
            model on this link, and later steps keep the faster way; see `deferring`. With "always"
            every step is deferred without a race. The results are the same either way.
        codec: compress both halves of the exchange, with error feedback. Pass one codec for both
            halves, such as ``crossover_ddp.Int8()``, or a pair (to owners, to all); see
            `CompressedState`. Parameters then differ from plain DDP's, but are equal on all ranks,
            bit for bit. Default: no codec.
        loss_scale: only with ``codec``: the factor by which the loss is multiplied before
            ``backward()``, or a function that returns it, such as ``scaler.get_scale``. Default 1.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.
        owners: deprecated; with "layers" the call returns an `OwnerState`.
        kfac: deprecated; with a ``KFACState`` the call returns a `DecoupledKFACState`.

    On failure: combinations that cannot work raise ``UnsupportedConfigurationError``, either here
    or from the first ``backward()`` or ``step()``. When a peer dies, code that waits for its
    gradients raises ``ExchangeError``, in bounded time.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` turns it into a plain
    all-reduce.

    Example::

        model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    """

    def __new__(
        cls,
        optimizer: Optimizer | Sequence[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        owners: Literal["layers"] | None = None,
        kfac: Any = None,
        **options: Any,
    ) -> Any:
        """Warn, and create another state, if an argument of version 0.2 asks for it."""
        if owners is not None or kfac is not None:
            return _formerly(optimizer, process_group, owners, kfac, options)
        return super().__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        defer: Literal["auto", "always"] = "auto",
        codec: CodecChoice | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
        owners: None = None,
        kfac: None = None,
    ) -> None:
        _check_defer(defer)
        only = check_one_optimizer(optimizer)
        super().__init__(process_group, mutex, compare_replicas, model)
        self.optimizer = optimizer
        self.codec: AnyCodec = codec
        self._defer = defer
        self._compression = None if codec is None else Compression(codec, loss_scale, self)
        self._partial = PartialOptimizer(only)
        self._race: Race | None = Race((WHOLE, DEFERRED), self.meter) if defer == "auto" else None
        pending = Pending([only], self._check, self._forward_turn)
        self._intercept(pending, on_state=pending.state_is_read)

    @property
    def why_not_virtual(self) -> str:
        """See `HookState.why_not_virtual`."""
        return "" if self.codec is None else CODEC_OF_RANKS

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that all ranks must have in common."""
        return {"state": type(self).__name__, "codec": in_words(self.codec), "defer": self._defer}

    # --- for users -----------------------------------------------------------------------------

    @property
    def deferring(self) -> bool | None:
        """Whether steps are deferred, or None during a race. It is the same on all ranks."""
        if self._race is None:
            return True
        return self._race.defers if self._race.is_over else None

    def drain(self) -> None:
        """Let the next step travel without compression, together with the residuals.

        See `CompressedState.drain`. **Collective**.
        """
        if self._compression is not None:
            self._compression.drain()

    def stats(self) -> dict[str, Any]:
        """Return the common statistics and those of deferring.

        "deferred" counts the buckets whose updates have not been applied yet. "steps_deferred"
        counts the steps whose updates were not applied within ``optimizer.step()``.
        docs/troubleshooting.md has the whole table. Not collective.
        """
        compression = None if self.codec is None else self._compression
        coded = None if compression is None else compression.stats()
        return self._deferred_stats(codec=self.codec, coded=coded)

    def _why_not_deferred(self) -> str | None:
        is_on = not self.agreement.disabled and self._pending.phase is not Phase.CLOSED
        is_on = is_on and not self._pending.is_plain
        if is_on and self._race is not None and not self._race.defers:
            if self._race.is_over:
                return "the race has found steps faster that are not deferred"
            return "some steps are not, while a race compares both kinds"
        return super()._why_not_deferred()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        self.flush()
        if self._compression is not None:
            self._compression.share(resolve_group(self.process_group))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals under "codec", or an empty dictionary without a codec.

        Residuals differ between ranks, unless `checkpoint` was called just before. Pending updates
        are applied first, so that the model and the optimizer can be saved right afterwards. Not
        collective.
        """
        self.flush()
        return {} if self._compression is None else {"codec": self._compression.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a codec's residuals from a result of `state_dict` or from a checkpoint's "hook".

        On failure: ``ValueError`` for any other dictionary. Not collective, but all ranks must call
        it.
        """
        _check_state(state)
        if self._compression is not None and "codec" in state:
            self._compression.load(state["codec"]["residuals"], state["codec"]["loss_scale"])

    # --- the hook ------------------------------------------------------------------------------

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``. Raise an error if the bucket cannot be exchanged."""
        pending = self._pending
        if pending.phase is Phase.CLOSED:
            return self._send(exchange, bucket, undeferred).future
        pending.begin_with(exchange, bucket)
        if self._race is None or self._race.defers:
            taken = self._defer_bucket(exchange, bucket)
        else:
            taken = self._send(exchange, bucket, undeferred, turn=self._turn)
            if pending.turn is not None:
                pending.turn.is_held = True  # the exchange takes it before backward ends
            pending.note_whole(bucket, taken)
        if bucket.is_last() and self._race is not None:
            if pending.is_settled or self._race.is_over:
                self._race.backward_ended(exchange, taken.flat.device)
            else:
                self._race.pass_over()
        return taken.future

    def _defer_bucket(self, exchange: Exchange, grad_bucket: dist.GradBucket) -> Bucket:
        """Start an exchange for which backward does not wait."""
        deferred: DeferredBucket

        def make(bucket: Bucket, link: Link, turn: JourneyTurn) -> JourneyCoroutine:
            nonlocal deferred
            deferred = self._pending.deferred(grad_bucket, bucket)
            return deferred.travel(functools.partial(decoupled, bucket, link, turn, deferred))

        taken = self._send(exchange, grad_bucket, make, turn=self._turn, hands_back=True)
        self._pending.hand_back(deferred)
        return taken

    def _send(
        self,
        exchange: Exchange,
        bucket: dist.GradBucket,
        make: BucketJourney,
        *,
        turn: Turn | None = None,
        hands_back: bool = False,
    ) -> Bucket:
        coded = None if self._compression is None else self._compression.around(bucket, exchange)
        return exchange.send(
            bucket, make, turn=turn, state=self, around=coded, hands_back=hands_back
        )

    def _step(self, number: int, original: Callable[[], Any]) -> Any:
        return defer_step(self._pending, self._partial, original)


class _KFAC(Protocol):
    """The ``KFACState`` methods that `DecoupledKFACState` calls."""

    def defer(self, state: Any) -> None:
        """Become part of ``state``, which has the same process group and mutex; see `KFACState`."""

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]: ...
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
        before: Callable[[], object] = ...,
    ) -> Bucket:
        """Call ``before``, and start the exchange of a bucket. Raise an error if it is refused."""


class DecoupledKFACState(DeferredState):
    """State of `decoupled_hook`: K-FAC's directions arrive, and are applied, in the next forward.

    Owners precondition their layers when backward has reduced them, and the directions are gathered
    in the next forward. The training equals that of `kfac_hook`, bit for bit. The rules for reading
    parameters and gradients are those of `DecoupledState`. The ``KFACState`` keeps its own methods,
    such as ``report()``. See docs/kfac.md.

    Args:
        optimizer: the optimizer, like that of `DecoupledState`.
        kfac: a new ``KFACState(model, optimizer)`` with the same process group and mutex, and
            without a codec.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        mutex: the mutex for taking turns, like that of `DecoupledState`. Default: no turns.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    On failure: like `DecoupledState`. Also ``TypeError`` if ``kfac`` is not a ``KFACState``, and
    ``ValueError`` if it has another process group or mutex.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` turns it into a plain
    all-reduce.

    Example::

        model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        kfac = KFACState(model, optimizer)
        model.register_comm_hook(DecoupledKFACState(optimizer, kfac), decoupled_hook)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        kfac: _KFAC,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
    ) -> None:
        only = check_one_optimizer(optimizer)
        if not hasattr(kfac, "defer"):
            raise TypeError(
                f"expected a KFACState, got kfac={type(kfac).__name__}; see DecoupledKFACState"
            )
        super().__init__(process_group, mutex, compare_replicas, model)
        self.optimizer = optimizer
        # None with CROSSOVER_DISABLE=1, which leaves the KFACState alone.
        self._kfac = None if self.agreement.disabled else kfac
        if self._kfac is not None:
            self._kfac.defer(self)
        self._partial = PartialOptimizer(only)
        pending = Pending([only], self._check, self._forward_turn)
        self._intercept(pending, on_state=pending.state_is_read)

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that all ranks must have in common."""
        assert self._kfac is not None
        return {"state": type(self).__name__, **self._kfac.fingerprint(bucket)}

    def stats(self) -> dict[str, Any]:
        """Return the common statistics and those of deferring; see `DecoupledState.stats`.

        Not collective.
        """
        return self._deferred_stats()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        self.flush()

    def _kept_by_hook(self) -> dict[str, Any]:
        return {} if self._kfac is None else {"kfac": self._kfac.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Apply pending updates, and return an empty dictionary.

        The ``KFACState`` has a state dict of its own. Not collective.
        """
        self.flush()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load K-FAC's state from a checkpoint's "hook".

        On failure: ``ValueError`` for any other dictionary. Not collective, but all ranks must call
        it.
        """
        _check_state(state)
        if self._kfac is not None and "kfac" in state:
            self._kfac.load_state_dict(state["kfac"])

    # --- the hook ------------------------------------------------------------------------------

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``. Raise an error if the bucket cannot be exchanged."""
        kfac = self._kfac
        pending = self._pending
        assert kfac is not None
        if pending.phase is Phase.CLOSED:
            return kfac.exchange(exchange, bucket, state=self, turn=None).future
        # K-FAC first ends an unfinished backward pass, for which `begin_with` may wait.
        taken = kfac.exchange(
            exchange,
            bucket,
            state=self,
            turn=self._turn,
            hands_back=True,
            before=functools.partial(pending.begin_with, exchange, bucket),
        )
        deferred = pending.deferred(bucket, taken)
        deferred.begin(apply_directions(deferred))
        pending.hand_back(deferred)
        return taken.future

    def _step(self, number: int, original: Callable[[], Any]) -> Any:
        return defer_step(self._pending, self._partial, original)


def decoupled_hook(
    state: DecoupledState | DecoupledKFACState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Start to average the bucket, and let backward continue; see `DecoupledState`.

    The bucket is reduce-scattered during backward. When the last bucket is reduced, the gathers
    begin by themselves, starting with that bucket. The next forward only waits for them and
    updates the parameters. ``p.grad`` holds the mean from then on, or after `DecoupledState.flush`.
    A step that is not deferred works like a step of the split hook.

    Args:
        state: the model's state; create one per model and optimizer.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that is already complete. In a step that is not deferred, it is a Future of the
        mean.

    On failure: the hook itself raises nothing; see `DecoupledState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: DeAR (arXiv 2302.12445);
    see the module's docstring.
    """
    if isinstance(state, OwnerState):  # created by `DecoupledState(owners="layers")`
        return owner_hook(state, bucket)
    kind = DecoupledKFACState if isinstance(state, DecoupledKFACState) else DecoupledState

    def refused() -> None:
        if isinstance(state, kind):
            state._pending.refuse()

    return run_hook(
        state,
        bucket,
        kind,
        "pass DecoupledState(optimizer), or register the hook of that state",
        lambda exchange: state._take(exchange, bucket),
        refused=refused,
    )


def compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` for a whole model that is trained decoupled.

    torch's DDPOptimizer cuts the graph of a model in DDP into pieces, one for each bucket. With
    this backend each piece waits only for the updates of its own parameters. With another one, the
    whole model waits for all updates. The results are the same in both cases.

    It has this effect only if the model compiles without a graph break, into several pieces (see
    ``torch._dynamo.config.optimize_ddp`` and DDP's ``bucket_cap_mb``), and after its first steps.
    Without a deferring state, it is the same as ``backend``.

    Args:
        backend: the name of a backend, or a function like one. It compiles the pieces, with the
            ``mode`` and ``options`` that are passed to ``torch.compile``. Default "inductor".

    Returns:
        A function to pass to ``torch.compile``.

    On failure: torch's own error if there is no such backend. Forward raises
    ``UnsupportedConfigurationError`` if the model, once it runs in pieces, is compiled again with a
    graph break, or too often, while updates are pending.

    Not collective.

    Example::

        net = torch.compile(net, backend=crossover_ddp.compiled("inductor"))
        model = DistributedDataParallel(net, **DecoupledState.ddp_options(net))
    """
    return PieceBackend(backend)


def _check_defer(defer: str) -> None:
    if defer not in ("auto", "always"):
        raise ValueError(
            f"expected defer='auto' or 'always', got defer={defer!r}; see DecoupledState"
        )


def _check_state(state: dict[str, Any]) -> None:
    # The first key was in state dicts of version 0.1.
    if {*state} - {"forward_order", "codec", "kfac", "arm"}:
        raise ValueError(
            f"expected a state dict of a DecoupledState, got keys {sorted(state)}; pass what "
            "state_dict() returned"
        )


def _formerly(
    optimizer: Optimizer | Sequence[Optimizer],
    process_group: dist.ProcessGroup | None,
    owners: str | None,
    kfac: Any,
    options: dict[str, Any],
) -> OwnerState | DecoupledKFACState:
    """Return the state that version 0.2 called ``DecoupledState(owners=…)`` or ``(kfac=…)``."""
    if owners not in (None, "layers"):
        raise ValueError(f"expected owners=None or 'layers', got owners={owners!r}; see OwnerState")
    _check_defer(options.pop("defer", "auto"))  # has no effect
    options.pop("loss_scale", None)  # a codec's
    codec = options.pop("codec", None)
    if sum(each is not None for each in (codec, owners, kfac)) > 1:
        raise UnsupportedConfigurationError(
            f"expected one of codec=, owners= and kfac= at most, got codec={codec!r}, "
            f"owners={owners!r} and kfac={kfac!r}: owners take a codec as OwnerState(optimizer, "
            "codec=...), and layers of K-FAC have owners already, whose directions travel; use one "
            "of them"
        )
    text = "DecoupledState({}) is deprecated and will be removed; write {}"
    if kfac is not None:
        instead = "DecoupledKFACState(optimizer, kfac)"
        warnings.warn(text.format("kfac=...", instead), FutureWarning, stacklevel=3)
        return DecoupledKFACState(optimizer, kfac, process_group, **options)
    instead = "OwnerState(optimizer), and register owner_hook"
    warnings.warn(text.format('owners="layers"', instead), FutureWarning, stacklevel=3)
    return OwnerState(optimizer, process_group, **options)
