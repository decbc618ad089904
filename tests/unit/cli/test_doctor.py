"""`crossover-ddp doctor` on this machine, and on machines that are not as they should be."""

import argparse
import importlib.metadata
import os
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from crossover_ddp._turns.rules import Mode
from crossover_ddp.cli import doctor
from tests.unit.turns.joined_segments import Process, home, join_at


@pytest.fixture(autouse=True)
def _all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make this machine one that needs no mending."""
    for name in (*os.environ,):
        if name.startswith(("CROSSOVER_", "GLOO_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_000, 10_000))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (base := tmp_path / "shm").mkdir()
    return base


Found = Callable[[], tuple[int, str]]
WELL = (0, "nothing to fix\n")


@pytest.fixture
def found(base: Path, capsys: pytest.CaptureFixture[str]) -> Found:
    """Return the exit code and what is printed."""
    return lambda: (doctor.run(argparse.Namespace(), base=str(base)), capsys.readouterr().out)


def test_where_all_is_well_there_is_nothing_to_mend(base: Path, found: Found) -> None:
    assert found() == WELL
    segment = join_at(base)
    assert found() == WELL
    segment.leave()


@pytest.mark.parametrize(
    ("name", "value", "state", "mend"),
    [
        ("CROSSOVER_GROUP", "a/b", "problem", "1-64 letters"),
        ("CROSSOVER_GRUOP", "a", "note", "unset CROSSOVER_GRUOP"),
        ("CROSSOVER_DISABLE", "1", "note", "unset CROSSOVER_DISABLE"),
        ("CROSSOVER_TIMELINE", "/dev/full", "problem", "name another directory"),
        ("GLOO_SOCKET_IFNAME", "lo,nosuch0", "problem", "export GLOO_SOCKET_IFNAME="),
    ],
)
def test_variables_that_mislead_are_named(
    name: str, value: str, state: str, mend: str, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    code, told = found()
    assert (code, told.split()[0]) == (int(state == "problem"), state)
    assert f"→ {mend}" in told


def test_versions_and_limits(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda _: "2.9.1+cu128")
        code, told = found()
        assert (code, "pip install 'torch>=2.11'" in told) == (1, True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    code, told = found()
    assert (code, "ulimit -n 4096" in told) == (0, True)


def test_shared_memory_that_cannot_serve(base: Path, found: Found) -> None:
    base.rmdir()
    assert "mount -t tmpfs" in found()[1]
    base.mkdir()
    home(base).mkdir(0o755)
    told = found()[1]
    assert "got mode 0755; chmod 0700 it" in told
    assert "rm -r" not in told
    home(base).rmdir()
    home(base).touch()
    code, told = found()
    assert (code, f"{home(base)} to be a directory of this user" in told) == (1, True)


def test_what_dead_jobs_have_left_is_removed_by_the_line_that_is_shown(base: Path, found: Found) -> None:
    with Process(base, job=2) as sibling:
        sibling.call("draw_turn")
        sibling.kill()
    code, told = found()
    assert (code, told.split()[0]) == (0, "note")
    assert os.system(re.findall("→ (.*)", told)[0]) == 0
    assert found() == WELL
    (home(base) / "shopping list").touch()
    code, told = found()
    assert (code, "not a file of turns" in told) == (1, True)
    assert os.system(re.findall("→ (.*)", told)[0]) == 0
    assert found() == WELL


def test_jobs_that_are_faster_side_by_side_are_named(base: Path, found: Found) -> None:
    segment = join_at(base, job=10)
    segment.publish(mode=Mode.SIDE_BY_SIDE, turns_s=0.0107, side_s=0.01, pairs=2)
    code, told = found()
    assert (code, told.split()[0]) == (0, "note")
    assert "job a computes side by side: its turns were 7 % slower" in told
    assert "more loader workers" in told
    segment.publish(side_s=0.0)
    assert found() == WELL
    segment.leave()


def test_gloo_needs_a_host_name_of_this_machine(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert found()[0] == 0, "one machine will do"
    for host in ("192.0.2.1", "no-such-host.invalid"):  # of documentation: nobody has it
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        code, told = found()
        assert (code, f"host name {host} resolves to no address" in told) == (1, True)


def test_an_interface_of_which_sys_says_nothing_is_taken_as_up(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another network namespace's /sys."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "nosuch0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert found() == WELL


def test_a_driver_that_does_not_answer_is_a_problem(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program := tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"{tmp_path}/{name}")
    monkeypatch.setattr(doctor, "_ANSWER_S", 0.1)
    code, told = found()
    assert (code, "nvidia-smi does not answer" in told) == (1, True)


@pytest.mark.parametrize(
    ("mode", "mps", "code", "what"),
    [
        ("Default", False, 0, "no MPS in"),
        ("Default", True, 0, "nothing to fix"),
        ("Exclusive_Process", False, 1, "no second job"),
        ("Exclusive_Process", True, 0, "nothing to fix"),
        ("Prohibited", True, 1, "compute mode Prohibited"),
    ],
)
def test_gpus_and_mps(
    mode: str, mps: bool, code: int, what: str, found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program := tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho 'GPU-1, {mode}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"{tmp_path}/{name}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    (tmp_path / "mps").mkdir()
    if mps:
        (tmp_path / "mps" / "control").touch()
    got, told = found()
    assert (got, what in told) == (code, True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "unset CUDA_LAUNCH_BLOCKING" in found()[1]
