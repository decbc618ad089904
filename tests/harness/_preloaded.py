"""Processes that are forked from a server which has imported torch.

They start in a tenth of a second instead of six. Half of the six seconds is ``import torch``. The
other half is ``torch._dynamo``, which the first optimizer of a process imports.
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
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.fake_cuda import is_here

from .children import Child

# Recipes use these modules. No recipe runs on the fake device.
_FOR_RECIPES: Final = () if is_here() else ("torchvision", "timm", "sklearn.datasets")
PRELOADED: Final = (
    *("torch", "torch.distributed", "torch._dynamo", "pytest", "crossover_ddp.pipeline"),
    *_FOR_RECIPES,
    *(f"crossover_ddp.{each}_hooks" for each in ("averaging", "comm", "kfac", "muon")),
    *(f"{__package__}._worker", f"{__package__}._server"),
)
# The only forkserver context in the tests. All contexts share one server, and the last call of
# `set_forkserver_preload` decides for all of them.
context: Final = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(list(PRELOADED))
START_TIMEOUT_S = 120.0
_ROOT: Final = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWNET: Final = 0x40000000


def forked(target: Any, args: tuple[Any, ...]) -> multiprocessing.context.ForkServerProcess:
    """Return a process of `context`, not started yet. The server starts at the root to import."""
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        former = Path.cwd()
        os.chdir(_ROOT)
        forkserver.ensure_running()
        os.chdir(former)
    return context.Process(target=target, args=args)


class _Order(NamedTuple):
    """Describes the script that a forked process becomes, as if a command had started it."""

    words: Sequence[str]  # the script and its arguments
    environment: Mapping[str, str]
    cwd: str
    core: int | None  # the only core that it may use
    namespace: str  # the network namespace; empty for the server's own


class ForkedScript(Child):
    """A `Child` that is forked instead of started, for a command that runs a Python script.

    `is_script` decides which commands these are. The process dies with the tests. ``/proc`` shows
    the server's variables instead of its own. The other options are those options of
    `subprocess.Popen` that tests need.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: int = signal.SIGKILL,
        core: int | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = subprocess.STDOUT,
        text: bool = False,
    ) -> None:
        assert is_script(words)
        assert death_signal == signal.SIGKILL
        # `Popen.__del__` must not wait for this process: Popen has not created it.
        self._child_created = False
        self.args = words
        self.returncode = None
        self.stdin = None
        self.stdout = None
        self.stderr = None
        with contextlib.ExitStack() as child_ends:  # closed here once the child has them
            if stdin == subprocess.DEVNULL:
                input_end = os.open(os.devnull, os.O_RDONLY)
            else:
                input_end, own_end = os.pipe()
                self.stdin = os.fdopen(own_end, "w" if text else "wb")
            child_ends.callback(os.close, input_end)
            if stdout == subprocess.PIPE:
                own_end, output_end = os.pipe()
                self.stdout = os.fdopen(own_end, "r" if text else "rb")
                child_ends.callback(os.close, output_end)
            else:
                output_end = _descriptor(stdout)
            order = _Order(
                list(words[words.index(sys.executable) + 1 :]),
                dict(environment),
                str(cwd or os.getcwd()),
                core,
                words[words.index("exec") + 1] if words[0] != sys.executable else "",
            )
            connection, child_connection = context.Pipe()
            self._process = forked(_run, (order, child_connection))
            self._process.start()
            child_connection.close()
            assert self._process.pid is not None
            self.pid = self._process.pid
            with connection, contextlib.suppress(EOFError, ConnectionError):
                error_end = output_end if stderr == subprocess.STDOUT else _descriptor(stderr)
                for stream in (input_end, output_end, error_end):
                    reduction.send_handle(connection, stream, self.pid)
                if not connection.poll(START_TIMEOUT_S):
                    raise TimeoutError(
                        f"a forked script did not begin within {START_TIMEOUT_S:.0f} s"
                    )
                # The child has a session of its own: from now on signals to it arrive.
                connection.recv_bytes()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.returncode = code
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()
        return code


def _descriptor(stream: Any) -> int:
    return stream if isinstance(stream, int) else int(stream.fileno())


def is_script(words: Sequence[str]) -> bool:
    """Return whether a command runs a Python script, directly or in a network namespace."""
    if sys.executable not in words[:-1]:
        return False
    position = list(words).index(sys.executable)
    before = list(words[:position])
    first = words[position + 1]
    is_python = first.endswith(".py") or first == "-c"
    return is_python and (not before or before[1:3] == ["netns", "exec"])


def forked_if_script(words: Sequence[str], environment: Mapping[str, str], **options: Any) -> Child:
    return (ForkedScript if is_script(words) else Child)(words, environment, **options)


def _run(order: _Order, connection: "Connection[Any, Any]") -> None:
    """Become the script.

    At the end all exit handlers run, but the interpreter is not torn down as after a command.
    """
    os.setsid()
    streams = [reduction.recv_handle(connection) for _ in range(3)]
    connection.send_bytes(b"")
    connection.close()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the server dies with the tests
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if order.namespace:
        with open(f"/run/netns/{order.namespace}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"could not enter namespace {order.namespace}")
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.cwd)
    sys.stdin = open(0)  # noqa: SIM115
    for output in (sys.stdout, sys.stderr):
        assert isinstance(output, io.TextIOWrapper)
        output.reconfigure(write_through=True)
    faulthandler.enable(all_threads=True)
    _take_variables(order.environment)
    start_like_anybody()
    script = order.words[0]
    sys.argv[:] = order.words
    try:
        if script == "-c":
            sys.argv.pop(1)  # the source, which an interpreter leaves out of sys.argv
            exec(order.words[1], {"__name__": "__main__"})
        else:
            sys.path[:0] = [str(Path(script).resolve().parent)]
            runpy.run_path(script, run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def start_like_anybody() -> None:
    """Reset the start method, so that this process starts others by the platform's default.

    A process that the forkserver forked would otherwise start its own processes, such as a data
    loader's workers, with another forkserver, which imports all of `PRELOADED` again.
    """
    multiprocessing.set_start_method(None, force=True)


def _take_variables(environment: Mapping[str, str]) -> None:
    """Apply those variables that torch and Python read on import, which is already done."""
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    added = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path
    ]
    sys.path[:0] = added
