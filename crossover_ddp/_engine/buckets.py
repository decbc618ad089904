"""Buckets of one backward pass, and what every hook does: ranks agree on arguments, failures reach the training thread.

[Note: errors after backward] An exception must not leave a hook: DDP is unusable afterwards. An exception in the Future
that the hook returned surfaces as a misleading cast error. So a failing bucket is completed like any other, and the
failure is raised on the training thread after DDP's own end of backward, by a callback of the autograd engine:
``backward()`` raises the very error. DDP queues its end of backward after our hook ran, hence a callback that queues
another one. Where nothing will look for the error (outside of a backward pass, as in Join's shadow pass) the Future
does carry the exception.
"""

import contextlib
import functools
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp._ddp.checks import PYTHON_REDUCER, check_not_capturing, resolve_group
from crossover_ddp._ddp.module_buffers import BufferCopy
from crossover_ddp._system import environment
from crossover_ddp._timeline.record import Timeline
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .journeys import Gate, GradientFuture, Meter, Milestone, Place, Trip, nothing
from .links import Layout, Link
from .stats import TOLD_AFTER, line, told

_log = logging.getLogger(__name__)

BucketWay = Callable[["Bucket", Link], Coroutine[Any, Any, None]]
Said = TypeVar("Said")

_STEPS_KEPT: Final = 16
_LONGEST: Final = 300


class Backward:
    """The buckets of one backward pass, up to the one that DDP calls the last.

    ``gathers``: where buckets that backward does not wait for stay until all are summed, since forward needs the last
    one first. ``is_whole``: the last one was handed out.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.gathers, self.is_whole = Gate(), False
        self.ready: list[tuple[int, float]] = []  # by bucket: bytes, moment of the hook
        self.futures: list[GradientFuture] = []  # of somebody else's hook
        self._lock = threading.Lock()
        self._watching = 0
        self._error: BaseException | None = None
        self.compute_ended = False
        self.waits_since_s: float | None = None  # backward for its buckets, as far as that was counted

    def watch(self, *, is_last: bool) -> None:
        """Have a failure raised when DDP is through with this backward pass; call it in each bucket's hook.

        The first bucket's watch catches early failures; the last one's sees the end of backward even if earlier
        buckets were ready in a nested backward pass that ended before.
        """
        if (not self.ready or is_last) and after_backward(self._after_ddp):
            with self._lock:
                self._watching += 1

    def leave(self, error: BaseException) -> bool:
        """Leave ``error`` to be raised after backward; return False if nothing will look for it."""
        with self._lock:
            if self._watching:
                self._error = self._error or error
            return self._watching > 0

    def complete(self, future: GradientFuture, result: Tensor, error: BaseException | None) -> None:
        """Complete a bucket's Future; it carries an error for which nobody will look."""
        if error is None or self.leave(error):
            future.set_result(result)
        else:
            future.set_exception(error)  # type: ignore[arg-type]

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket: from then on
        # nobody watches, and a later failure goes into its Future.
        with self._lock:
            self._watching -= 1
            error, self._error = self._error, None
        if error is not None:
            raise error


