"""Buckets of one backward pass, whose failures reach the training thread, and the job's turn around the last one.

[Note: errors after backward] An exception must not leave a hook: DDP is unusable afterwards. An exception in the Future
that the hook returned surfaces as a misleading cast error. So a failing bucket is completed like any other, and the
failure is raised on the training thread after DDP's own end of backward, by a callback of the autograd engine:
``backward()`` raises the very error. DDP queues its end of backward after our hook ran, hence a callback that queues
another one. Where nothing will look for the error (outside of a backward pass, as in Join's shadow pass) the Future
does carry the exception.

[Note: steps of optimizers] torch calls its global step hooks around every ``step()``, those of optimizers inside of a
wrapper included. A step that decoupled training takes in parts calls no hook, so `DecoupledState` reports that it
begins. The two hooks stay for the rest of the process once they are needed: a hook that is removed while torch goes
through them, on whatever thread, is an error there.
"""

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.compiled import OwnHook
from crossover_ddp._timeline.record import Timeline
from crossover_ddp.errors import ExchangeError

from .journeys import (
    Gate,
    GradientFuture,
    Milestone,
    Place,
    Trip,
    Way,
    nothing,
    uncompiled_when_called,
)
from .links import Layout, Link, LinkAround

BucketWay = Callable[["Bucket", Link], Way]

_STEPS_KEPT: Final = 16


class Turn(Protocol):
    """What a mutex offers to the engine. What a method raises ``backward()`` raises.

    ``awaits_device``: whether the device is done with a step's buckets when the turn is taken. ``mode``: how the job
    computes beside its siblings, for a timeline.
    """

    @property
    def awaits_device(self) -> bool: ...

    @property
    def mode(self) -> str: ...

    def release(self) -> None:
        """Give the turn away, on the hook's thread or that of owners' work: compute is launched. Never blocks."""

    def request(self) -> None:
        """Join the queue early: the last bucket is half-way, or through. Called on a thread of the engine."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the turn again: the step's buckets are complete, see ``awaits_device``.

        On a thread that may block, unless ``blocking`` is False: then return whether that needed no wait.
        """


class Backward:
    """The buckets of one backward pass, up to the one that DDP calls the last.

    ``gathers``: where buckets that backward does not wait for stay until all are summed, since forward needs the last
    one first. ``is_whole``: the last one was handed out; ``compute_ended``: and launched. ``begun_s``: when the step's
    compute began, if that is known. ``waited_s``: until when it has waited for its buckets, as far as that was counted.
    """

    turn: Turn | None = None
    begun_s: float | None = None
    waited_s: float | None = None
    is_whole = compute_ended = False

    def __init__(self, number: int = 0, timeline: Timeline | None = None) -> None:
        self.number, self.timeline = number, timeline
        self.gathers = Gate()
        self.ready: list[tuple[int, float]] = []  # by bucket: bytes, moment of the hook
        self.futures: list[GradientFuture] = []  # of somebody else's hook
        self._lock = threading.Lock()
        self._watching = 0
        self._error: BaseException | None = None

    def watch(self, *, is_last: bool) -> None:
        """Have a failure raised when DDP is through with this backward pass; call it in each bucket's hook.

        The first bucket's watch catches early failures; the last one's sees the end of backward even if earlier
        buckets were ready in a nested backward pass that ended before.
        """
        if (not self.ready or is_last) and after_backward(self._after_ddp):
            with self._lock:
                self._watching += 1

    def complete(self, future: GradientFuture, result: Tensor, error: BaseException | None) -> None:
        """Complete a bucket's Future; it carries an error only if nobody will look for that after backward."""
        with self._lock:
            if is_watched := self._watching > 0:
                self._error = self._error or error
        if error is None or is_watched:
            try:
                return future.set_result(result)
            except RuntimeError as lost:  # of a device that has failed
                error = error or lost
        future.set_exception(error)  # type: ignore[arg-type]

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket: from then on
        # nobody watches, and a later failure goes into its Future.
        with self._lock:
            self._watching -= 1
            error, self._error = self._error, None
        if error is not None:
            raise error

    def end_compute(self) -> None:
        """The step's compute is launched: let a sibling have the turn, before another one may take it. Once."""
        if self.compute_ended:
            return
        self.compute_ended = True
        if self.timeline is not None and self.begun_s is not None and self.ready:
            mode = {} if self.turn is None else {"turns": self.turn.mode}
            self.timeline.span("compute", self.begun_s, self.ready[-1][1], step=self.number, **mode)
        if self.turn is not None:
            self.turn.release()

    def refuse(self, grad_bucket: dist.GradBucket) -> None:
        """Hear that a bucket is not exchanged; the last one ends the step's compute, and the wait for its sums."""
        if grad_bucket.is_last():
            self.end_compute()
            self.gathers.open()


