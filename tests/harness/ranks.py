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
from pathlib import Path
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

    Args:
        function: A function at the top level of a module, called as ``function(rank, world_size, *args)``.
        world_size: The number of ranks.
        args: Further arguments, the same for all ranks; they are pickled.
        backend: Of the default process group that exists around the call; None makes no group.
        environment: Variables set for the call, the same for all ranks or one mapping per rank.
        deaths: Ranks that must die in the call, and by which signal; their result is None.
        name: Names the job in failures.
    """

    function: Callable[..., Any]
    world_size: int
    args: Sequence[Any] = ()
    backend: str | None = "gloo"
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] = field(default_factory=dict)
    deaths: Mapping[int, signal.Signals] = field(default_factory=dict)
    name: str = ""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    backend: str | None = "gloo",
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    deaths: Mapping[int, signal.Signals] | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in that many processes and return the results by rank.

    Raises:
        RankError: A rank raised, died, hung or left something behind; see `Job` for the arguments.
    """
    __tracebackhide__ = True
    job = Job(function, world_size, args, backend, environment or {}, deaths or {})
    return run_jobs([job], timeout_s=timeout_s)[0]


def run_jobs(jobs: Sequence[Job], *, timeout_s: float = 60.0) -> list[list[Any]]:
    """Run several jobs at the same time and return each job's results by rank."""
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="stores-") as directory:
        tasks = [
            _task(job, rank, Path(directory) / f"store-{index}", timeout_s)
            for index, job in enumerate(jobs)
            for rank in range(job.world_size)
        ]
        with _pool.lend(len(tasks)) as workers:
            run = _Run(workers, [_label(job, rank) for job in jobs for rank in range(job.world_size)])
            reports = run.perform(tasks, [job.deaths.get(r) for job in jobs for r in range(job.world_size)])
            results = iter([None if report is None else pickle.loads(report.result) for report in reports])
    return [[next(results) for _ in range(job.world_size)] for job in jobs]


def in_ranks(
    world_size: int | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Let each rank run the test, which may ask for ``rank`` and ``world_size``; all must return the same.

    Args:
        world_size: None if the test is parametrised by it.
        options: of `run_ranks`; ranks that must die return nothing.
    """

    def decorated(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            __tracebackhide__ = True
            found = run_ranks(_take_part, world_size or given["world_size"], args=(run, given), **options)
            living = [each for rank, each in enumerate(found) if rank not in (options.get("deaths") or ())]
            if living != living[:1] * len(living):
                raise RankError(f"ranks have returned different results: {living}")

        asked = {*inspect.signature(test).parameters} - {"rank", "world_size"}
        names = sorted(asked if world_size else {*asked, "world_size"})  # what pytest gives
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        vars(run)["__signature__"] = inspect.Signature([inspect.Parameter(n, keyword_only) for n in names])
        return run

    return decorated


def _take_part(rank: int, world_size: int, run: Callable[..., None], given: Mapping[str, Any]) -> Any:
    test = vars(run)["__wrapped__"]
    known = {**given, "rank": rank, "world_size": world_size}
    found = test(**{name: known[name] for name in inspect.signature(test).parameters})
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, found)


def close_pools() -> None:
    """End the processes that wait for the next run."""
    _pool.close()


def _label(job: Job, rank: int) -> str:
    return f"{job.name} rank {rank} of {job.world_size}".strip()


def _task(job: Job, rank: int, store: Path, timeout_s: float) -> Task:
    own = job.environment if isinstance(job.environment, Mapping) else job.environment[rank]
    try:
        call = pickle.dumps((job.function, tuple(job.args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"expected a function at the top level of a module and arguments that can be pickled, "
            f"got function={job.function!r}, args={job.args!r}; {error}"
        ) from error
    return Task(call, rank, job.world_size, job.backend, str(store), {**os.environ, **own}, timeout_s)


class _Run:
    """One run on lent processes: which of them are still at it, and what went wrong so far."""

    def __init__(self, workers: Sequence[Worker], labels: Sequence[str]) -> None:
        self._workers = dict(enumerate(workers))
        self._labels = labels
        self._failures: list[str] = []

    def perform(self, tasks: Sequence[Task], deaths: Sequence[signal.Signals | None]) -> list[Report | None]:
        """Run the tasks, then clean up in all ranks that live."""
        __tracebackhide__ = True
        reports = self._attend(dict(enumerate(tasks)), tasks[0].timeout_s, deaths)
        living = {index: CleanUp() for index, report in reports.items() if report is not None}
        for index, worker in self._workers.items():  # for pytest to show should the test fail later
            if output := worker.read_output():
                print(f"--- {self._labels[index]}:\n{output}")
        self._attend(living, CLEAN_UP_TIMEOUT_S, [None] * len(tasks))
        return [reports[index] for index in range(len(tasks))]

    def _attend(
        self,
        orders: Mapping[int, Task | CleanUp],
        timeout_s: float,
        deaths: Sequence[signal.Signals | None],
    ) -> dict[int, Report | None]:
        """Send orders and collect the reports; raise with all that went wrong, first things first."""
        __tracebackhide__ = True
        for index, order in orders.items():
            self._workers[index].order(order)
        pending = {index: self._workers[index] for index in orders}
        reports: dict[int, Report | None] = {}
        deadline_s = time.monotonic() + timeout_s
        while pending and (arrived := ready(pending, max(0.0, deadline_s - time.monotonic()))):
            news = {index: pending.pop(index).receive() for index in arrived}
            reports.update(news)
            # The dead first: what their peers say of a broken connection follows from it.
            for index in sorted(news, key=lambda index: news[index] is not None):
                self._judge(index, news[index], deaths[index])
            if self._failures:
                deadline_s = min(deadline_s, time.monotonic() + AFTERMATH_S)
        # What is still running ends with the stacks of its threads in the report.
        hung = f"hung for {timeout_s:.0f} s; where is in its output"
        what = "was ended, since another rank had failed" if self._failures else hung
        for index, worker in pending.items():
            worker.dump()
            self._note(index, what)
        if self._failures:
            raise RankError("\n" + "\n".join(self._failures))
        return reports

    def _judge(self, index: int, report: Report | None, death: signal.Signals | None) -> None:
        worker = self._workers[index]
        if report is None and death is not None and worker.process.exitcode == -death:
            return
        if report is None:
            self._fail(index, worker.death())
        elif report.failure:
            self._fail(index, f"failed:\n{report.failure}")
        elif death is not None:
            self._fail(index, f"was expected to die by {death.name} and returned")

    def _fail(self, index: int, what: str) -> None:
        """Note the failure and end the rank, so that peers see a broken connection instead of silence."""
        self._note(index, what)
        self._workers[index].process.kill()

    def _note(self, index: int, what: str) -> None:
        output = self._workers[index].read_output()
        shown = f"--- its output:\n{output}" if output else ""
        self._failures.append(f"{self._labels[index]} {what}\n{shown}")
