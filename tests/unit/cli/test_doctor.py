"""`crossover-ddp doctor` on this machine, and on machines that are not as they should be."""

import argparse
import importlib.metadata
import os
import re
import resource
import socket
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


def found(base: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = doctor.run(argparse.Namespace(), base=str(base))
    return code, capsys.readouterr().out


def test_where_all_is_well_there_is_nothing_to_mend(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(base, capsys) == (0, "nothing to fix\n")
    segment = join_at(base)
    assert found(base, capsys) == (0, "nothing to fix\n")
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
    name: str,
    value: str,
    state: str,
    mend: str,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    code, told = found(base, capsys)
    assert (code, told.split()[0]) == (int(state == "problem"), state)
    assert f"→ {mend}" in told


def test_versions_and_limits(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.9.1+cu128")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    code, told = found(base, capsys)
    assert code == 1
    assert "pip install 'torch>=2.11'" in told
    assert "ulimit -n 4096" in told


def test_shared_memory_that_cannot_serve(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "mount -t tmpfs" in found(base / "none", capsys)[1]
    home(base).mkdir(0o755)
    assert f"→ chmod 0700 {home(base)}" in found(base, capsys)[1]
    home(base).rmdir()
    home(base).touch()
    code, told = found(base, capsys)
    assert (code, "is not a directory of yours" in told) == (1, True)


def test_what_dead_jobs_have_left_is_removed_by_the_line_that_is_shown(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Process(base, job=2) as sibling:
        sibling.call("draw_turn")
        sibling.kill()
    code, told = found(base, capsys)
    assert (code, told.split()[0]) == (0, "note")
    mend = re.search("→ (.*)", told)
    assert mend is not None
    assert os.system(mend[1]) == 0
    assert found(base, capsys) == (0, "nothing to fix\n")
    (home(base) / "shopping list").touch()
    code, told = found(base, capsys)
    assert (code, "not a file of turns" in told) == (1, True)


def test_jobs_that_are_faster_side_by_side_are_named(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = join_at(base, job=10)
    segment.publish(mode=Mode.SIDE_BY_SIDE, turns_s=0.0107, side_s=0.01, pairs=2)
    code, told = found(base, capsys)
    assert (code, told.split()[0]) == (0, "note")
    assert "job a computes side by side: its turns were 7 % slower" in told
    assert "more loader workers" in told
    segment.leave()


def test_gloo_needs_a_host_name_of_this_machine(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert found(base, capsys)[0] == 0, "one machine will do"
    for host in ("192.0.2.1", "no-such-host.invalid"):  # of documentation: nobody has it
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        code, told = found(base, capsys)
        assert (code, f"host name {host} resolves to no address" in told) == (1, True)


def smi(here: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := here / "nvidia-smi").write_text(f"#!/bin/sh\necho 'GPU-1, {mode}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"{here}/{name}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(here / "mps"))


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
    mode: str,
    mps: bool,
    code: int,
    what: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    smi(tmp_path, mode, monkeypatch)
    (tmp_path / "mps").mkdir()
    if mps:
        (tmp_path / "mps" / "control").touch()
    assert (found(base, capsys)[0], code) == (code, code)
    assert what in found(base, capsys)[1]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "unset CUDA_LAUNCH_BLOCKING" in found(base, capsys)[1]
