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

PRELOADED: Final = (
    *("torch", "torch.distributed", "torch._dynamo", "pytest", "crossover_ddp.pipeline"),
    *(
        () if is_here() else ("torchvision", "timm", "sklearn.datasets")
    ),  # for recipes, which need no device
    *(f"crossover_ddp.{each}_hooks" for each in ("averaging", "comm", "kfac", "muon")),
    *(f"{__package__}._worker", f"{__package__}._server"),
)
# The only one in the tests: there is one server for all contexts, and who names modules last has named them for all.
context: Final = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(list(PRELOADED))
START_TIMEOUT_S = 120.0
_ROOT: Final = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWNET: Final = 0x40000000


def forked(target: Any, args: tuple[Any, ...]) -> multiprocessing.context.ForkServerProcess:
    """Return a process of `context` to start. Its server begins at the root, from where it imports."""
    if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
        former = Path.cwd()
        os.chdir(_ROOT)
        forkserver.ensure_running()
        os.chdir(former)
    return context.Process(target=target, args=args)


class _Order(NamedTuple):
    """What a forked process is to be: a script, as if started by a command."""

    words: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    core: int | None
    namespace: str  # of the network; empty for the server's own


class ForkedScript(Child):
    """A `Child` that is forked, not started, for a command that runs a Python script; see `is_script`.

    It dies with the tests, and its variables show in ``/proc`` as the server's. Other options are those of
    `subprocess.Popen`, as far as tests need them.
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
        self._child_created = False  # for the parent's own end: nothing of it is to be waited for
        self.args, self.returncode = words, None
        self.stdin, self.stdout, self.stderr = None, None, None
        with contextlib.ExitStack() as theirs:
            if stdin == subprocess.DEVNULL:
                given = os.open(os.devnull, os.O_RDONLY)
            else:
                given, mine = os.pipe()
                self.stdin = os.fdopen(mine, "w" if text else "wb")
            theirs.callback(os.close, given)
            if stdout == subprocess.PIPE:
                mine, written = os.pipe()
                self.stdout = os.fdopen(mine, "r" if text else "rb")
                theirs.callback(os.close, written)
            else:
                written = _descriptor(stdout)
            order = _Order(
                list(words[words.index(sys.executable) + 1 :]),
                dict(environment),
                str(cwd or os.getcwd()),
                core,
                words[words.index("exec") + 1] if words[0] != sys.executable else "",
            )
            ours, told = context.Pipe()
            self._process = forked(_run, (order, told))
            self._process.start()
            told.close()
            assert self._process.pid is not None
            self.pid = self._process.pid
            with ours, contextlib.suppress(EOFError, ConnectionError):
                errors = written if stderr == subprocess.STDOUT else _descriptor(stderr)
                for stream in (given, written, errors):
                    reduction.send_handle(ours, stream, self.pid)
                if not ours.poll(START_TIMEOUT_S):
                    raise TimeoutError(
                        f"a forked script did not begin within {START_TIMEOUT_S:.0f} s"
                    )
                ours.recv_bytes()  # from now on signals to its session reach it

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
    """Say whether a command runs a Python script, by itself or in a network name space."""
    if sys.executable not in words[:-1]:
        return False
    place = list(words).index(sys.executable)
    before, first = list(words[:place]), words[place + 1]
    return (first.endswith(".py") or first == "-c") and (
        not before or before[1:3] == ["netns", "exec"]
    )


def forked_if_script(words: Sequence[str], environment: Mapping[str, str], **options: Any) -> Child:
    return (ForkedScript if is_script(words) else Child)(words, environment, **options)


def _run(order: _Order, tell: "Connection[Any, Any]") -> None:
    """Become the script. Unlike a command it ends without the interpreter's own end, but with all exit handlers."""
    os.setsid()
    streams = [reduction.recv_handle(tell) for _ in range(3)]
    tell.send_bytes(b"")
    tell.close()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the server dies with the tests
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if order.namespace:
        with open(f"/run/netns/{order.namespace}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"could not enter name space {order.namespace}")
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
            sys.argv.pop(1)  # the source, as an interpreter has it
            exec(order.words[1], {"__name__": "__main__"})
        else:
            sys.path[:0] = [str(Path(script).resolve().parent)]
            runpy.run_path(script, run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def start_like_anybody() -> None:
    """Let this process start others as one that nobody has forked: a loader's workers by the platform's own way.

    Who is forked by the server starts its own processes by a server of its own, which imports all that this one has.
    """
    multiprocessing.set_start_method(None, force=True)


def _take_variables(environment: Mapping[str, str]) -> None:
    """Do what imports would have done with variables, had these been there then."""
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    added = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path
    ]
    sys.path[:0] = added
