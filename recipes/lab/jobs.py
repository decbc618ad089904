"""Runs jobs on a cluster until all have ended, one has failed, or the time is up."""

import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crossover_ddp._system.children import Child, wait_any

from .network import LabError

if TYPE_CHECKING:
    from .nodes import Cluster

# By default glibc returns large blocks to the kernel in some processes and keeps them in others. A
# rank may then compute up to a quarter longer by chance. With fixed thresholds all ranks are alike.
STEADY_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
_TAIL_LINES: Final = 20
_AFTERMATH_S: Final = 1.0
_WATCH_S: Final = 1.0


class JobFailedError(LabError):
    """A rank ended with an error. The message ends with the last lines that it wrote."""


class RunTimeoutError(LabError):
    """The jobs did not end in time. The message has the last lines of each rank that still runs."""


@dataclass(frozen=True)
class Job:
    """One training job: the same command for every rank.

    Args:
        name: the name of its directory, and its label in the picture.
        command: one line, split as a shell would (no shell runs it), or a list of words.
            ``python`` means the interpreter that runs the lab.
        env: further variables. They take precedence over the lab's own.
    """

    name: str
    command: str | Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or self.name != Path(self.name).name or self.name.startswith("."):
            raise ValueError(f"expected a name that can name a directory, got name={self.name!r}")
        if not self.words:
            raise ValueError(f"expected a command for job {self.name}, got an empty one")

    @property
    def words(self) -> list[str]:
        """The words of the command."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)


@dataclass(frozen=True)
class RunResult:
    """The lab's own record of a run. The ranks' logs are in ``directory/<job>``."""

    directory: Path
    begin_s: float
    end_s: float
    sent_bytes: Sequence[int]
    dropped: int


@dataclass(frozen=True)
class _LaunchedRank:
    job: str
    rank: int
    process: Child
    log: Path

    def running(self) -> bool:
        return self.process.poll() is None

    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def describe(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        text = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        how = _how_it_ended(self.process.poll())
        return f"job {self.job}, rank {self.rank}: {how}; its last lines in {self.log}:\n{text}"


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


class LabRun:
    """One run, and its ranks."""

    def __init__(self, cluster: "Cluster", jobs: Sequence[Job], directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._jobs = jobs
        self.ranks: list[_LaunchedRank] = []
        self.begin_s = time.monotonic()

    def until_done(self, timeout_s: float, watch: Callable[[], None] | None) -> None:
        deadline_s = self.begin_s + timeout_s
        for job in self._jobs:
            self._start(job)
        while running := self._running():
            self._raise_for_failed()  # `running` has only the ranks that have not ended
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RunTimeoutError(self._late(timeout_s))
            if watch:
                watch()
            wait_any(running, min(left_s, _WATCH_S) if watch else left_s)
        self._raise_for_failed()

    def _start(self, job: Job) -> None:
        directory = self._directory / job.name
        _make_room(directory)
        port = self._cluster.port()
        for rank, (node, local_rank) in enumerate(self._cluster.ranks):
            log = directory / f"rank{rank}.log"
            environment = self._cluster.environment(
                node, local_rank=local_rank, port=port, directory=directory
            )
            with log.open("wb") as file:
                process = self._cluster.popen(
                    node,
                    job.words,
                    {"PYTHONUNBUFFERED": "1", **environment, **job.env},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.ranks.append(_LaunchedRank(job.name, rank, process, log))

    def _running(self) -> list[Child]:
        return [rank.process for rank in self.ranks if rank.running()]

    def _raise_for_failed(self) -> None:
        if not any(rank.failed() for rank in self.ranks):
            return
        # The peers of a failing rank fail as well, sometimes before it has ended itself. Wait a
        # moment, so that the message includes the rank with the original error.
        deadline_s = time.monotonic() + _AFTERMATH_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            running = self._running()
            if not running:
                break
            wait_any(running, left_s)
        raise JobFailedError("\n".join(rank.describe() for rank in self.ranks if rank.failed()))

    def _late(self, timeout_s: float) -> str:
        late = "\n".join(rank.describe() for rank in self.ranks if rank.running())
        return (
            f"expected the jobs to end within {timeout_s:.0f} s, got ranks that still run\n{late}"
        )


def _make_room(directory: Path) -> None:
    """Make the directory of a job, and delete the logs of an earlier run in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("rank*.log"), *directory.glob("rank*.jsonl")):
        old.unlink()
    shutil.rmtree(directory / "timeline", ignore_errors=True)