class Bucket(Trip):
    """A bucket of DDP on its way.

    ``flat``: its buffer, with a version counter of its own: what is changed through the gradients shows in theirs.
    ``layout``: of equal parts. ``keeps_turn``: its way says, in the hook, that owners' work after the reduce-scatter is
    part of the turn. ``own_sum``: reached with the own part.
    """

    keeps_turn = _is_dropped = False

    def __init__(
        self,
        grad_bucket: dist.GradBucket,
        layout: Layout,
        backward: Backward,
        place: Place,
        link: Link,
    ) -> None:
        super().__init__(f"bucket {grad_bucket.index()}", place, link.sent)
        self.index, self.last = grad_bucket.index(), grad_bucket.is_last()
        self.result = grad_bucket.buffer()
        self.flat, self.layout = self.result.data, layout
        self.backward, self.link = backward, link
        self.future, self.own_sum = place.future(), Milestone()
        self._on_device: Callable[[], None] = nothing

    async def summed(self) -> bool:
        """Note that the own part is there, and wait for the other buckets' sums; return whether it is still needed.

        The last bucket opens the gate and goes first: sums end in the order of buckets, so all are there with its own.
        """
        self.own_sum.reach(None, self.place.mark())
        gathers = self.backward.gathers
        await (gathers.passed_first() if self.last else gathers)
        return not self._is_dropped

    def wait(self, *, on_host: bool = False) -> None:
        """Block until the mean is there; on a device order what the caller does behind it. May be called again.

        ``on_host``: also block until the device has it.
        """
        gathers = self.backward.gathers
        if not self.backward.is_whole and not gathers.is_open:
            if self.link.in_program_order:
                raise ExchangeError(
                    "expected a bucket whose gather is under way, got one of a backward that did not end; restart the "
                    "job"
                )
            gathers.open()
        super().wait()
        if on_host:
            self._on_device()

    def drop(self) -> None:
        """Let its memory be used by the next backward pass: nobody is going to wait for it, on no rank."""
        self._is_dropped = self.link.in_program_order and not self.backward.is_whole
        if self._is_dropped:
            self.own_sum.wait()
        else:
            self.wait()

    def waited_for(self, done_s: float) -> None:
        """Count until when backward waits for it: from the last one on. One call at a time."""
        backward = self.backward
        since_s = self.begun_s if self.last else backward.waited_s
        if self.meter is not None and since_s is not None and done_s > since_s:
            self.meter.exposed_s += done_s - since_s
            backward.waited_s = done_s

    def launched(self) -> None:
        if self.last and not self.keeps_turn:
            self.backward.end_compute()

    def end(self, error: BaseException | None) -> None:
        """Complete the Future, or leave the error to be raised after backward, if that waits for it."""
        if self.deferred and error is None:
            self._on_device = self.place.reached()
        super().end(error)
        self.own_sum.reach(error, self._follow)
        if not self.deferred:
            self._is_followed = True  # by whoever waits for the Future
            with self.place.side():
                self.backward.complete(self.future, self.result, error)


async def split(bucket: Bucket, link: Link) -> None:
    """Average over the ranks; nothing happens between the halves."""
    await link.all_reduce(bucket.flat, bucket.layout)


