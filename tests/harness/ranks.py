"""Call a function in real ranks. Return its results or raise with the failing rank's traceback."""

import functools
import inspect
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ._pool import Pool, Worker, ready
from ._worker import CleanUp, Report, Task

# After the first failure the other ranks have this long to report their own, on a busy machine as
# well: another rank's error may be the cause.
AFTERMATH_S = 10.0
CLEAN_UP_TIMEOUT_S = 30.0

_pool = Pool()


class RankError(Exception):
    """A rank failed. The message has the traceback, stack or output of every rank that failed.

    It is not an AssertionError, even if one was the cause: ``xfail(raises=AssertionError)`` is for
    a test's own assertions about the results of its ranks.
    """


@dataclass(frozen=True)
class Job:
    """One job of several ranks, with a process group of its own."""

    # Defined at the top level of a module, called as ``function(rank, world_size, *args)``.
    function: Callable[..., Any]
    world_size: int
    args: Sequence[Any] = ()
    # The backend of the default process group. None: no process group is made.
    backend: str | None = "gloo"
    # The same variables for all ranks, or one mapping per rank.
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] = field(default_factory=dict)
    # The ranks that must be killed, each with its signal. Their result is None.
    deaths: Mapping[int, signal.Signals] = field(default_factory=dict)
    # Names the job in error messages.
    name: str = ""


def run_ranks(
    function: Callable[..., Any], world_size: int, *, timeout_s: float = 60.0, **options: Any
) -> list[Any]:
    """Call ``function`` in ``world_size`` ranks and return their results, by rank.

    ``options`` are those of `Job`. Raises `RankError` if a rank raised, died, hung or left
    something behind.
    """
    __tracebackhide__ = True
    return run_jobs([Job(function, world_size, **options)], timeout_s=timeout_s)[0]


def run_jobs(jobs: Sequence[Job], *, timeout_s: float = 60.0) -> list[list[Any]]:
    """Run jobs beside each other and return the results by job and rank. Errors as `run_ranks`."""
    __tracebackhide__ = True
    tasks: list[Task] = []
    labels: list[str] = []
    deaths: list[signal.Signals | None] = []
    with tempfile.TemporaryDirectory(prefix="stores-") as directory:
        for index, job in enumerate(jobs):
            for rank in range(job.world_size):
                tasks.append(_task(job, rank, f"{directory}/store-{index}", timeout_s))
                labels.append(f"{job.name} rank {rank} of {job.world_size}".strip())
                deaths.append(job.deaths.get(rank))
        with _pool.lend(len(tasks)) as workers:
            reports = iter(_Run(dict(enumerate(workers)), labels, deaths).perform(tasks))
    results = []
    for job in jobs:
        of_job = [next(reports) for _ in range(job.world_size)]
        results.append([report and pickle.loads(report.result) for report in of_job])
    return results


def in_ranks(
    world_size: int | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test that runs in every rank. All ranks must return the same.

    The test may ask for ``rank`` and ``world_size``. A test that is parametrised by ``world_size``
    is decorated with ``in_ranks()``. ``options`` are those of `run_ranks`.
    """

    def decorated(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            __tracebackhide__ = True
            found = run_ranks(
                _take_part, world_size or given["world_size"], args=(run, given), **options
            )
            living = [
                each for rank, each in enumerate(found) if rank not in (options.get("deaths") or ())
            ]
            if living != living[:1] * len(living):
                raise RankError(f"ranks have returned different results: {living}")

        asked = {*inspect.signature(test).parameters} - {"rank", "world_size"}
        names = sorted(asked if world_size else {*asked, "world_size"})  # pytest passes these
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        vars(run)["__signature__"] = inspect.Signature(
            [inspect.Parameter(n, keyword_only) for n in names]
        )
        return run

    return decorated


def _take_part(
    rank: int, world_size: int, run: Callable[..., None], given: Mapping[str, Any]
) -> Any:
    test = vars(run)["__wrapped__"]
    known = {**given, "rank": rank, "world_size": world_size}
    found = test(**{name: known[name] for name in inspect.signature(test).parameters})
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, found)


def close_pools() -> None:
    _pool.close()


def _task(job: Job, rank: int, store: str, timeout_s: float) -> Task:
    own = job.environment if isinstance(job.environment, Mapping) else job.environment[rank]
    try:
        call = pickle.dumps((job.function, tuple(job.args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "expected a function at the top level of a module and arguments that can be pickled, "
            f"got function={job.function!r}, args={job.args!r}; {error}"
        ) from error
    return Task(call, rank, job.world_size, job.backend, store, {**os.environ, **own}, timeout_s)


@dataclass
class _Run:
    """One run on lent processes, with its failures so far."""

    workers: Mapping[int, Worker]
    labels: Sequence[str]  # the ranks' names in messages
    deaths: Sequence[signal.Signals | None]  # for each rank the signal that must kill it
    failures: list[str] = field(default_factory=list)

    def perform(self, tasks: Sequence[Task]) -> list[Report | None]:
        """Run the tasks, then clean up in all ranks that are alive."""
        __tracebackhide__ = True
        reports = self._attend(dict(enumerate(tasks)), tasks[0].timeout_s)
        living = {index: CleanUp() for index, report in reports.items() if report is not None}
        for index, worker in self.workers.items():
            if output := worker.read_output():  # pytest shows it if the test fails later
                print(f"--- {self.labels[index]}:\n{output}")
        self.deaths = [None] * len(tasks)
        self._attend(living, CLEAN_UP_TIMEOUT_S)
        return [reports[index] for index in range(len(tasks))]

    def _attend(
        self, orders: Mapping[int, Task | CleanUp], timeout_s: float
    ) -> dict[int, Report | None]:
        """Send orders and collect the reports. Raise `RankError` with all failures."""
        __tracebackhide__ = True
        for index, order in orders.items():
            self.workers[index].order(order)
        pending = {index: self.workers[index] for index in orders}
        reports: dict[int, Report | None] = {}
        deadline_s = time.monotonic() + timeout_s
        while pending and (arrived := ready(pending, max(0.0, deadline_s - time.monotonic()))):
            news = {index: pending.pop(index).receive() for index in arrived}
            reports.update(news)
            # Dead ranks first: their peers' errors about broken connections are a consequence.
            for index in sorted(news, key=lambda index: news[index] is not None):
                if failure := self._failure(index, news[index]):
                    self._note(index, failure)
                    # The peers of a killed process get an error instead of waiting for it.
                    self.workers[index].process.kill()
            if self.failures:
                deadline_s = min(deadline_s, time.monotonic() + AFTERMATH_S)
        # Ranks that still run are ended. The stacks of their threads are in the message.
        if self.failures:
            why_ended = "was ended, since another rank had failed"
        else:
            why_ended = f"hung for {timeout_s:.0f} s; its output shows where"
        for index, worker in pending.items():
            worker.dump()
            self._note(index, why_ended)
        if self.failures:
            raise RankError("\n" + "\n".join(self.failures))
        return reports

    def _failure(self, index: int, report: Report | None) -> str:
        """Describe how a rank has failed. Empty if it has not."""
        worker = self.workers[index]
        death = self.deaths[index]
        if report is None:
            is_expected = death is not None and worker.process.exitcode == -death
            return "" if is_expected else worker.death()
        if report.failure:
            return f"failed:\n{report.failure}"
        return "" if death is None else f"was expected to die by {death.name} and returned"

    def _note(self, index: int, failure: str) -> None:
        output = self.workers[index].read_output()
        shown = f"--- its output:\n{output}" if output else ""
        self.failures.append(f"{self.labels[index]} {failure}\n{shown}")
