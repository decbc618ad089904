"""Observers of journeys, and of the training loop around them.

The exchange knows none of them. It only notifies each journey's observers when the journey begins
and ends.

[Note: steps of optimizers] torch calls its global step hooks around every ``step()``, including the
steps of optimizers inside a wrapper. Decoupled training takes a step in parts, which calls no hook,
so `DecoupledState` itself reports the beginning. Once the two hooks are registered, they stay for
the rest of the process: removing a hook while torch iterates over its hooks, on any thread, is an
error in torch.
"""

import functools
import itertools
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import optimized
from crossover_ddp._ddp.compiled import OwnHook
from crossover_ddp._ddp.groups import job_name
from crossover_ddp._system import environment
from crossover_ddp._system.device import default_device, sibling_name
from crossover_ddp._timeline.record import Detail, Timeline

from .buckets import Backward, Bucket
from .journeys import Journey, nothing, uncompiled_when_called
from .links import Halfway, Layout, Link, LinkAround

Made = TypeVar("Made")

_STEPS_KEPT: Final = 16


class Meter:
    """The traffic of one hook, and how long the program has waited for it.

    See docs/troubleshooting.md.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.bytes_sent = 0
        # Seconds during which at least one journey was under way.
        self.under_way_s = 0.0
        # Seconds during which the program waited for journeys.
        self.exposed_s = 0.0
        # Whether the host sees when journeys end. On NCCL it does not.
        self.is_timed = True
        # Whether the summary of the first steps has been logged.
        self.is_logged = False
        self._count = 0  # journeys under way
        self._since_s = math.inf

    def begins(self, journey: Journey) -> None:
        """Count a journey that begins, see `Observer`."""
        self._count += 1

    def ends(self, journey: Journey, end_s: float, failure: BaseException | None) -> None:
        """Count the traffic and the time of a journey that has ended, see `Observer`."""
        self.bytes_sent += journey.sent()
        self._count -= 1
        self._since_s = min(self._since_s, journey.begun_s)
        if not self._count:
            self.under_way_s += max(0.0, end_s - self._since_s)
            self._since_s = math.inf
        if isinstance(journey, Bucket) and failure is None and not journey.deferred:
            self.exposed_s += journey.exposed_until(end_s)


# --- steps ----------------------------------------------------------------------------------------

StepRecord = tuple[tuple[int, float], ...]
"""A step that backward waited for.

For each bucket it has the size in bytes, and the time in seconds from the beginning of the step's
compute to the bucket's hook.
"""


class StepRecords:
    """Records of the latest steps, which all have the same buckets.

    The thread that ends a step adds its record.
    """

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)

    def add(self, buckets: list[tuple[int, float]], begin_s: float | None) -> None:
        """Add a step, unless ``begin_s`` is None or there are no buckets.

        ``buckets`` has each bucket's size in bytes and the time when its hook ran.
        """
        if begin_s is None or not buckets:
            return
        if self.steps and [nbytes for nbytes, _ in self.steps[-1]] != [
            nbytes for nbytes, _ in buckets
        ]:
            self.steps.clear()
        self.steps.append(tuple([(nbytes, ready_s - begin_s) for nbytes, ready_s in buckets]))


class StepObserver:
    """Records the steps of a process group, and writes their spans to the timeline, if any."""

    def __init__(self, timeline: Timeline | None) -> None:
        self.records = StepRecords()
        self.timeline = timeline
        # The time when the current step's compute began; None if it is unknown.
        self._begun_s: float | None = None

    def traced(self, link: Link, **details: Detail) -> Link:
        """Return ``link``, which writes its collectives to the timeline if there is one.

        ``details`` of the journey are added to each span.
        """
        return link if self.timeline is None else TracedLink(link, self.timeline, **details)

    def compute_begins(self) -> None:
        """Note that forward begins."""
        self._begun_s = time.monotonic()

    def compute_ends(self, backward: Backward) -> None:
        """Write the span of a step's compute, which has been launched."""
        if self.timeline is not None and self._begun_s is not None and backward.ready:
            mode = {} if backward.turn is None else {"turns": backward.turn.mode}
            self.timeline.span(
                "compute", self._begun_s, backward.ready[-1][1], step=backward.number, **mode
            )

    def waited(self, since_s: float, step: int) -> None:
        """Write the span of forward's wait for its turn, from ``since_s`` until now."""
        if self.timeline is not None:
            self.timeline.span("wait", since_s, time.monotonic(), step=step)

    def begins(self, journey: Journey) -> None:
        """Do nothing, see `Observer`."""

    def ends(self, journey: Journey, end_s: float, failure: BaseException | None) -> None:
        """Record the step if its last bucket has ended, see `Observer`."""
        if not isinstance(journey, Bucket) or not journey.last:
            return
        if failure is not None or journey.deferred:
            return
        backward = journey.backward
        now_s = time.monotonic()
        self.records.add(backward.ready, self._begun_s)
        self._begun_s = now_s
        if self.timeline is not None:
            self.timeline.span("exchange", backward.ready[-1][1], end_s, step=backward.number)
            self.timeline.span("wait", end_s, now_s, step=backward.number + 1)


