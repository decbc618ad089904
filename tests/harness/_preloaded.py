"""Processes forked from one that has imported torch: they start in a tenth of a second instead of six.

Half of the six is ``import torch``, the other half ``torch._dynamo``, which the first optimizer of a process imports.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

context: Final = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch._dynamo", "torchvision", "timm"),
        *("sklearn.datasets", "pytest", "crossover_ddp"),
        *(f"{__package__}._worker", f"{__package__}._server"),
    ]
)
START_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG: Final = 1


class _Order(NamedTuple):
    """What a forked process is to be: a script, as if started by a command."""

    words: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    output: str


class ForkedScript:
    """A script in a forked process; what `Child` offers of a command, as far as tests use it.

    Args:
        words: the script and its arguments, without an interpreter.
        environment: all its variables.
        cwd: its working directory.
        output: the file that its standard output and error go to.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], cwd: Path, output: Path) -> None:
        order = _Order(list(words), dict(environment), str(cwd), str(output))
        begun, tell = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(order, tell))
        self._process.start()
        tell.close()
        with begun, contextlib.suppress(EOFError):
            if not begun.poll(START_TIMEOUT_S):
                raise TimeoutError(f"a forked script did not begin within {START_TIMEOUT_S:.0f} s")
            begun.recv_bytes()  # from now on signals to its session reach it
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        self._process.join()
        self.returncode = self._process.exitcode
        assert self.returncode is not None
        return self.returncode

    def signal_session(self, *numbers: int) -> None:
        """Send signals to it and to all in its session; nothing after `wait`."""
        if self.returncode is None:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)


def _run(order: _Order, begun: "Connection[Any, Any]") -> None:
    """Become the script. Unlike a command it ends without the interpreter's own end, but with all exit handlers."""
    os.setsid()
    begun.send_bytes(b"")
    begun.close()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the server dies with the tests
    descriptor = os.open(order.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.cwd)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=True)
    faulthandler.enable(all_threads=True)
    _take_variables(order.environment)
    sys.argv[:] = order.words
    sys.path[:0] = [str(Path(order.words[0]).resolve().parent)]
    try:
        runpy.run_path(order.words[0], run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _take_variables(environment: Mapping[str, str]) -> None:
    """Do what imports would have done with variables, had these been there then."""
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.path[:0] = added
