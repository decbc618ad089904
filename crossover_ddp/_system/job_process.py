"""A command that ``crossover-ddp`` starts: its processes and their output.

[Note: no process is left behind]
A command leads a session of its own, so one signal reaches its whole group. torchrun starts each rank in yet another
session; such processes are found by a variable that they inherit. A process that clears its environment is not found.
If the starter is killed, the kernel sends SIGTERM to the command. Our design.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from .marked_processes import processes_with, send

_PR_SET_PDEATHSIG: Final = 1
_SHELLS_OFFSET: Final = 128
_prctl = ctypes.CDLL(None).prctl


class JobProcess:
    """The processes of one command.

    Args:
        words: the command.
        environment: all its variables but the mark.
        mark: a variable and its value, which no other process on this machine has.
        output: descriptor for what it writes; default pipes of its own, in ``streams``.

    On failure: `OSError` if the command cannot be started; nothing is left then.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        mark: tuple[str, str],
        output: int = subprocess.PIPE,
    ) -> None:
        self._variable, self._value = mark
        parent = os.getpid()

        def die_with_parent() -> None:  # runs between fork and exec: no import, no lock
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(_SHELLS_OFFSET + signal.SIGTERM)

        self._process = subprocess.Popen(
            list(words),
            env={**environment, self._variable: self._value},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.pid = self._process.pid
        self.streams = tuple(
            [each for each in (self._process.stdout, self._process.stderr) if each is not None]
        )
        for stream in self.streams:
            os.set_blocking(stream.fileno(), False)
        self.end_fd = os.pidfd_open(self.pid)
        """Readable once the command has ended."""

    def poll(self) -> int | None:
        """Return the command's exit code as shells number it; None while it runs.

        It stays a zombie until `close`, so that no other process gets its number, or its group's number, meanwhile.
        """
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status + (_SHELLS_OFFSET if ended.si_code != os.CLD_EXITED else 0)

    def wait(self, timeout_s: float) -> None:
        """Wait until the command has ended, or so long."""
        ended = select.poll()
        ended.register(self.end_fd, select.POLLIN)
        ended.poll(timeout_s * 1000)

    def survivors(self) -> list[int]:
        """Return the living processes of the job; after the command has ended, those that it has left."""
        return [pid for pid, value in processes_with(self._variable) if value == self._value]

    def signal_group(self, number: int) -> None:
        """Send a signal to the command and its group; nothing after `close`."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def terminate(self, number: int) -> None:
        """Ask the command and its group to end; SIGCONT, since a stopped process takes no signal before it goes on."""
        self.signal_group(number)
        self.signal_group(signal.SIGCONT)

    def pause(self) -> None:
        """Stop all processes of the job; twice, since one may fork between the look and the stop."""
        for _ in range(2):
            send(self.survivors(), signal.SIGSTOP)

    def resume(self) -> None:
        """Let all processes that `pause` has stopped go on."""
        send(self.survivors(), signal.SIGCONT)

    def kill(self) -> None:
        """Kill all processes of the job. Call it again later: one may fork between the look and the kill."""
        self.signal_group(signal.SIGKILL)
        send(self.survivors(), signal.SIGKILL)

    def close(self) -> None:
        """Close what this process holds open of the job, once the command has ended."""
        self.signal_group(signal.SIGKILL)
        self._process.wait()
        os.close(self.end_fd)
        for stream in self.streams:
            stream.close()
