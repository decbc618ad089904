"""Run a script in several processes as torchrun would, with a handle of each process."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ._preloaded import ForkedScript
from .children import Child, end, wait_any
from .groups import free_port

ROOT = Path(__file__).resolve().parents[2]
# Time from SIGABRT until the interpreter has written its stacks, even on a busy machine.
DUMP_TIMEOUT_S = 5.0
# After a rank has failed the others have this long to end by themselves.
AFTERMATH_S = 10.0
OUTPUT_LIMIT_BYTES = 20_000


def hear_ignored_signals() -> None:
    """Handle the signals that this process ignores, so that its children do not ignore them.

    A process ignores signals under nohup, or in the background of a script. A program that it
    starts inherits an ignored signal as ignored, but one with a handler with the default action.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


class ScriptError(Exception):
    """A rank of a script failed or hung. The message has the output of all ranks."""


class ScriptRanks(contextlib.AbstractContextManager["ScriptRanks"]):
    """The running processes of a script. All are ended at the end of the block."""

    def __init__(
        self,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        cwd: Path,
        *,
        forked: Collection[int],
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="script-"))
        self._words = list(words)
        self.processes: list[Child] = []
        for rank, environment in enumerate(environments):
            with self._path(rank).open("wb") as output:
                # In a forked process faulthandler is on already.
                options = [] if rank in forked else ["-X", "faulthandler"]
                start = ForkedScript if rank in forked else Child
                child = start(
                    [sys.executable, *options, *self._words],
                    environment,
                    death_signal=signal.SIGKILL,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                self.processes.append(child)

    def __exit__(self, *exc_info: object) -> None:
        end(self.processes, grace_s=0.0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def wait(
        self, timeout_s: float, *, deaths: Mapping[int, signal.Signals] | None = None
    ) -> list[str]:
        """Wait until all ranks have ended without an error, and return their outputs.

        Ranks that still run after ``timeout_s`` are ended. Their output has the stacks of their
        threads then. ``deaths`` has the ranks that must have been killed, each with its signal.
        Raises `ScriptError` if a rank failed or hung.
        """
        expected = {rank: -death for rank, death in (deaths or {}).items()}
        hung = self._wait_for_exit(timeout_s, expected)
        for rank in hung:
            # SIGCONT, since the process may be stopped.
            self.processes[rank].signal_session(signal.SIGABRT, signal.SIGCONT)
            wait_any([self.processes[rank]], DUMP_TIMEOUT_S)
        failed = []
        for rank, process in enumerate(self.processes):
            status = process.poll()
            if status is not None and status != expected.get(rank, 0) and rank not in hung:
                if status < 0:
                    failed.append(f"rank {rank} was killed by {signal.Signals(-status).name}")
                else:
                    failed.append(f"rank {rank} exited with status {status}")
        why_ended = "did not end either" if failed else f"hung for {timeout_s:.0f} s"
        failed += [f"rank {rank} {why_ended}" for rank in hung]
        if failed:
            raise ScriptError(f"{', '.join(failed)}: {' '.join(self._words)}\n{self._all_output()}")
        return [self.output(rank) for rank in range(len(self.processes))]

    def output(self, rank: int) -> str:
        return self._path(rank).read_bytes().decode(errors="replace")

    def wait_for_output(self, rank: int, text: str, timeout_s: float) -> str:
        """Wait until a rank's output contains a text, and return all of its output so far."""
        deadline_s = time.monotonic() + timeout_s
        while text not in (output := self.output(rank)):
            if time.monotonic() > deadline_s or self.processes[rank].poll() is not None:
                raise ScriptError(
                    f"rank {rank} did not write {text!r} in time\n{self._all_output()}"
                )
            time.sleep(0.01)
        return output

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank{rank}"

    def _wait_for_exit(self, timeout_s: float, expected: Mapping[int, int]) -> list[int]:
        """Return the ranks that have not ended in time: a short one once a rank has failed."""
        deadline_s = time.monotonic() + timeout_s
        running = set(range(len(self.processes)))
        while running and (left_s := deadline_s - time.monotonic()) > 0:
            wait_any([self.processes[rank] for rank in running], left_s)
            ended = {rank for rank in running if self.processes[rank].poll() is not None}
            running -= ended
            if any(self.processes[rank].poll() != expected.get(rank, 0) for rank in ended):
                deadline_s = min(deadline_s, time.monotonic() + AFTERMATH_S)
        return sorted(running)

    def _all_output(self) -> str:
        ends = [self.output(rank)[-OUTPUT_LIMIT_BYTES:] for rank in range(len(self.processes))]
        return "\n".join(f"--- output of rank {rank}:\n{end}" for rank, end in enumerate(ends))


def spawn_script(
    script: str | os.PathLike[str],
    world_size: int,
    *,
    args: Sequence[str] = (),
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    cwd: Path = ROOT,
    forked: bool | Collection[int] = False,
) -> ScriptRanks:
    """Start a Python script in ``world_size`` processes, with the variables that torchrun sets.

    Args:
        script: its path.
        world_size: the number of processes.
        args: the script's arguments.
        environment: further variables, the same for all ranks, or one mapping per rank.
        cwd: the working directory; default the root of the tree.
        forked: whether ranks are forked from a process that has imported torch: all, none, or a
            collection of ranks. This saves six seconds of processor time for each. Do not use it in
            tests of how a process ends, of how others find it by its variables, or of variables
            that libraries read as they are loaded.
    """
    own = environment or {}
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
    }
    environments = [
        {**common, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), **each}
        for rank, each in enumerate([own] * world_size if isinstance(own, Mapping) else own)
    ]
    if isinstance(forked, bool):
        forked = range(world_size) if forked else ()
    return ScriptRanks([os.fspath(script), *args], environments, cwd, forked=forked)