def after_backward(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called when DDP is through with this backward pass; False outside of one.

    Call it in a hook. What ``callback`` raises is raised by ``backward()``.
    """
    return _queue(functools.partial(_run_at_end, callback))


@uncompiled_when_called
def _run_at_end(callback: Callable[[], None]) -> None:
    if not _queue(functools.partial(_run, callback)):
        callback()


@uncompiled_when_called
def _run(callback: Callable[[], None]) -> None:
    callback()


def _queue(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


# --- steps of optimizers: see [Note: steps of optimizers] -------------------------------------------------------------

Report = Callable[[Optimizer], object]

_numbers: Final = itertools.count()
_at_begin: Final[dict[int, Report]] = {}
_at_end: Final[dict[int, Report]] = {}


@uncompiled_when_called
def step_begins(optimizer: Optimizer, *_: Any) -> None:
    """Report the beginning of a step."""
    for report in [*_at_begin.values()]:
        report(optimizer)


def at_each_step(
    parameters: Iterable[Tensor], *, begins: Callable[[], object], ends: Callable[[], object]
) -> Callable[[], None]:
    """Have functions called at the beginning and the end of each step of an optimizer that has one of ``parameters``.

    Returns:
        A function that ends it.
    """
    known = _weakly(parameters)

    def at_begin(optimizer: Optimizer) -> None:
        if _has_one_of(known, optimizer):
            begins()
        elif not known:  # the model has gone
            end()

    def at_end(optimizer: Optimizer) -> None:
        if _has_one_of(known, optimizer):
            ends()

    left = _entered(_at_begin, at_begin), _entered(_at_end, at_end)

    def end() -> None:
        for leave in left:
            leave()

    return end


def before_next_step(parameters: Iterable[Tensor], check: Report) -> Callable[[], None]:
    """Have ``check`` called once, with the next optimizer that is about to step one of ``parameters``.

    ``step()`` raises what ``check`` raises, and changes nothing then.

    Returns:
        A function that ends it.
    """
    known = _weakly(parameters)

    def at_begin(optimizer: Optimizer) -> None:
        if _has_one_of(known, optimizer):
            check(optimizer)
            end()
        elif not known:  # the model has gone
            end()

    end = _entered(_at_begin, at_begin)
    return end


def _entered(reports: dict[int, Report], report: Report) -> Callable[[], None]:
    _register_step_hooks()
    number = next(_numbers)
    reports[number] = report
    return lambda: _left(reports, number)


def _left(reports: dict[int, Report], number: int) -> None:
    reports.pop(number, None)


@uncompiled_when_called
def _step_ends(optimizer: Optimizer, *_: Any) -> None:
    for report in [*_at_end.values()]:
        report(optimizer)


@functools.cache
def _register_step_hooks() -> None:
    register_optimizer_step_pre_hook(OwnHook(step_begins))
    register_optimizer_step_post_hook(OwnHook(_step_ends))


def _weakly(parameters: Iterable[Tensor]) -> Any:
    """Return a dictionary of these parameters that keeps none of them; an id may be another tensor's later."""
    known = WeakTensorKeyDictionary()
    for each in parameters:
        known[each] = True
    return known


def _has_one_of(known: Any, optimizer: Optimizer) -> bool:
    return any(
        each in known for group in optimizer.param_groups for each in list.__iter__(group["params"])
    )


# --- records --------------------------------------------------------------------------------------------------------

StepRecord = tuple[tuple[int, float], ...]
"""One step that backward waited for: of each bucket its bytes, and the seconds from the exchange before to its hook."""


class StepRecords:
    """The last ``steps``, which all had the same buckets. Filled on the thread that ends a step."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)

    def add(self, buckets: list[tuple[int, float]], begin_s: float | None) -> None:
        """Note a step of ``buckets`` (bytes, moment of the hook); ``begin_s`` None: unknown, it does not count."""
        if begin_s is None or not buckets:
            return
        if self.steps and [nbytes for nbytes, _ in self.steps[-1]] != [
            nbytes for nbytes, _ in buckets
        ]:
            self.steps.clear()
        self.steps.append(tuple([(nbytes, ready_s - begin_s) for nbytes, ready_s in buckets]))


class TurnLink(LinkAround):
    """The link of a step's last bucket, which joins the siblings' queue half-way, or with the mean at the latest.

    Where collectives go in the program's order, only a thread that issues nothing afterwards may wait for that: what
    waits for it is left to `take`.
    """

    def __init__(self, link: Link, bucket: Bucket, turn: Turn) -> None:
        super().__init__(link)
        self._bucket, self._turn = bucket, turn
        self._reached = bucket.place.reached()

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        own = await super().reduce_scatter(flat, layout)
        if not self._bucket.keeps_turn:
            self._half_way()
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """End the turn if owners' work, which is done, was part of it."""
        if self._bucket.keeps_turn:
            self._bucket.keeps_turn = False  # K-FAC gathers twice where it makes solvers
            self._bucket.backward.end_compute()
            self._half_way()
        await super().all_gather(flat, layout)

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        """Leave one message one: between two ranks a second is dearer than to ask for the turn a little later."""
        if self.size == 2 and not self.in_program_order:
            await self._link.all_reduce(flat, layout)
            self._half_way()
        else:
            await super().all_reduce(flat, layout)

    def _half_way(self) -> None:
        if self.in_program_order:
            self._reached = self._bucket.place.reached()
        elif self.size > 1 and not self._bucket.deferred:
            self._turn.request()

    async def take(self) -> None:
        """Take the turn again, which `Bucket.launched` gave away. Alone the host runs ahead as it would without us."""
        whole_way, self._bucket.done_s = self._bucket.place.reached(), time.monotonic()
        # Which spares a hop to another thread; with one rank the compute ends behind the first one.
        can_begin = self._bucket.backward.compute_ended and not self.in_program_order
        if can_begin and self._turn.acquire(blocking=False):
            return
        await self.settle()
        if self.in_program_order and self._turn.awaits_device:
            self._reached()
            self._turn.request()
            whole_way()
            self._bucket.done_s = time.monotonic()
        self._turn.acquire()


async def behind(futures: Sequence[GradientFuture], bucket: Bucket, link: Link) -> None:
    """Wait for what somebody else's hook has made of a step's buckets; beside a sibling until the device has, too."""
    await link.settle()
    for future in futures:
        bucket.result = future.wait()
    if (turn := bucket.backward.turn) is not None and turn.awaits_device:
        bucket.place.reached()()