# --- the timeline ---------------------------------------------------------------------------------

_timelines: "weakref.WeakKeyDictionary[dist.ProcessGroup, Timeline]" = weakref.WeakKeyDictionary()


class TracedLink(LinkAround):
    """Writes a span to a timeline for each collective of a link.

    Each span has the given ``details`` of the journey.
    """

    def __init__(self, link: Link, timeline: Timeline, **details: Detail) -> None:
        super().__init__(link)
        self._timeline = timeline
        self._details = details

    @property
    def exact(self) -> Link:
        return self._link.exact  # without spans

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        return await self._recorded("reduce_scatter", super().reduce_scatter(flat, layout), flat)

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        await self._recorded("all_gather", super().all_gather(flat, layout), flat)

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        if type(self._link).all_reduce is Link.all_reduce:
            await super().all_reduce(flat, layout, halfway)  # two halves in any case
            return
        # Not as two halves, since ranks without a timeline may send both as one message.
        await self._recorded("all_reduce", self._link.all_reduce(flat, layout, halfway), flat)

    async def _recorded(self, kind: str, collective: Awaitable[Made], flat: Tensor) -> Made:
        begin_s = time.monotonic()
        made = await collective
        self._timeline.span(kind, begin_s, time.monotonic(), bytes=flat.nbytes, **self._details)
        return made


def timeline_of(process_group: dist.ProcessGroup) -> Timeline | None:
    """Return this rank's timeline, or None unless ``CROSSOVER_TIMELINE`` names a directory."""
    if not (directory := os.environ.get(environment.TIMELINE)):
        return None
    if process_group not in _timelines:
        job = dist.group.WORLD or process_group
        _timelines[process_group] = Timeline(
            directory, rank=job.rank(), device=sibling_name(default_device()), job=job_name(job)
        )
    return _timelines[process_group]


# --- steps of optimizers: see [Note: steps of optimizers] -------------------------------------------------------------

Report = Callable[[Optimizer], object]

_numbers: Final = itertools.count()
_at_begin: Final[dict[int, Report]] = {}
_at_end: Final[dict[int, Report]] = {}


@uncompiled_when_called
def step_begins(optimizer: Optimizer, *_: Any) -> None:
    """Report that a step of ``optimizer`` begins."""
    for report in [*_at_begin.values()]:
        report(optimizer)


def at_each_step(
    parameters: Iterable[Tensor], *, begins: Callable[[], object], ends: Callable[[], object]
) -> Callable[[], None]:
    """Have ``begins`` and ``ends`` called around the steps of certain optimizers.

    Args:
        parameters: an optimizer counts if it has at least one of these. They are held weakly.
        begins: a function to call when a step begins.
        ends: a function to call when a step ends.

    Returns:
        A function that stops the calls.
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


def before_next_step(parameters: Iterable[Tensor], check: Report) -> Callable[[], object]:
    """Have ``check`` called once, with the next optimizer that is about to step one of ``parameters``.

    If ``check`` raises, ``step()`` raises the same error and changes nothing.

    Returns:
        A function that cancels the call.
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


def _entered(reports: dict[int, Report], report: Report) -> Callable[[], object]:
    _register_step_hooks()
    number = next(_numbers)
    reports[number] = report
    return functools.partial(reports.pop, number, None)


@uncompiled_when_called
def _step_ends(optimizer: Optimizer, *_: Any) -> None:
    for report in [*_at_end.values()]:
        report(optimizer)


@functools.cache
def _register_step_hooks() -> None:
    register_optimizer_step_pre_hook(OwnHook(step_begins))
    register_optimizer_step_post_hook(OwnHook(_step_ends))


def _weakly(parameters: Iterable[Tensor]) -> Any:
    """Return a dictionary with weak references to ``parameters`` as its keys.

    A set of ids would not do, because a later tensor may have the same id.
    """
    known = WeakTensorKeyDictionary()
    for each in parameters:
        known[optimized(each)] = True
    return known


def _has_one_of(known: Any, optimizer: Optimizer) -> bool:
    return any(
        each in known for group in optimizer.param_groups for each in list.__iter__(group["params"])
    )
