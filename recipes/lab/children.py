"""Child processes of the lab and the tests: started, watched without polling, ended for sure.

[Note: no process is left behind]
Three nets, one below the other. A child gets a signal from the kernel when the thread that started it ends, even if
that was killed. A child leads a session, so one signal reaches what it has started there. And whatever has left the
session, as torchrun's ranks do, has inherited a variable, the *mark*, by which it is found. A process that clears its
environment is not found. Finding processes needs psutil. Our design.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

SHELLS_OFFSET: Final = 128
"""Shells number the exit of a program that signal n ended 128 + n."""
GRACE_S: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1
_SURELY_S: Final = 5.0  # a killed process may still write a core, or be in a system call
_ATTEMPTS: Final = 10
_prctl = ctypes.CDLL(None).prctl


class Child(subprocess.Popen[Any]):
    """A process that leads a session of its own, and dies with the thread that started it.

    Args:
        words: the command.
        environment: all its variables.
        death_signal: what the kernel sends it when its parent dies.
        core: the only core that it may run on; None leaves it free.
        options: further ones of ``subprocess.Popen``.

    On failure: `OSError` if it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: int = signal.SIGTERM,
        core: int | None = None,
        **options: Any,
    ) -> None:
        parent = os.getpid()

        def begin() -> None:  # runs between fork and exec: no import, no lock
            _prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above
                os._exit(SHELLS_OFFSET + death_signal)
            if core is not None:
                os.sched_setaffinity(0, {core})

        super().__init__(
            list(words), env=dict(environment), start_new_session=True, preexec_fn=begin, **options
        )

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n; None while it runs.

        It stays a zombie until `wait`, so that no other process gets its number, or its session's, meanwhile.
        """
        if self.returncode is not None:
            return self.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal_session(self, *numbers: int) -> None:
        """Send signals to it and to all in its session; nothing after `wait`."""
        if self.returncode is None:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)


def wait_any(children: Iterable[Child], timeout_s: float) -> None:
    """Block until one of the children has ended, or the time is over."""
    _wait_for_one([child.pid for child in children], timeout_s)


def end(children: Iterable[Child], *, grace_s: float = GRACE_S) -> None:
    """End children and their sessions: politely first if ``grace_s`` is more than 0, then for sure."""
    left = [child for child in children if child.returncode is None]
    for child in left if grace_s else ():
        # A stopped process hears nothing before it goes on.
        child.signal_session(signal.SIGTERM, signal.SIGCONT)
    deadline_s = time.monotonic() + grace_s
    while (
        running := [child for child in left if child.poll() is None]
    ) and time.monotonic() < deadline_s:
        wait_any(running, deadline_s - time.monotonic())
    for child in left:
        child.signal_session(signal.SIGKILL)
        child.wait()


# --- processes found by their mark --------------------------------------------------------------------------------


def marked(variable: str) -> Iterator[tuple[int, str]]:
    """Yield every other living process of this user that was started with ``variable``, and its value."""
    import psutil

    for process in psutil.process_iter(["uids", "environ"]):
        uids, variables = process.info["uids"], process.info["environ"] or {}
        if (
            variable in variables
            and uids
            and uids.real == os.getuid()
            and process.pid != os.getpid()
        ):
            yield process.pid, variables[variable]


def end_marked(variable: str, value: str) -> list[int]:
    """Kill every process with this mark; return which these were."""
    killed: set[int] = set()
    # Again until none is found: one may fork between the look and the kill.
    for _ in range(_ATTEMPTS):
        found = [pid for pid, mark in marked(variable) if mark == value]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        deadline_s = time.monotonic() + _SURELY_S
        for pid in found:
            _wait_for_one([pid], deadline_s - time.monotonic())
    return sorted(killed)


# --- waiting ------------------------------------------------------------------------------------------------------


def _wait_for_one(pids: Iterable[int], timeout_s: float) -> None:
    with contextlib.ExitStack() as opened:
        ends = select.poll()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return  # it is gone
            opened.callback(os.close, descriptor)
            ends.register(descriptor, select.POLLIN)
        ends.poll(max(0.0, timeout_s) * 1000)
