"""torch's own tests of DistributedDataParallel, with a hook in every model that they make.

``python -m tests.conformance.torch_ddp`` runs those that come with torch, on two ranks on gloo, on gloo with the fake
CUDA device, and on its NCCL, first with torch's ``allreduce_hook``, then with hooks of ours, and fails if one of ours
fails a test that passes with torch's. Half an hour of two cores; ``make campaign`` runs it.
"""

import argparse
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
import unittest
from typing import Any, Final

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, crossover_hook, reduce_scatter_all_gather_hook
from crossover_ddp.codecs import CompressedState, compressed_hook
from tests import fake_cuda
from tests.harness.scripts import ROOT

HOOKS: Final[dict[str, Any]] = {
    "torch": lambda: (None, allreduce_hook),
    "split": lambda: (None, reduce_scatter_all_gather_hook),
    "crossover": lambda: (CrossoverState(), crossover_hook),
    "compressed": lambda: (CompressedState(codec=None), compressed_hook),
}
BACKENDS: Final[dict[str, dict[str, str]]] = {
    "gloo": {"BACKEND": "gloo"},
    "gloo on CUDA": {"BACKEND": "gloo", **fake_cuda.environment()},
    "nccl": {"BACKEND": "nccl", **fake_cuda.environment()},
}
TIMEOUT_S: Final = 120.0


def torch_tests(hook: str) -> type[unittest.TestCase]:
    """Return torch's tests, whose models have ``hook``; each test has two ranks, forked from this process."""
    os.environ.update(WORLD_SIZE="2", TEMP_DIR=tempfile.mkdtemp(), MASTER_ADDR="127.0.0.1")
    try:
        importlib.import_module("expecttest")
    except ImportError:  # torch's base class of tests is made of it, and these expect no text
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.distributed import distributed_test

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


def names() -> list[str]:
    found = [name for name in dir(torch_tests("torch")) if name.startswith("test_")]
    return [name for name in found if "ddp" in name.lower() or "DistributedDataParallel" in name]


def run_one(hook: str, name: str) -> int:
    """Run one test in this process; 0: passed, 1: failed, 2: skipped."""
    result = unittest.TextTestRunner(verbosity=0).run(torch_tests(hook)(name))
    return 2 if result.skipped else int(not result.wasSuccessful())


def outcome(hook: str, backend: str, name: str) -> tuple[str, str]:
    """Return how a test ends in a process of its own, and the last that it writes."""
    environment = {**os.environ, **BACKENDS[backend], "CROSSOVER_GROUP": f"torch-{os.getpid()}"}
    command = [sys.executable, "-m", __spec__.name, "--run", hook, name]
    try:
        ran = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs", ""
    return {0: "passes", 2: "is skipped"}.get(ran.returncode, "fails"), ran.stderr[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=2, metavar=("HOOK", "TEST"), help="one test, in this process")
    parser.add_argument("--hooks", nargs="+", default=["split", "crossover"], choices=[*HOOKS])
    parser.add_argument("--backends", nargs="+", default=[*BACKENDS], choices=[*BACKENDS])
    parser.add_argument("--only", default="", help="part of a test's name")
    given = parser.parse_args()
    if given.run:
        return run_one(*given.run)
    os.environ.setdefault("BACKEND", "gloo")
    worse = 0
    for backend in given.backends:
        if backend != "gloo" and (reason := fake_cuda.why_not()):
            print(f"{backend}: not run, {reason}")
            continue
        counts = dict.fromkeys(("passes", "fails", "hangs", "is skipped"), 0)
        for name in [each for each in names() if given.only in each]:
            theirs, _ = outcome("torch", backend, name)
            counts[theirs] += 1
            print(f"{backend:12} {name}: {theirs}", flush=True)
            for hook in given.hooks if theirs == "passes" else []:
                ours, written = outcome(hook, backend, name)
                if ours != "passes":
                    worse += 1
                    print(f"  with {hook} it {ours}:\n{written}", flush=True)
        print(f"{backend}: with torch's own hook {counts}; worse with ours so far: {worse}", flush=True)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
