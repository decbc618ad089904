"""Call a function in real ranks and bring home the results, or the failure in the rank's own words."""

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

# After a first failure the other ranks may still say what they saw of it, or what caused it, on a busy machine, too.
AFTERMATH_S = 10.0
CLEAN_UP_TIMEOUT_S = 30.0

_pool = Pool()


class RankError(Exception):
    """A rank failed; the message carries every failing rank's own traceback, stack or output.

    It is no AssertionError, not even where one was the cause: what ``xfail(raises=AssertionError)`` waits for is what a
    test asserts of its ranks' results.
    """


@dataclass(frozen=True)
class Job:
    """One job of several ranks, its process group apart from that of any other job.

    ``function`` stands at the top level of a module, and is called as ``function(rank, world_size, *args)``. Where
    ``backend`` is not None, there is a default process group. ``environment`` is the same for all ranks, or one mapping
    per rank. ``deaths``: ranks that must die, and by which signal; their result is None.
    """

    function: Callable[..., Any]
    world_size: int
    args: Sequence[Any] = ()
    backend: str | None = "gloo"
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] = field(default_factory=dict)
    deaths: Mapping[int, signal.Signals] = field(default_factory=dict)
    name: str = ""  # in failures


def run_ranks(
    function: Callable[..., Any], world_size: int, *, timeout_s: float = 60.0, **options: Any
) -> list[Any]:
    """Call ``function`` in a `Job` of that many processes and return the results by rank.

    `RankError` if a rank raised, died, hung or left something behind.
    """
    __tracebackhide__ = True
    return run_jobs([Job(function, world_size, **options)], timeout_s=timeout_s)[0]


def run_jobs(jobs: Sequence[Job], *, timeout_s: float = 60.0) -> list[list[Any]]:
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="stores-") as directory:
        places = [
            (job, index, rank) for index, job in enumerate(jobs) for rank in range(job.world_size)
        ]
        tasks = [
            _task(job, rank, f"{directory}/store-{index}", timeout_s) for job, index, rank in places
        ]
        with _pool.lend(len(tasks)) as workers:
            labels = [
                f"{job.name} rank {rank} of {job.world_size}".strip() for job, _, rank in places
            ]
            run = _Run(
                dict(enumerate(workers)), labels, [job.deaths.get(rank) for job, _, rank in places]
            )
            results = iter(
                [report and pickle.loads(report.result) for report in run.perform(tasks)]
            )
    return [[next(results) for _ in range(job.world_size)] for job in jobs]


def in_ranks(
    world_size: int | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Let each rank run the test, which may ask for ``rank`` and ``world_size``; all must return the same.

    No ``world_size`` is given if the test is parametrised by it; ``options`` are those of `run_ranks`.
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
        names = sorted(asked if world_size else {*asked, "world_size"})  # what pytest gives
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
    """One run on lent processes, and what went wrong so far."""

    workers: Mapping[int, Worker]
    labels: Sequence[str]
    deaths: Sequence[signal.Signals | None]
    failures: list[str] = field(default_factory=list)

    def perform(self, tasks: Sequence[Task]) -> list[Report | None]:
        """Run the tasks, then clean up in all ranks that live."""
        __tracebackhide__ = True
        reports = self._attend(dict(enumerate(tasks)), tasks[0].timeout_s)
        living = {index: CleanUp() for index, report in reports.items() if report is not None}
        for index, worker in self.workers.items():  # for pytest to show should the test fail later
            if output := worker.read_output():
                print(f"--- {self.labels[index]}:\n{output}")
        self.deaths = [None] * len(tasks)
        self._attend(living, CLEAN_UP_TIMEOUT_S)
        return [reports[index] for index in range(len(tasks))]

    def _attend(
        self, orders: Mapping[int, Task | CleanUp], timeout_s: float
    ) -> dict[int, Report | None]:
        """Send orders and collect the reports; raise with all that went wrong, first things first."""
        __tracebackhide__ = True
        for index, order in orders.items():
            self.workers[index].order(order)
        pending = {index: self.workers[index] for index in orders}
        reports: dict[int, Report | None] = {}
        deadline_s = time.monotonic() + timeout_s
        while pending and (arrived := ready(pending, max(0.0, deadline_s - time.monotonic()))):
            news = {index: pending.pop(index).receive() for index in arrived}
            reports.update(news)
            # The dead first: what their peers say of a broken connection follows from it.
            for index in sorted(news, key=lambda index: news[index] is not None):
                if wrong := self._wrong(index, news[index]):
                    self._note(index, wrong)
                    self.workers[
                        index
                    ].process.kill()  # peers see a broken connection instead of silence
            if self.failures:
                deadline_s = min(deadline_s, time.monotonic() + AFTERMATH_S)
        # What is still running ends with the stacks of its threads in the report.
        hung = f"hung for {timeout_s:.0f} s; where is in its output"
        what = "was ended, since another rank had failed" if self.failures else hung
        for index, worker in pending.items():
            worker.dump()
            self._note(index, what)
        if self.failures:
            raise RankError("\n" + "\n".join(self.failures))
        return reports

    def _wrong(self, index: int, report: Report | None) -> str:
        worker, death = self.workers[index], self.deaths[index]
        if report is None:
            return "" if death is not None and worker.process.exitcode == -death else worker.death()
        if report.failure:
            return f"failed:\n{report.failure}"
        return "" if death is None else f"was expected to die by {death.name} and returned"

    def _note(self, index: int, what: str) -> None:
        output = self.workers[index].read_output()
        shown = f"--- its output:\n{output}" if output else ""
        self.failures.append(f"{self.labels[index]} {what}\n{shown}")
