"""torch's own tests of DistributedDataParallel, with a hook in every model that they make.

``python -m tests.conformance.torch_ddp`` runs those that come with torch, on two ranks, and fails if one of our hooks
fails a test that passes with torch's ``allreduce_hook``, or if none passes. Ten minutes; ``make campaign`` runs it.
"""

import importlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, crossover_hook, reduce_scatter_all_gather_hook
from tests import fake_cuda
from tests.harness.children import Child, end
from tests.harness.scripts import ROOT

HOOKS: Final[dict[str, Any]] = {
    "torch": lambda: (None, allreduce_hook),
    "split": lambda: (None, reduce_scatter_all_gather_hook),
    "crossover": lambda: (CrossoverState(), crossover_hook),
}
BACKENDS: Final[dict[str, dict[str, str]]] = {
    "gloo": {"BACKEND": "gloo"},
    "gloo on CUDA": {"BACKEND": "gloo", **fake_cuda.environment()},
    "nccl": {"BACKEND": "nccl", **fake_cuda.environment()},
}
# What a hook does not have to pass: each counts the all-reduces of a step, of which ours make none.
COUNTING: Final = ("test_ddp_profiling_torch_profiler", "test_ddp_profiling_autograd_profiler")
TIMEOUT_S: Final = 120.0


def torch_tests(hook: str) -> type[unittest.TestCase]:
    """Return torch's tests, whose models have ``hook``; each test has two ranks, forked from this process."""
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    try:
        importlib.import_module("expecttest")
    except ImportError:  # torch's base class of tests is made of it, and these expect no text
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.distributed import distributed_test

    # The parent has counted the fake devices and made no context, so that its children may.
    torch.cuda._is_in_bad_fork = lambda: False

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    original = DistributedDataParallel.__init__

    def with_hook(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        model.register_comm_hook(*HOOKS[hook]())

    DistributedDataParallel.__init__ = with_hook
    return Tests


def run(hook: str, wanted: list[str]) -> None:
    """Run tests in this process, one after the other, and say in a line of JSON how each ends."""
    tests = torch_tests(hook)
    for name in wanted:
        said = io.StringIO()
        result = unittest.TextTestRunner(said, verbosity=0).run(tests(name))
        how = "is skipped" if result.skipped else "passes" if result.wasSuccessful() else "fails"
        print(json.dumps([name, how, said.getvalue()[-3000:]]), flush=True)


def outcomes(hook: str, backend: str, wanted: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each test, how it ends in a process that runs them all, and what unittest has said of it."""
    left = list(wanted)
    while left:
        environment = {**os.environ, **BACKENDS[backend], "CROSSOVER_GROUP": f"torch-{os.getpid()}"}
        words = [sys.executable, "-m", "tests.conformance.torch_ddp", "--run", hook, *left]
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        process = Child(words, environment, cwd=ROOT, **streams)
        try:
            while left and (said := line_of(process)):
                left.remove(said[0])
                yield said
        finally:
            end([process], grace_s=0.0)
        if left:
            yield left.pop(0), "hangs or ends the process", ""


def line_of(process: Any) -> Any:
    """Return what a process says next in a line of JSON; None if it ends, or says nothing for too long."""
    watchdog = threading.Timer(TIMEOUT_S, process.signal_session, [signal.SIGKILL])
    watchdog.start()
    try:
        return next((json.loads(line) for line in process.stdout if line.startswith("[")), None)
    finally:
        watchdog.cancel()


def main() -> int:
    """Run tests whose names have any of the words, else all, with all hooks; return how many are worse with ours."""
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], sys.argv[3:])
        return 0
    worse = 0
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(BACKEND="gloo", TEMP_DIR=directory)
        every = [each for each in dir(torch_tests("torch")) if each.startswith("test_")]
        every = [
            each for each in every if "ddp" in each.lower() or "DistributedDataParallel" in each
        ]
        every = [each for each in every if any(word in each for word in sys.argv[1:] or [""])]
        for backend in BACKENDS:
            if backend != "gloo" and (reason := fake_cuda.why_not()):
                print(f"{backend}: not run, {reason}")
                continue
            theirs = {name: how for name, how, _ in outcomes("torch", backend, every)}
            print(f"{backend}, torch's own hook: {dict(Counter(theirs.values()))}", flush=True)
            passing = [name for name in every if theirs[name] == "passes" and name not in COUNTING]
            worse += not passing
            for hook in ("split", "crossover"):
                for name, how, said in outcomes(hook, backend, passing):
                    if how != "passes":
                        worse += 1
                        print(f"{backend}, {hook}: {name} {how}\n{said}", flush=True)
                print(
                    f"{backend}, {hook}: {len(passing)} tests run, worse so far: {worse}",
                    flush=True,
                )
    return worse


if __name__ == "__main__":
    sys.exit(bool(main()))
