"""`crossover-ddp doctor` on this machine, and the facts that it reads there."""

import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from crossover_ddp import cli
from crossover_ddp.cli.doctor import command as cli_doctor
from crossover_ddp.cli.doctor import machine_facts
from crossover_ddp.cli.doctor.findings import Finding, Gpu, NetworkFacts, Severity
from crossover_ddp.cli.output import FINE, FOUND, USAGE
from tests.unit.turns.joined_segments import files, join_at

ROOT = Path(__file__).resolve().parents[3]
TOPICS = {
    "platform",
    "python",
    "torch",
    "gpu",
    "shared memory",
    "segments",
    "environment",
    "network",
    "threads",
}


# --- the command -----------------------------------------------------------------------------------------------------


def test_doctor_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert {each["topic"] for each in told["findings"]} >= TOPICS
    states = {each["state"] for each in told["findings"]}
    assert states <= {state.value for state in Severity}
    assert (code == FOUND) == ("problem" in states) == (told["state"] == "problem")
    assert any(torch.__version__ in each["what"] for each in told["findings"])


def test_doctor_makes_no_cuda_context() -> None:
    before = torch.cuda.is_initialized()
    cli_doctor.examine()
    assert torch.cuda.is_initialized() == before


def test_tables_show_each_finding_with_its_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Finding("network", Severity.PROBLEM, "odd [red]markup[/red]", "mend it"),
        Finding("gpu", Severity.OK, "fine", "not shown"),
    ]
    monkeypatch.setattr(cli_doctor, "examine", lambda **_: found)
    assert cli.main(["doctor"]) == FOUND
    shown = capsys.readouterr().out
    assert "odd [red]markup[/red]" in shown
    assert "→ mend it" in shown
    assert "not shown" not in shown