class Bucket(Trip):
    """A bucket of DDP on its way.

    Args:
        grad_bucket: DDP's.
        layout: equal parts.
        timeline: is told who waits for it.
        link: that its messages belong to.

    ``flat``: its buffer, with a version counter of its own: what is changed through the gradients shows in theirs.
    ``keeps_turn``: its way says, in the hook, that owners' work after the reduce-scatter is part of the turn, which
    ``compute_ends`` gives away. ``half``: reached with the own part of the sums. ``buffers``: the model's, behind the
    last bucket.
    """

    def __init__(
        self,
        grad_bucket: dist.GradBucket,
        layout: Layout,
        backward: Backward,
        place: Place,
        timeline: Timeline | None,
        link: Link,
    ) -> None:
        super().__init__(f"bucket {grad_bucket.index()}")
        self.index, self.last = grad_bucket.index(), grad_bucket.is_last()
        self.result = grad_bucket.buffer()
        self.flat, self.layout = self.result.data, layout
        self.backward, self.place, self.link = backward, place, link
        self.future, self.half = place.future(), Milestone()
        self.buffers: BufferCopy | None = None
        self.done_s: float | None = None
        self.keeps_turn = False
        self.compute_ends: Callable[[], None] = nothing
        self.sent = link.sent
        self._timeline, self._is_dropped = timeline, False
        self._on_device: Callable[[], None] = nothing

    # --- for its journey -------------------------------------------------------------------------------------

    def hand_back(self) -> None:
        """Let backward go on as if it were exchanged, in the hook; from now on whoever needs it waits for it."""
        self.deferred = True
        self.future.set_result(self.result)

    async def summed(self) -> bool:
        """Note that the own part is there, and wait for the other buckets' sums; return whether it is still needed.

        The last bucket opens the gate and goes first: sums end in the order of buckets, so all are there with its own.
        """
        self.half.reach(None, self.place.mark())
        gathers = self.backward.gathers
        await (gathers.passed_first() if self.last else gathers)
        return not self._is_dropped

    def exchanged(self) -> None:
        """Note that nothing travels any more, before the turn is waited for."""
        self.done_s = time.monotonic()

    # --- for whoever needs one that was handed back ----------------------------------------------------------

    def wait(self, *, on_host: bool = False) -> None:
        """Block until the mean is there; on a device order what the caller does behind it. May be called again.

        Args:
            on_host: also block until the device has it.
        """
        gathers = self.backward.gathers
        if not self.backward.is_whole and not gathers.is_open:
            if self.link.in_program_order:
                raise ExchangeError(
                    "expected a bucket whose gather is under way, got one of a backward that did not end; restart the "
                    "job"
                )
            gathers.open()
        self._wait(super().wait)
        if on_host:
            self._on_device()

    def wait_for_sum(self) -> None:
        """Block until the own part of the mean is there; on a device order what the caller does behind it."""
        self._wait(self.half.wait)

    def _wait(self, wait: Callable[[], None]) -> None:
        begin_s = time.monotonic()
        wait()
        if self._timeline is not None:
            self._timeline.span("stall", begin_s, time.monotonic(), bucket=self.index)

    def drop(self) -> None:
        """Let its memory be used by the next backward pass: nobody is going to wait for it, on no rank."""
        self._is_dropped = self.link.in_program_order and not self.backward.is_whole
        if self._is_dropped:
            self.wait_for_sum()
        else:
            self.wait()

    # --- for the exchange ------------------------------------------------------------------------------------

    def count(self, meter: Meter) -> None:
        """Have what travels counted; it is not refused any more."""
        self.meter = self.waits = self.half.waits = meter
        meter.is_timed = not self.link.in_program_order
        if self.last:
            meter.steps += 1

    def begins(self) -> None:
        """See `Trip`; from the last one on backward waits."""
        super().begins()
        if self.last and not self.deferred:
            self.backward.waits_since_s = self.begun_s

    def ends(self, end_s: float) -> None:
        """See `Trip`; the turn is no part of it."""
        end_s = self.done_s or end_s
        super().ends(end_s)
        since_s = self.backward.waits_since_s
        if self.meter is not None and since_s is not None and end_s > since_s:
            self.meter.exposed_s += end_s - since_s
            self.backward.waits_since_s = end_s

    def end(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Complete the Future, or leave the error to be raised after backward, if that waits for it."""
        if self.deferred:
            self._on_device = self.place.reached()
        super().end(error, follow)
        self.half.reach(error, follow)
        if self.deferred:
            return
        with self.place.side():
            self.backward.complete(self.future, self.result, error)


async def split(bucket: Bucket, link: Link) -> None:
    """Average over the ranks; nothing happens between the halves."""
    await link.all_reduce(bucket.flat, bucket.layout)


def after_backward(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called when DDP is through with this backward pass; False outside of one.

    Call it in a hook. What ``callback`` raises is raised by ``backward()``.
    """

    def at_end_of_backward() -> None:
        if not _queue(callback):
            callback()

    return _queue(at_end_of_backward)


def _queue(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


StepRecord = tuple[tuple[int, float], ...]
"""One step that backward waited for: of each bucket its bytes, and the seconds from the exchange before to its hook."""


class StepRecords:
    """The last steps, which all had the same buckets. Filled on the thread that ends a step."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)

    def add(self, buckets: list[tuple[int, float]], begin_s: float | None) -> None:
        """Note a step of ``buckets`` (bytes, moment of the hook); ``begin_s`` None: unknown, it does not count."""
        if begin_s is None or not buckets:
            return
        if self._steps and [nbytes for nbytes, _ in self._steps[-1]] != [nbytes for nbytes, _ in buckets]:
            self._steps.clear()
        self._steps.append(tuple([(nbytes, ready_s - begin_s) for nbytes, ready_s in buckets]))

    def last(self) -> list[StepRecord]:
        """Return the recorded steps."""
        return [*self._steps]

    def compute_s(self) -> float | None:
        """Return the median seconds from an exchange's end to the next step's last bucket; None without a record."""
        return statistics.median(buckets[-1][1] for buckets in self._steps) if self._steps else None


# --- what every hook and every state of a hook has in common ---------------------------------------------------------


def guarded(
    bucket: dist.GradBucket | tuple[Tensor, ...],
    answer: Callable[[], GradientFuture],
    *,
    refused: Callable[[], None] | None = None,
) -> GradientFuture:
    """Return ``answer()``; what it raises is raised by ``backward()`` instead.

    ``refused`` is called first if there is one. Only where torch's python reducer calls the hook the error leaves it,
    for nobody else would hear of it.
    """
    if isinstance(bucket, tuple):
        raise UnsupportedConfigurationError(PYTHON_REDUCER)
    try:
        return answer()
    except Exception as error:
        if refused is not None:
            refused()
        backward, future = Backward(), GradientFuture()
        backward.watch(is_last=True)
        backward.complete(future, bucket.buffer(), error)  # as it is: nothing was sent
        return future


def answered(
    state: Any,
    bucket: dist.GradBucket,
    kind: type,
    remedy: str,
    carry: Callable[[dist.ProcessGroup], GradientFuture],
    *,
    plain: Callable[[dist.ProcessGroup, dist.GradBucket], GradientFuture] = allreduce_hook,
    refused: Callable[[], None] | None = None,
) -> GradientFuture:
    """Answer DDP for a hook with a state: what all of them do before they carry ``bucket``.

    Args:
        state: has ``process_group``, ``agreement``, and ``said(bucket)``, what the ranks must have in common.
        bucket: DDP's.
        kind: of the hook's states; others, such as another hook's, are refused.
        remedy: what to do with those instead.
        carry: begins the exchange.
        plain: answers instead with ``CROSSOVER_DISABLE=1``.
        refused: see `guarded`.
    """

    def answer() -> GradientFuture:
        if not isinstance(state, kind):
            raise UnsupportedConfigurationError(
                f"expected a {kind.__name__}, got state={type(state).__name__}; {remedy}"
            )
        group = resolve_group(state.process_group)  # type: ignore[attr-defined]
        agreement: Agreement = state.agreement  # type: ignore[attr-defined]
        if not agreement.made:
            agreement.make(group, lambda: state.said(bucket))  # type: ignore[attr-defined]
        if agreement.disabled:
            return plain(group, bucket)
        check_not_capturing(bucket)
        return carry(group)

    return guarded(bucket, answer, refused=refused)


class Pausable:
    """A state with ``mutex``, which may be None; what its hook does is counted."""

    @functools.cached_property
    def meter(self) -> Meter:
        """What the engine has counted."""
        return Meter()

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, see docs/choosing.md. Not collective."""
        return self._told()

    def _told(self, **said: Any) -> dict[str, Any]:
        return told(self.meter, mutex=self.mutex, **said)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def paused(self: Any) -> Iterator[None]:
        """Give the turn away during the block: evaluation, a checkpoint; see `GPUMutex.paused`."""
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield


def meter_of(state: object, without_state: Meter, rank: int) -> Meter:
    """Return what counts for a hook; after its first steps rank 0 says once what they did."""
    meter = state.meter if isinstance(state, Pausable) else without_state
    if meter.steps == TOLD_AFTER and not meter.is_told:
        meter.is_told = True
        if rank == 0:
            name, said = "split", told(meter)
            if isinstance(state, Pausable):
                name, said = type(state).__name__, state.stats()
            _log.info("%s: %s", name, line(said))
    return meter


class Agreement:
    """A comparison of what the ranks of a process group say, at the first bucket and after each load or drain.

    torch's own collective carries it, so that a rank with ``CROSSOVER_DISABLE=1`` takes part, too.
    """

    made = False

    def __init__(self, disabled: bool | None = None) -> None:
        """``disabled``: whether ``CROSSOVER_DISABLE=1`` was set; None: looked up in each comparison."""
        self.disabled, self._is_known = bool(disabled), disabled is not None

    def forget(self) -> None:
        """Compare again at the next bucket."""
        self.made = False

    def make(self, group: dist.ProcessGroup, said: Callable[[], Mapping[str, object]]) -> None:
        """Raise unless all ranks say the same, once.

        Args:
            group: whose ranks compare.
            said: returns this rank's values by name, which are compared by their ``repr``; not called with
                ``CROSSOVER_DISABLE=1``.

        On failure: ``UnsupportedConfigurationError`` on all ranks; the next bucket compares again. ``ExchangeError`` if
        a peer is gone.

        **Collective**.
        """
        if not self.made:
            if not self._is_known:
                self.disabled = environment.is_set(environment.DISABLE)
            if group.size() > 1:
                compare(group, {environment.DISABLE: int(self.disabled), **({} if self.disabled else said())})
            self.made = True


def compare(group: dist.ProcessGroup, said: Mapping[str, object]) -> None:
    """Raise on all ranks of ``group`` unless all say the same; see `Agreement.make`. **Collective**."""
    everyone = told_by_all(group, {name: repr(value) for name, value in said.items()})
    for name in said:
        values = [each.get(name, "nothing") for each in everyone]
        if len({*values}) > 1:
            by_rank = ", ".join(f"{rank}: {value[:_LONGEST]}" for rank, value in enumerate(values))
            raise UnsupportedConfigurationError(
                f"expected the same {name} on all ranks, got {name} by rank {{{by_rank}}}; pass the same everywhere, "
                "and call load_state_dict on all ranks or on none"
            )


def told_by_all(group: dist.ProcessGroup, said: Said) -> list[Said]:
    """Return by rank what the ranks of ``group`` say. **Collective**.

    On failure: ``ExchangeError`` if a peer is gone.
    """
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, said, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {group.rank()} of {group.size()}: comparing with the other ranks failed: {error}; either one is "
            "gone, or checkpoint(), load_state_dict() or drain() was not called on all of them: restart the job"
        ) from error
    return everyone
