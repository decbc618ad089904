"""Child processes: starts them, waits for them without polling, and ends them.

[Note: no process is left behind]
There are three safeguards. First, the kernel sends a child a signal when the thread that started it
ends, even if that thread was killed. Second, a child leads a session, so one signal reaches all
processes in the session. Third, processes that have left the session, like torchrun's ranks, have
inherited an environment variable, the *mark*, by which they are found in /proc. A process that
clears its environment is not found. Our design.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SHELLS_OFFSET: Final = 128
"""Shells report the exit code 128 + n for a program that was ended by signal n."""
KILL_S: Final = 5.0
"""How long a killed process may take to end. It may be writing a core or be in a system call."""
_GRACE_S: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1
_ATTEMPTS: Final = 10
_prctl = ctypes.CDLL(None).prctl


class Child(subprocess.Popen[Any]):
    """A process that leads a new session, and gets a signal when the thread that started it ends.

    Args:
        words: the command and its arguments.
        environment: the complete environment of the process.
        death_signal: the signal that the kernel sends to the process when that thread ends.
            Default SIGTERM.
        core: the only core on which the process may run. Default None, which means any core.
        unblocked: signals that this process blocks but the child must not. Default none.
        options: further options for ``subprocess.Popen``.

    On failure: `OSError` if the process cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: int = signal.SIGTERM,
        core: int | None = None,
        unblocked: Iterable[int] = (),
        **options: Any,
    ) -> None:
        parent = os.getpid()

        def begin() -> None:  # runs between fork and exec: no import, no lock
            _prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
            if os.getppid() != parent:  # the parent died before the line above
                os._exit(SHELLS_OFFSET + death_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)
            if core is not None:
                os.sched_setaffinity(0, {core})

        super().__init__(
            list(words), env=dict(environment), start_new_session=True, preexec_fn=begin, **options
        )

    def poll(self) -> int | None:
        """Return the exit code, which is -n after signal n, or None while the process runs.

        The process stays a zombie until `wait`, so that its id and its session's id are not reused
        meanwhile.
        """
        if self.returncode is not None:
            return self.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal_session(self, *numbers: int) -> None:
        """Send signals to all processes in the session. After `wait` this does nothing."""
        if self.returncode is None:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)


def wait_any(children: Iterable[Child], timeout_s: float) -> None:
    """Block until one of the children has ended or the time is up."""
    _wait_for_one([child.pid for child in children], timeout_s)


def end(children: Iterable[Child], *, grace_s: float = _GRACE_S) -> None:
    """End children and their sessions with SIGTERM, and after ``grace_s`` seconds with SIGKILL.

    If ``grace_s`` is 0, they are killed at once.
    """
    unreaped = [child for child in children if child.returncode is None]
    for child in unreaped if grace_s else ():
        # A stopped process handles SIGTERM only once SIGCONT makes it continue.
        child.signal_session(signal.SIGTERM, signal.SIGCONT)
    deadline_s = time.monotonic() + grace_s
    while (
        running := [child for child in unreaped if child.poll() is None]
    ) and time.monotonic() < deadline_s:
        wait_any(running, deadline_s - time.monotonic())
    for child in unreaped:
        child.signal_session(signal.SIGKILL)
        child.wait()


# --- processes found by their mark ----------------------------------------------------------------


def marked(variable: str) -> Iterator[tuple[int, str]]:
    """Yield (process id, value) for every other process that has the environment variable.

    Only root finds the processes of other users.
    """
    prefix = f"{variable}=".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
                for each in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    if each.startswith(prefix):
                        yield int(entry.name), os.fsdecode(each.removeprefix(prefix))


def end_marked(variable: str, value: str) -> list[int]:
    """Kill all other processes in which ``variable`` is ``value``, and return their ids."""
    killed: set[int] = set()
    # Repeat until none is found, since a process may fork between the search and the kill.
    for _ in range(_ATTEMPTS):
        found = [pid for pid, mark in marked(variable) if mark == value]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        deadline_s = time.monotonic() + KILL_S
        for pid in found:
            _wait_for_one([pid], deadline_s - time.monotonic())
    return sorted(killed)


# --- waiting --------------------------------------------------------------------------------------


def _wait_for_one(pids: Iterable[int], timeout_s: float) -> None:
    with contextlib.ExitStack() as opened:
        ends = select.poll()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return  # this process has ended and was reaped
            opened.callback(os.close, descriptor)
            ends.register(descriptor, select.POLLIN)
        ends.poll(max(0.0, timeout_s) * 1000)
