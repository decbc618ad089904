"""torch's own tests of DistributedDataParallel, with a hook in every model that they make.

``python -m tests.conformance.torch_ddp`` runs the tests in torch's package, on two ranks. It fails
if a test passes with torch's ``allreduce_hook`` and fails with one of our hooks, or if no test
passes. It takes ten minutes. ``make campaign`` runs it.
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
# These tests count the all-reduces of a step, and our hooks make none. They need not pass.
COUNTING: Final = ("test_ddp_profiling_torch_profiler", "test_ddp_profiling_autograd_profiler")
TIMEOUT_S: Final = 120.0


def torch_tests(hook: str) -> type[unittest.TestCase]:
    """Return torch's tests, with ``hook`` in their models.

    Each test has two ranks, forked from this process.
    """
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    try:
        importlib.import_module("expecttest")
    except ImportError:
        # torch's base class of tests derives from this module's, but these tests do not use it.
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        stand_in.ACCEPT = False
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.distributed import distributed_test

    # Torch refuses CUDA in forked children. They may use it here: the parent has counted the fake
    # devices but made no context.
    torch.cuda._is_in_bad_fork = lambda: False

    class Tests(
        distributed_test.TestDistBackend,  # type: ignore[misc]
        distributed_test.DistributedTest._DistTestBase,  # type: ignore[misc]
    ):
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
    """Run tests in this process, one after the other, and print the outcome of each as JSON."""
    tests = torch_tests(hook)
    for name in wanted:
        output = io.StringIO()
        result = unittest.TextTestRunner(output, verbosity=0).run(tests(name))
        outcome = "passes" if result.wasSuccessful() else "fails"
        if result.skipped:
            outcome = "is skipped"
        print(json.dumps([name, outcome, output.getvalue()[-3000:]]), flush=True)


def outcomes(hook: str, backend: str, wanted: list[str]) -> Iterator[tuple[str, str, str]]:
    """Run tests in another process. Yield each test's name, its outcome and unittest's output.

    A test that hangs or ends the process is yielded as well. Another process runs the rest then.
    """
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
            while left and (outcome := line_of(process)):
                left.remove(outcome[0])
                yield outcome
        finally:
            end([process], grace_s=0.0)
        if left:
            yield left.pop(0), "hangs or ends the process", ""


def line_of(process: Any) -> Any:
    """Return the next line of JSON of a process. None if it ends, or writes none in time."""
    watchdog = threading.Timer(TIMEOUT_S, process.signal_session, [signal.SIGKILL])
    watchdog.start()
    try:
        return next((json.loads(line) for line in process.stdout if line.startswith("[")), None)
    finally:
        watchdog.cancel()


def main() -> int:
    """Run torch's tests of DDP with all hooks. Return how many do worse with our hooks.

    Arguments are parts of the names of the tests to run. Without arguments all tests run.
    """
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], sys.argv[3:])
        return 0
    worse = 0
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(BACKEND="gloo", TEMP_DIR=directory)
        tests = chosen_tests(sys.argv[1:])
        for backend in BACKENDS:
            if backend != "gloo" and (reason := fake_cuda.why_not()):
                print(f"{backend}: not run, {reason}")
                continue
            of_torch = {name: outcome for name, outcome, _ in outcomes("torch", backend, tests)}
            print(f"{backend}, torch's own hook: {dict(Counter(of_torch.values()))}", flush=True)
            passing = [
                name for name in tests if of_torch[name] == "passes" and name not in COUNTING
            ]
            worse += not passing
            for hook in ("split", "crossover"):
                for name, outcome, output in outcomes(hook, backend, passing):
                    if outcome != "passes":
                        worse += 1
                        print(f"{backend}, {hook}: {name} {outcome}\n{output}", flush=True)
                count = f"{len(passing)} tests run, worse so far: {worse}"
                print(f"{backend}, {hook}: {count}", flush=True)
    return worse


def chosen_tests(words: list[str]) -> list[str]:
    """Return the names of torch's tests of DDP that contain any of the words."""
    chosen = []
    for name in dir(torch_tests("torch")):
        is_of_ddp = "ddp" in name.lower() or "DistributedDataParallel" in name
        if name.startswith("test_") and is_of_ddp and any(word in name for word in words or [""]):
            chosen.append(name)
    return chosen


if __name__ == "__main__":
    sys.exit(bool(main()))
