"""Starts a job's command, sends it signals, and ends it with all processes that it has started.

[Note: nothing survives]
A job's command is a `Child`, and the variable `RUN_JOB` marks all processes of the job; see
[Note: no process is left behind] in `_system/children.py`.

This process has one thread. It blocks its signals and waits for them (`signals_blocked`), so no
handler runs between checking a process and acting on it. Our design.
"""

import contextlib
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from crossover_ddp._system.children import KILL_S, SHELLS_OFFSET, Child, marked
from crossover_ddp._system.environment import RUN_JOB

ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that end a run."""
PASSED_ON: Final = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that are only passed on to jobs. Slurm can send them before an allocation ends."""
TICK_S: Final = 0.1
_POLL_S: Final = 0.25
_GRACE_AFTER_S: Final = 5.0
"""How long the processes of a job have that was ended because it was measured."""
_GRACE_S: Final = 30.0
_TAIL_LINES: Final = 10
_LONG_TAIL_LINES: Final = 50
"""The lines that are shown of a log that is not kept. torchrun's own report of an error is long."""
_LINE_BYTES: Final = 400
# Below Linux's ephemeral ports, so that no outgoing connection takes one in the meantime.
_NOT_EPHEMERAL: Final = range(20_000, 32_000)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=")


def free_ports() -> Iterator[int]:
    """Yield ports that are free at the moment. A port recurs only after all the others."""
    for port in itertools.cycle(random.sample(_NOT_EPHEMERAL, len(_NOT_EPHEMERAL))):
        with contextlib.suppress(OSError):
            with socket.socket() as probe:
                probe.bind(("", port))
            yield port


def reap_orphans(commands: Iterable[int]) -> None:
    """Reap orphaned job processes that this process has inherited.

    That happens if this process is process 1 of a container. ``commands`` are the process ids of
    the jobs' commands. These are not reaped, since their exit codes are still needed.
    """
    kept = {*commands}
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, ended)) and found.si_pid not in kept:
            os.waitpid(found.si_pid, 0)


@contextlib.contextmanager
def signals_blocked() -> Iterator[frozenset[int]]:
    """Block the signals that a run handles, and yield them for ``signal.sigtimedwait``.

    Signals that are still pending when the block ends take effect then. Ignored signals stay
    ignored, for example under nohup. SIGCHLD is the exception: if it is ignored, children leave no
    exit code.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handled = [
        number for number in ENDING | PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN
    ]
    numbers = frozenset([signal.SIGCHLD, *handled])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield numbers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class JobProcess(Child):
    """A job's command, with all processes that it starts.

    Args:
        words: the command. ``NAME=VALUE`` words before the program set variables.
        variables: the environment of the command.
        log: the file for the output of all processes. An existing file is overwritten.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.began_s = time.monotonic()
        self.took_s = 0.0
        # The command's exit code, as shells report it. None while the command runs.
        self.code: int | None = None
        # When to kill the remaining processes, on the monotonic clock.
        self._kill_at_s = float("inf")
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        assignments = [*itertools.takewhile(_VARIABLE.match, words)]
        # `env` would take a program path that contains "=" for an assignment. So `nice` starts it.
        nice = shutil.which("nice") or "nice"  # here, since the command may set its own PATH

        with log.open("wb") as output:
            super().__init__(
                ["env", *assignments, nice, "-n0", "--", *words[len(assignments) :]],
                {"PYTHONUNBUFFERED": "1", **variables, RUN_JOB: self._mark},
                unblocked=ENDING | PASSED_ON | {signal.SIGCHLD},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def living(self) -> list[int]:
        """Return the process ids of the job's living processes."""
        return [pid for pid, mark in marked(RUN_JOB) if mark == self._mark]

    def send(self, *numbers: int) -> None:
        """Send signals to the session while the command runs, and to each process afterwards.

        SIGKILL always goes to each process, even while the command runs.
        """
        running = self.poll() is None
        for number in numbers:
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if running:
                    os.killpg(self.pid, number)
            for pid in self.living() if number == signal.SIGKILL or not running else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def end(self, number: int, grace_s: float = _GRACE_S) -> None:
        """Ask the job to end, by a signal. After ``grace_s``, `supervise` kills what is left."""
        self.send(number, signal.SIGCONT)  # a stopped process handles a signal once it continues
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + grace_s)

    def supervise(self) -> bool:
        """Advance the end of the job, and return whether no process is left. Call this repeatedly.

        When the command has ended, the remaining processes are asked to end. After a grace period
        they are killed.
        """
        code = self.poll()
        if self.code is None and code is not None:
            self.wait()
            self.code = code if code >= 0 else SHELLS_OFFSET - code
            self.took_s = time.monotonic() - self.began_s
            self.end(signal.SIGTERM)
        if time.monotonic() >= self._kill_at_s:
            self.send(signal.SIGKILL)
        return self.code is not None and not self.living()

    def finish(self, number: int = signal.SIGKILL, grace_s: float = 0.0) -> None:
        """Ask all processes of the job to end, and wait for that. After ``grace_s``, kill them."""
        self.end(number, grace_s)
        deadline_s = self._kill_at_s + KILL_S
        while not self.supervise() and time.monotonic() < deadline_s:
            time.sleep(TICK_S / 10)

    def last_lines(self, count: int = _TAIL_LINES) -> str:
        """Return the last lines of the log, indented, or an empty string if the log is gone."""
        lines = list[str]()
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - count * _LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "".join(f"    {line}\n" for line in lines[-count:])

    def how_it_ended(self, code: int | None) -> str:
        """Return a text with the command's exit ``code``, its length and the end of its log."""
        ended = f"the command ended with {code} after {self.took_s:.0f} s; its last lines:"
        return f"{ended}\n{self.last_lines(_LONG_TAIL_LINES)}".rstrip()


def run_until(job: JobProcess, numbers: Iterable[int], is_over: Callable[[], bool]) -> int | None:
    """Let a job run until it ends or ``is_over`` returns True. Then end all its processes.

    ``numbers`` are those of `signals_blocked`. Return the command's exit code, or None if it was
    ended. Raises ``SystemExit``, with the exit code of shells, if a signal asks this process to
    end.
    """
    try:
        while not job.supervise() and not is_over():
            came = signal.sigtimedwait(numbers, _POLL_S)
            if came and came.si_signo in ENDING:
                raise SystemExit(SHELLS_OFFSET + came.si_signo)
        return job.code
    finally:
        job.finish(signal.SIGTERM, _GRACE_AFTER_S)
