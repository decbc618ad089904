"""`crossover-ddp doctor` on this machine, and on machines with simulated problems."""

import argparse
import importlib.metadata
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from crossover_ddp._turns.rules import Mode
from crossover_ddp.cli import cards, doctor
from tests.unit.turns.mutexes import home, join_at

Found = Callable[[], tuple[int, str]]
WELL = (0, "nothing to fix\n")
NO_TORCH = importlib.metadata.PackageNotFoundError("torch")


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide this machine's own problems, and return the patch for further changes."""
    for name in (*os.environ,):
        if name.startswith(("CROSSOVER_", "GLOO_", "CUDA_")) or name == "CC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_000, 10_000))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc" if name == "cc" else None)
    return monkeypatch


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (base := tmp_path / "shm").mkdir()
    return base


@pytest.fixture
def found(patch: pytest.MonkeyPatch, base: Path, capsys: pytest.CaptureFixture[str]) -> Found:
    """Return a function that runs the command, and returns its exit code and its output."""
    return lambda: (doctor.run(argparse.Namespace(), base=str(base)), capsys.readouterr().out)


def with_result(
    module: object, name: str, result: Any
) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Make a function return this result, or raise it."""
    how = {"side_effect" if isinstance(result, Exception) else "return_value": result}
    return lambda patch, base: patch.setattr(module, name, MagicMock(**how))


def beside_other_namespaces(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Add a network interface that is not in this mount of /sys. It counts as up."""
    patch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "nosuch0")])
    patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")


def at_host(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def change(patch: pytest.MonkeyPatch, _: Path) -> None:
        patch.delenv("GLOO_SOCKET_IFNAME")
        patch.setattr(socket, "gethostname", lambda: name)

    return change


def read_only(patch: pytest.MonkeyPatch, base: Path) -> None:
    patch.setattr(os, "access", lambda *_: False)
    patch.setattr(os, "ST_RDONLY", -1)


def with_gpu(
    driver: str, mps: bool = False, **variables: str
) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Put a fake nvidia-smi on the path. ``driver`` is its shell script."""

    def change(patch: pytest.MonkeyPatch, base: Path) -> None:
        (program := base.parent / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
        program.chmod(0o755)
        (pipe := base.parent / "mps").mkdir()
        if mps:
            (pipe / "control").touch()
        here = {"PATH": f"{base.parent}:{os.environ['PATH']}", "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
        for name, value in {**here, **variables}.items():
            patch.setenv(name, value)
        patch.setattr(shutil, "which", lambda name: f"{base.parent}/{name}")
        patch.setattr(cards, "_ANSWER_S", 0.1 if "sleep" in driver else 30.0)

    return change


@pytest.mark.parametrize(
    ("change", "code", "shown"),
    [
        *(
            (
                lambda patch, base, name=name, value=value: patch.setenv(name, value),
                code,
                f"→ {remedy}",
            )
            for name, value, code, remedy in (
                ("CROSSOVER_GROUP", "a/b", 1, "1-64 letters"),
                ("CROSSOVER_GRUOP", "a", 0, "unset CROSSOVER_GRUOP"),
                ("CROSSOVER_DISABLE", "1", 0, "unset CROSSOVER_DISABLE"),
                ("CROSSOVER_TIMELINE", "/dev/full", 1, "name another directory"),
                ("GLOO_SOCKET_IFNAME", "lo,nosuch0", 1, "export GLOO_SOCKET_IFNAME="),
                ("CC", "no-such-cc -m64", 0, "apt-get install gcc"),
            )
        ),
        # `crossover-ddp run` sets it.
        (lambda patch, base: patch.setenv("CROSSOVER_RUN_JOB", "7"), 0, "nothing to fix"),
        (with_result(importlib.metadata, "version", "2.9.1+cu128"), 1, "pip install 'torch>=2.11'"),
        (with_result(importlib.metadata, "version", NO_TORCH), 1, "pip install 'torch>=2.11'"),
        (with_result(resource, "getrlimit", (1024, 4096)), 0, "ulimit -n 4096"),
        (lambda patch, base: base.rmdir(), 1, "mount -t tmpfs"),
        (read_only, 1, "mount -o remount,rw"),
        (lambda patch, base: home(base).mkdir(0o755), 1, "got mode 0755; chmod 0700 it"),
        (lambda patch, base: home(base).touch(), 1, "to be a directory of this user"),
        (beside_other_namespaces, 0, WELL[1]),
        (at_host("localhost"), 0, ""),  # one machine will do
        # Addresses and names that are reserved for documentation.
        (at_host("192.0.2.1"), 1, "host name 192.0.2.1 resolves to no address"),
        (
            at_host("no-such-host.invalid"),
            1,
            "host name no-such-host.invalid resolves to no address",
        ),
        (with_gpu("exec sleep 1000"), 1, "nvidia-smi does not answer"),
        (
            with_gpu("echo NVIDIA-SMI has failed; exit 9"),
            1,
            "nvidia-smi does not answer: NVIDIA-SMI has failed",
        ),
        (with_gpu("echo No devices were found; exit 6"), 0, "nothing to fix"),
        (with_gpu("echo 'GPU-1, Default'"), 0, "no MPS in"),
        (with_gpu("echo 'GPU-1, Default'", mps=True), 0, "export CUDA_DEVICE_MAX_CONNECTIONS=8"),
        (
            with_gpu("echo 'GPU-1, Default'", True, CUDA_DEVICE_MAX_CONNECTIONS="8"),
            0,
            "nothing to fix",
        ),
        (with_gpu("echo 'GPU-1, Exclusive_Process'"), 1, "no second job"),
        (
            with_gpu("echo 'GPU-1, Exclusive_Process'", mps=True),
            0,
            "export CUDA_DEVICE_MAX_CONNECTIONS=8",
        ),
        (with_gpu("echo 'GPU-1, Prohibited'", mps=True), 1, "compute mode Prohibited"),
        (
            with_gpu("echo 'GPU-1, Default'", True, CUDA_LAUNCH_BLOCKING="1"),
            1,
            "unset CUDA_LAUNCH_BLOCKING",
        ),
    ],
)
def test_each_problem_is_shown_with_a_remedy(
    change: Callable[..., Any],
    code: int,
    shown: str,
    found: Found,
    patch: pytest.MonkeyPatch,
    base: Path,
) -> None:
    change(patch, base)
    got, output = found()
    assert (got, shown in output) == (code, True)
    assert output.startswith("problem") == (code == 1)


def test_the_shown_command_removes_the_files_of_dead_jobs(base: Path, found: Found) -> None:
    assert found() == WELL
    sibling = join_at(base, job=2)
    sibling.draw_turn()
    assert found() == WELL
    sibling.forget()
    for code, finding in (0, "note"), (1, "not a file of turns"):
        got, output = found()
        assert (got, finding in output) == (code, True)
        assert os.system(re.findall("→ (.*)", output)[0]) == 0
        assert found() == WELL
        (home(base) / "shopping list").touch()


def test_jobs_that_are_faster_side_by_side_are_shown(base: Path, found: Found) -> None:
    segment = join_at(base, job=10)
    segment.publish(mode=Mode.SIDE_BY_SIDE, turns_s=0.0107, side_s=0.01, pairs=2)
    code, output = found()
    assert (code, output.split()[0]) == (0, "note")
    assert "job a computes side by side: its turns were 7 % slower" in output
    assert "more loader workers" in output
    segment.publish(side_s=0.0)
    assert found() == WELL
    segment.leave()
