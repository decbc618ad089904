"""A command that is started, signalled and ended with everything that it has started.

[Note: nothing survives]
A job leads a session, so one signal reaches all of it there, and the kernel sends it SIGTERM if this process dies.
What has left the session, as torchrun's ranks do, has inherited a variable, the *mark*, by which it is found in /proc.
A process that clears its environment is not found. Signals for this process are blocked and waited for, so that none
comes between a look and a deed; it has one thread. Our design.
"""

import contextlib
import ctypes
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from crossover_ddp._system.environment import RUN_JOB

SHELLS_OFFSET: Final = 128
"""Shells number the exit of a program that signal n ended 128 + n."""
ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
PASSED_ON: Final = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2}
)  # what Slurm sends before the end, if asked to
TICK_S: Final = 0.1
_GRACE_S: Final = 30.0
_SURELY_S: Final = 5.0  # a killed process may still write a core, or be in a system call
_TAIL_BYTES, _TAIL_LINES = 4096, 10
_NOT_EPHEMERAL: Final = range(
    20_000, 32_000
)  # no connection of another job gets one of these meanwhile
_PR_SET_PDEATHSIG: Final = 1
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=")
_prctl = ctypes.CDLL(None).prctl


def free_ports() -> Iterator[int]:
    """Yield ports that nobody listens on at that moment, each again only after all others."""
    for port in itertools.cycle(random.sample(_NOT_EPHEMERAL, len(_NOT_EPHEMERAL))):
        with contextlib.suppress(OSError):
            with socket.socket() as probe:
                probe.bind(("", port))
            yield port


def reap(others: Iterable[int]) -> None:
    """Reap what jobs have left, as a container's process 1 must; not the ``others``, whose codes are asked for."""
    kept, ended = {*others}, os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, ended)) and found.si_pid not in kept:
            os.waitpid(found.si_pid, 0)


@contextlib.contextmanager
def waited_for_signals() -> Iterator[frozenset[int]]:
    """Block the signals that a run hears, for ``signal.sigtimedwait``; afterwards those that came take effect.

    Those that are ignored, as under nohup, stay ignored; but SIGCHLD, without which children leave no exit code.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heard = [
        number for number in ENDING | PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN
    ]
    numbers = frozenset([signal.SIGCHLD, *heard])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield numbers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Job(subprocess.Popen[bytes]):
    """A command and all that it starts, which write to ``log``, made anew.

    ``env`` sets each ``NAME=VALUE`` before the program, but would take a path with ``=`` for one: ``nice`` starts it.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.log, self.began_s, self.took_s = log, time.monotonic(), 0.0
        self.code: int | None = None
        """Of the command, as shells number it; None while it runs."""
        self._kill_s = float("inf")
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        parent, own = os.getpid(), [*itertools.takewhile(_VARIABLE.match, words)]
        nice = shutil.which("nice") or "nice"  # not in the PATH that the command may set

        def begin() -> None:  # runs between fork and exec: no import, no lock
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above
                os._exit(SHELLS_OFFSET + signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING | PASSED_ON | {signal.SIGCHLD})

        with log.open("wb") as output:
            super().__init__(
                ["env", *own, nice, "-n0", "--", *words[len(own) :]],
                env={"PYTHONUNBUFFERED": "1", **variables, RUN_JOB: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=begin,
            )

    def left(self) -> list[int]:
        """Return the living processes of the job."""
        mark, found = f"{RUN_JOB}={self._mark}".encode(), []
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if entry.name.isdigit() and mark in Path(entry.path, "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(entry.name))
        return found

    def send(self, *numbers: int) -> None:
        """Send signals to the session while the command runs; kill, and what it has left, one by one."""
        running = self.poll() is None
        for number in numbers:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if running:
                    os.killpg(self.pid, number)
            for pid in self.left() if number == signal.SIGKILL or not running else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def end(self, number: int, grace_s: float = _GRACE_S) -> None:
        """Ask the job to end, and have `is_over` kill it after the grace."""
        self.send(number, signal.SIGCONT)  # a stopped process hears nothing before it goes on
        self._kill_s = min(self._kill_s, time.monotonic() + grace_s)

    def is_over(self) -> bool:
        """Note the command's end, ask what it has left to end, kill what is late; return whether nothing is left."""
        code = self.poll()
        if self.code is None and code is not None:
            self.code = code if code >= 0 else SHELLS_OFFSET - code
            self.took_s = time.monotonic() - self.began_s
            self.end(signal.SIGTERM)
        if time.monotonic() >= self._kill_s:
            self.send(signal.SIGKILL)
        return self.code is not None and not self.left()

    def finish(self, number: int = signal.SIGKILL, grace_s: float = 0.0) -> None:
        """End all of it, and wait for that."""
        self.end(number, grace_s)
        surely_s = self._kill_s + _SURELY_S
        while not self.is_over() and time.monotonic() < surely_s:
            time.sleep(TICK_S / 10)

    def last_lines(self) -> str:
        """Return the end of what it has written, as far as that is still there."""
        lines = list[str]()
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "".join(f"    {line}\n" for line in lines[-_TAIL_LINES:])