@pytest.mark.parametrize(
    ("states", "worst", "code"),
    [
        ([], Severity.OK, FINE),
        ([Severity.OK, Severity.NOTE], Severity.NOTE, FINE),
        ([Severity.NOTE, Severity.PROBLEM, Severity.OK], Severity.PROBLEM, FOUND),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(
    states: list[Severity], worst: Severity, code: int
) -> None:
    found = [Finding("x", state, "y") for state in states]
    assert (cli_doctor.worst(found), cli_doctor.exit_code(found)) == (worst, code)


def test_sweeping_removes_the_dead_and_says_so(tmp_path: Path) -> None:
    join_at(tmp_path, group="dead").forget()
    living = join_at(tmp_path, group="alive")
    found = [each for each in cli_doctor.examine(base=str(tmp_path)) if each.topic == "segments"]
    assert [each.mend for each in found if each.state is Severity.NOTE] == ["crossover-ddp doctor --sweep"]
    found = [
        each for each in cli_doctor.examine(base=str(tmp_path), sweep_first=True) if each.topic == "segments"
    ]
    assert [each.state for each in found] == [Severity.NOTE, Severity.OK]
    assert found[0].what.startswith("removed ")
    assert all(name.startswith("alive-") for name in files(tmp_path))
    living.leave()


def test_looking_alone_removes_nothing(tmp_path: Path) -> None:
    join_at(tmp_path).forget()
    before = files(tmp_path)
    cli_doctor.examine(base=str(tmp_path))
    assert files(tmp_path) == before


@pytest.mark.parametrize("words", [["doctor", "--json"]])
def test_without_psutil_a_line_says_how_to_get_it(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert cli.main(words) == USAGE
    assert "pip install 'crossover_ddp[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", re.findall(r"^    crossover-ddp (.+)$", (ROOT / "docs" / "command.md").read_text(), re.MULTILINE)
)
def test_commands_of_the_docs_are_understood(line: str) -> None:
    assert callable(cli.parse(shlex.split(line)).run)


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == FINE
    assert "examples:" in capsys.readouterr().out


# --- facts -----------------------------------------------------------------------------------------------------------


def test_gpus_are_read_from_the_drivers_table() -> None:
    table = "GPU-1, NVIDIA H, 80000, 70000, Default\n\nodd line\nGPU-2, B, [N/A], [N/A], Exclusive_Process\n"
    assert machine_facts.parse_gpus(table) == (
        Gpu("GPU-1", "NVIDIA H", 80_000, 70_000, "Default"),
        Gpu("GPU-2", "B", None, None, "Exclusive_Process"),
    )


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("echo 'GPU-1, H, 1, 1, Default'", 1),
        ("echo 'No devices were found'; exit 6", 0),
        ("echo nonsense", 0),
    ],
)
def test_the_driver_is_asked_for_gpus(
    script: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert len(machine_facts.gpus().listed) == count


def test_no_driver_lists_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_facts.gpus().listed == ()


def test_mps_is_looked_for_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not machine_facts.mps().control_pipe
    (tmp_path / "control").write_bytes(b"")
    found = machine_facts.mps()
    assert (found.pipe_directory, found.control_pipe) == (str(tmp_path), True)


def test_shared_memory_is_described(tmp_path: Path) -> None:
    found = machine_facts.shared_memory(str(tmp_path))
    assert (found.present, found.writable, found.directory, found.user) == (True, True, None, os.geteuid())
    assert found.free_bytes > 0
    segment = join_at(tmp_path)
    directory = machine_facts.shared_memory(str(tmp_path)).directory
    assert directory is not None
    assert (directory.is_directory, directory.owner, directory.mode) == (True, os.geteuid(), 0o700)
    segment.leave()
    assert not machine_facts.shared_memory(str(tmp_path / "missing")).present


def test_interfaces_are_read_as_far_as_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "odd0")
    seen = {"odd0": ("broadcast", 0), "fast0": ("up,broadcast,running", 10_000), "lo0": ("up,loopback", 0)}
    stats = {name: SimpleNamespace(flags=flags, speed=speed) for name, (flags, speed) in seen.items()}
    inet6 = SimpleNamespace(family=socket.AF_INET6, address="fe80::1%fast0")
    inet = SimpleNamespace(family=socket.AF_INET, address="10.0.0.1")
    link = SimpleNamespace(family=socket.AF_PACKET, address="00:00:00:00:00:01")
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"fast0": [link, inet6, inet], "gone0": [inet]})
    found = machine_facts.network()
    assert found.chosen == "odd0"
    assert [(each.name, each.up, each.loopback, each.mbit_s) for each in found.interfaces] == [
        ("fast0", True, False, 10_000),
        ("lo0", True, True, None),
        ("odd0", False, False, None),
    ]
    assert [each.addresses for each in found.interfaces] == [("10.0.0.1", "fe80::1"), (), ()]


def test_this_machine_has_a_loopback_with_addresses() -> None:
    found: NetworkFacts = machine_facts.network()
    (loopback,) = [each for each in found.interfaces if each.name == "lo"]
    assert loopback.loopback
    assert "127.0.0.1" in loopback.addresses


def test_a_name_that_nobody_knows_has_no_addresses() -> None:
    assert machine_facts._resolved("") in ((), ("127.0.0.1",), ("::1", "127.0.0.1"))
    assert machine_facts._resolved("a..b") == ()


@pytest.mark.parametrize(
    ("contents", "expected"), [("150000 100000", 1.5), ("max 100000", None), ("", None), ("1 0", None)]
)
def test_the_containers_quota_is_read(contents: str, expected: float | None, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(contents)
    assert machine_facts.cpu_quota(str(path)) == expected
    assert machine_facts.cpu_quota(str(tmp_path / "missing")) is None


def test_a_timeline_goes_where_its_directory_could_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_TIMELINE", str(tmp_path / "a" / "b"))
    assert machine_facts.timeline_writable()
    (tmp_path / "a").write_text("a file")
    assert not machine_facts.timeline_writable()
