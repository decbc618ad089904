"""`crossover-ddp run` with real processes: ends, signals, queues, output, and that nothing is left behind.

The runner is this very process, the jobs are small shell and Python programs.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from crossover_ddp import cli
from crossover_ddp._system.children import Child, marked
from crossover_ddp._system.environment import RUN_JOB
from crossover_ddp.cli.doctor import machine_facts
from crossover_ddp.cli.doctor.findings import Gpu, Gpus
from crossover_ddp.cli.output import FINE, USAGE
from crossover_ddp.cli.run import command as cli_run
from crossover_ddp.cli.run import first_look, runner
from crossover_ddp.cli.run.commands import from_groups, named
from crossover_ddp.cli.run.first_look import FreeMemory, fitting, format_size
from tests.harness.groups import files_of
from tests.harness.waiting import eventually, state

ROOT = Path(__file__).resolve().parents[3]
FOREVER = "sleep 1000"


def runs(
    capsys: "pytest.CaptureFixture[str]", *groups: Sequence[str], options: Sequence[str] = ()
) -> dict[str, Any]:
    """Run jobs, each given by its words, and return the document; what was shown is in its ``shown``."""
    words = [word for group in groups for word in ("--", *group)]
    code = cli.main(["run", "--json", *options, *words])
    captured = capsys.readouterr()
    assert code != USAGE, captured.err
    document: dict[str, Any] = json.loads(captured.out)
    assert document["exit_code"] == code
    assert list(own_processes()) == []
    return {**document, "shown": captured.err}


def own_processes() -> list[int]:
    return [pid for pid, mark in marked(RUN_JOB) if mark.startswith(f"{os.getpid()}-")]


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def codes(document: dict[str, Any]) -> list[int | None]:
    return [job["exit_code"] for job in document["jobs"]]


def refused(capsys: "pytest.CaptureFixture[str]", *arguments: str) -> str:
    assert cli.main(["run", "--json", *arguments]) == USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_commands_of_the_docs_are_commands() -> None:
    lines = re.findall(
        r"^    crossover-ddp (run .+)$", (ROOT / "docs" / "command.md").read_text(), re.MULTILINE
    )
    groups = [cli.parse(shlex.split(line)).groups for line in lines]
    assert [len(named(from_groups(each))) for each in groups if each] == [2, 2]


# --- ends ----------------------------------------------------------------------------------------------------------


def test_all_is_well_if_all_jobs_end_well(capsys: "pytest.CaptureFixture[str]") -> None:
    document = runs(capsys, ["true"], ["true"])
    assert (document["exit_code"], codes(document)) == (FINE, [0, 0])
    assert [job["state"] for job in document["jobs"]] == ["ended", "ended"]
    assert [job["turns"] for job in document["jobs"]] == [0, 0]


def test_the_first_job_that_fails_gives_the_code_and_the_others_go_on(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> None:
    done = tmp_path / "done"
    waits = f"until [ -e {tmp_path}/failed ]; do sleep 0.02; done; sleep 0.1"
    document = runs(
        capsys,
        shell(f"{waits}; exit 4"),
        shell(f"touch {tmp_path}/failed; exit 3"),
        shell(f"touch {done}"),
    )
    assert (document["exit_code"], codes(document)) == (3, [4, 3, 0])
    assert done.exists()


def test_a_job_that_a_signal_kills_has_a_shells_code(capsys: "pytest.CaptureFixture[str]") -> None:
    assert runs(capsys, shell("kill -KILL $$"))["exit_code"] == 128 + signal.SIGKILL


def test_fail_fast_ends_the_others_and_starts_no_more(capsys: "pytest.CaptureFixture[str]") -> None:
    document = runs(capsys, shell("exit 5"), FOREVER.split(), ["true"], options=["--fail-fast"])
    assert (document["exit_code"], codes(document)) == (5, [5, 128 + signal.SIGTERM, None])
    assert [job["state"] for job in document["jobs"]] == ["ended", "ended", "not started"]
    assert [job["ended_by_us"] for job in document["jobs"]] == [False, True, False]


def test_no_more_than_k_run_at_once_and_the_next_starts_when_one_ends(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> None:
    job = f"echo begin >>{tmp_path}/log; sleep 0.2; echo end >>{tmp_path}/log"
    document = runs(capsys, *[shell(job)] * 5, options=["--at-once", "2"])
    assert codes(document) == [0] * 5
    depths, depth = [], 0
    for line in (tmp_path / "log").read_text().split():
        depth += 1 if line == "begin" else -1
        depths.append(depth)
    assert max(depths) == 2
    assert [job["began_s"] for job in document["jobs"]] == sorted(job["began_s"] for job in document["jobs"])


# --- nothing is left -----------------------------------------------------------------------------------------------


def test_what_a_job_leaves_running_is_ended(capsys: "pytest.CaptureFixture[str]") -> None:
    # One child in the job's group, one in a session of its own, as torchrun's ranks are.
    document = runs(
        capsys, shell(f"{FOREVER} & setsid {FOREVER} & sleep 0.2; exit 0"), options=["--grace", "1000"]
    )
    (job,) = document["jobs"]
    assert (job["exit_code"], job["left_over"]) == (0, 2)
    assert "ended what it left running (2)" in document["shown"]


def test_what_ignores_the_request_to_end_is_killed_after_the_grace(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> None:
    stubborn = f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    fails = shell(f"until [ -e {tmp_path}/up ]; do sleep 0.02; done; exit 9")
    document = runs(capsys, fails, shell(stubborn), options=["--fail-fast", "--grace", "0.5"])
    assert codes(document) == [9, 128 + signal.SIGKILL]
    assert document["wall_s"] >= 0.5


def test_a_killed_runner_takes_its_jobs_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crossover_ddp.cli", "run", "--json", "--", *FOREVER.split()]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as runner:
        assert runner.stderr is not None
        next(line for line in runner.stderr if "a started" in line)
        runner.kill()
        runner.wait()
    deadline_s = time.monotonic() + 60
    while left := [pid for pid, mark in marked(RUN_JOB) if mark.startswith(f"{runner.pid}-")]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_to_all_jobs_and_ends_the_run(
    number: signal.Signals, capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> None:
    name = number.name.removeprefix("SIG")
    hears = f"trap 'echo heard; exit 0' {name}; touch {tmp_path}/$CROSSOVER_JOB; while :; do sleep 0.02; done"
    waits = f"until [ -e {tmp_path}/1 -a -e {tmp_path}/2 ]; do sleep 0.02; done"
    sends = f"{waits}; trap 'echo heard; exit 0' {name}; kill -{name} $PPID; while :; do sleep 0.02; done"
    document = runs(
        capsys,
        *[["env", f"CROSSOVER_JOB={index}", *shell(hears)] for index in (1, 2)],
        shell(sends),
        ["true"],
        options=["--at-once", "3"],
    )
    assert (document["exit_code"], document["signal"]) == (128 + number, number)
    assert codes(document) == [0, 0, 0, None]
    assert document["shown"].count("| heard") == 3
    assert f"{number.name} passed on to a, b, c" in document["shown"]


def test_a_second_ctrl_c_kills_at_once(capsys: "pytest.CaptureFixture[str]", tmp_path: Path) -> None:
    stubborn = f"trap 'touch {tmp_path}/heard' INT; touch {tmp_path}/up; while :; do sleep 0.02; done"
    twice = (
        f"trap '' INT; until [ -e {tmp_path}/up ]; do sleep 0.02; done; kill -INT $PPID; "
        f"until [ -e {tmp_path}/heard ]; do sleep 0.02; done; kill -INT $PPID; {FOREVER}"
    )
    document = runs(capsys, shell(stubborn), shell(twice), options=["--grace", "1000"])
    assert document["exit_code"] == 128 + signal.SIGINT
    assert codes(document) == [128 + signal.SIGKILL] * 2
    assert "killing all jobs" in document["shown"]


def test_a_signal_that_comes_while_a_job_is_started_reaches_it(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(Child):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(runner, "Child", Hasty)
    document = runs(capsys, FOREVER.split())
    assert codes(document) == [128 + signal.SIGUSR1]


def test_other_signals_are_passed_on_and_end_nothing(
    capsys: "pytest.CaptureFixture[str]",
) -> None:
    saves = "trap 'echo saved; exit 0' USR1; kill -USR1 $PPID; while :; do sleep 0.02; done"
    document = runs(capsys, shell(saves))
    assert (document["exit_code"], document["signal"]) == (0, None)
    assert "a   | saved" in document["shown"]


def test_ctrl_z_stops_all_jobs_until_the_runner_goes_on() -> None:
    """Of each job a process in another session, too, as torchrun's ranks are."""
    job = "setsid sleep 1000 & echo up; wait"
    command = [sys.executable, "-m", "crossover_ddp.cli", "run", "--json", *["--", *shell(job)] * 2]
    # In a group of its own, as a shell with job control starts it; else nobody could let it go on.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as runner:
        assert runner.stderr is not None

        def of_jobs() -> list[int]:
            return [pid for pid, mark in marked(RUN_JOB) if mark.startswith(f"{runner.pid}-")]

        try:
            for _ in range(2):
                next(line for line in runner.stderr if "| up" in line)
            assert eventually(lambda: len(of_jobs()) == 4), of_jobs()
            runner.send_signal(signal.SIGTSTP)
            assert eventually(lambda: all(state(pid) == "T" for pid in [runner.pid, *of_jobs()]))
            assert len(of_jobs()) == 4
            runner.send_signal(signal.SIGCONT)
            next(line for line in runner.stderr if "going on after SIGTSTP, with a, b" in line)
            assert eventually(lambda: all(state(pid) != "T" for pid in of_jobs()))
            runner.send_signal(signal.SIGTERM)
            runner.communicate(timeout=60)
        finally:  # whatever has failed: nobody else would let it go on, and its end takes the jobs along
            runner.send_signal(signal.SIGCONT)
            runner.terminate()
    assert runner.returncode == 128 + signal.SIGTERM


def test_an_ignored_hang_up_stays_ignored(capsys: "pytest.CaptureFixture[str]") -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        document = runs(capsys, shell("kill -HUP $PPID; sleep 0.2"))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (document["exit_code"], document["signal"]) == (0, None)


def test_signals_are_handled_as_before_afterwards(capsys: "pytest.CaptureFixture[str]") -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    runs(capsys, ["true"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- output --------------------------------------------------------------------------------------------------------


def test_both_streams_are_shown_line_by_line_with_names(capsys: "pytest.CaptureFixture[str]") -> None:
    document = runs(
        capsys,
        shell("echo out; echo err >&2; printf 'no end'"),
        shell("printf half; sleep 0.2; printf '%s\\n' ' line'; head -c 200000 /dev/zero | tr '\\0' x"),
        options=["--name", "first", "--name", "low"],
    )
    lines = document["shown"].splitlines()
    assert {"first | out", "first | err", "first | no end", "low   | half line"} <= set(lines)
    assert all(line.startswith(("first | ", "low   | ", "run   | ")) for line in lines)
    assert sum(line.count("x") for line in lines if line.startswith("low   | xxx")) == 200000


def test_without_json_each_stream_goes_where_it_belongs(capsys: "pytest.CaptureFixture[str]") -> None:
    assert cli.main(["run", "--", *shell("echo out; echo err >&2")]) == 0
    captured = capsys.readouterr()
    assert "a   | out" in captured.out
    assert "a   | err" in captured.err
    assert "exit code" in captured.out
    assert re.search(r"exit code +seconds +turns", captured.out)


def test_logs_hold_each_jobs_lines_of_this_run(capsys: "pytest.CaptureFixture[str]", tmp_path: Path) -> None:
    logs = tmp_path / "deep" / "logs"
    for text in ("one", "two"):
        document = runs(capsys, shell(f"echo {text}; echo err >&2"), options=["--logs", str(logs)])
    assert document["jobs"][0]["log"] == str(logs / "a.log")
    assert sorted((logs / "a.log").read_text().splitlines()) == ["err", "two"]


def test_a_reader_that_goes_away_ends_no_job(tmp_path: Path) -> None:
    job = f"for i in 1 2 3; do echo line; sleep 0.2; done; touch {tmp_path}/done"
    command = [sys.executable, "-m", "crossover_ddp.cli", "run", "--json", "--", *shell(job)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as runner:
        assert runner.stderr is not None
        runner.stderr.readline()
        runner.stderr.close()
        assert runner.wait(60) == 0
    assert (tmp_path / "done").exists()


# --- what jobs get -------------------------------------------------------------------------------------------------


def variables(document: dict[str, Any], name: str) -> list[str]:
    return [line.partition(f"{name}=")[2] for line in document["shown"].splitlines() if f"| {name}=" in line]


def test_siblings_have_one_group_and_ports_of_their_own(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CROSSOVER_GROUP")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    first, second = (runs(capsys, ["env"], ["env"]) for _ in range(2))
    assert variables(first, "CROSSOVER_GROUP") == [first["group"]] * 2
    assert first["group"] != second["group"]
    assert len(set(variables(first, "MASTER_PORT"))) == 2


def test_a_group_in_the_environment_stays_and_an_argument_wins(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", "mine")
    assert variables(runs(capsys, ["env"]), "CROSSOVER_GROUP") == ["mine"]
    assert variables(runs(capsys, ["env"], options=["--group", "other"]), "CROSSOVER_GROUP") == ["other"]


def test_each_job_has_a_timeline_directory_of_its_own(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_TIMELINE", "/x")
    document = runs(capsys, ["env"], ["CROSSOVER_TIMELINE=/y env"])
    assert sorted(variables(document, "CROSSOVER_TIMELINE")) == ["/x/a", "/y"]


def test_commands_come_from_files(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "sweep.txt"
    lines.write_text("# a sweep\nLR=1 env\nLR=2 env # and another\n")
    assert sorted(variables(runs(capsys, options=["--commands", str(lines)]), "LR")) == ["1", "2"]


# --- refusals ------------------------------------------------------------------------------------------------------


def test_nothing_is_started_if_anything_is_wrong(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> None:
    touch = f"touch {tmp_path}/started"
    assert "none or not in PATH" in refused(capsys, "--", touch, "--", "no-such-program-here")
    assert "without shell syntax, got '|'" in refused(capsys, "--", touch, "--", "a | b")
    assert "for both a and b" in refused(capsys, "--", f"MASTER_PORT=7 {touch}", "--", "MASTER_PORT=7 true")
    assert "expected a file of commands" in refused(capsys, "--commands", f"{tmp_path}/none", "--", touch)
    assert "expected a directory to write to" in refused(capsys, "--logs", "/dev/null/x", "--", touch)
    assert "got none" in refused(capsys)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--at-once", "0"],
        ["--grace", "-1"],
        ["--group", "a/b"],
        ["--try-first", "x"],
    ],
)
def test_wrong_options_say_what_was_expected(
    options: list[str], capsys: "pytest.CaptureFixture[str]"
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *options, "--", "true"])
    assert ended.value.code == USAGE
    assert "expected" in capsys.readouterr().err


def test_without_rich_nothing_is_started_but_with_json(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["run", "--", "touch", f"{tmp_path}/started"]) == USAGE
    assert "pip install" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()
    assert codes(runs(capsys, ["touch", f"{tmp_path}/started"])) == [0]


def test_a_program_that_vanishes_before_its_start_is_a_failed_job(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    document = runs(capsys, ["rm", str(program)], [str(program)], options=["--at-once", "1"])
    assert (document["exit_code"], codes(document)) == (127, [0, 127])
    assert "b cannot be started" in document["shown"]


# --- memory --------------------------------------------------------------------------------------------------------

HOLDS = "import time\nblock = bytearray(200 << 20)\nprint('up', flush=True)\ntime.sleep(1.5)"


def test_the_first_job_shows_how_many_fit(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_facts, "available_memory_bytes", lambda: 300 << 20)
    monkeypatch.setattr(first_look, "START_UP_S", 0.5)
    holds = [sys.executable, "-S", "-c", HOLDS]
    document = runs(capsys, holds, ["true"], ["true"], options=["--try-first", "0.5", "--at-once", "3"])
    (room,) = document["memory"]
    assert 200 << 20 <= room["first_job_bytes"] < 280 << 20
    assert document["at_once"] == 1
    assert "only 1 at once instead of 3" in document["shown"]
    first, second, third = document["jobs"]
    assert first["ended_s"] <= second["began_s"]
    assert second["ended_s"] <= third["began_s"]


def test_the_others_start_beside_the_first_if_they_fit(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(first_look, "START_UP_S", 0.2)
    waits = shell(f"until [ -e {tmp_path}/second ]; do sleep 0.02; done")
    document = runs(capsys, waits, ["touch", f"{tmp_path}/second"], options=["--try-first", "0.2"])
    assert (codes(document), document["at_once"]) == ([0, 0], 2)
    assert document["jobs"][1]["began_s"] > 0.4


def gpus(monkeypatch: pytest.MonkeyPatch, *free_mib: int) -> None:
    listed = tuple(Gpu(f"GPU-{index}", "test", 1000, free, "Default") for index, free in enumerate(free_mib))
    monkeypatch.setattr(machine_facts, "gpus", lambda: Gpus(listed, len(listed), None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_smallest_memory_says_how_many_fit() -> None:
    memories = [FreeMemory("GPU-1", 100), FreeMemory("GPU-2", 50), FreeMemory("GPU-3", 1)]
    assert fitting(memories, {"GPU-1": 30, "GPU-2": 20, "GPU-3": 0}) == 2
    assert fitting(memories, {"GPU-1": 101}) == 0
    assert fitting(memories, {}) is None
    assert [format_size(size) for size in (1 << 10, 200 << 20, 3 << 29)] == ["1 KiB", "200 MiB", "1.5 GiB"]


def test_only_gpus_that_a_job_sees_count(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 1000, 600)
    document = runs(capsys, ["CUDA_VISIBLE_DEVICES=1 true"], ["CUDA_VISIBLE_DEVICES=1 true"])
    assert [(each["name"], each["free_bytes"]) for each in document["memory"]] == [("GPU-1", 600 << 20)]


def test_on_gpus_a_jobs_need_is_what_the_free_memory_falls_by(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 1000, 1000)
    monkeypatch.setattr(machine_facts, "gpu_free_bytes", lambda: {"GPU-0": 400 << 20})
    document = runs(capsys, ["sleep", "0.3"], ["true"], options=["--try-first", "0.1"])
    assert [room["first_job_bytes"] for room in document["memory"]] == [600 << 20, None]
    assert document["at_once"] == 1


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, True),
        ("", False),
        ("1", True),
        ("0, 1", True),
        ("0,-1,1", False),
        ("GPU-ab", True),
        ("GPU-c", False),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, seen: bool) -> None:
    assert cli_run.sees(visible, 1, Gpu("GPU-abc", "test", None, None, "Default")) is seen


def test_available_memory_is_the_least_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4096 << 10))
    assert machine_facts.available_memory_bytes(str(tmp_path / "none")) == 4096 << 10
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("4:memory:/old\n0::/slurm/job\n")
    for part, limit in (("slurm/job", "max"), ("slurm", "1000")):
        (tmp_path / part).mkdir(parents=True, exist_ok=True)
        (tmp_path / part / "memory.max").write_text(limit)
        (tmp_path / part / "memory.current").write_text("900")
        (tmp_path / part / "memory.stat").write_text("anon 700\ninactive_file 150\n")
    rooms = list(machine_facts._cgroup_free_bytes(str(cgroup), str(tmp_path)))
    assert rooms == [250]


# --- turns ---------------------------------------------------------------------------------------------------------

TAKES_TURNS = """
import sys, time
from pathlib import Path
from crossover_ddp import GPUMutex
here, own, other = Path(sys.argv[1]), *sys.argv[2:]
with GPUMutex(device="dev0") as mutex:
    (here / own).touch()
while not (here / other).exists():
    time.sleep(0.01)
for _ in range(60):
    with mutex:
        time.sleep(0.01)
    time.sleep(0.01)
(here / f"{own} done").touch()
while not (here / f"{other} done").exists():
    time.sleep(0.01)
mutex.close()
"""


def test_turns_of_siblings_are_counted_and_their_segments_are_gone(
    capsys: "pytest.CaptureFixture[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    jobs = [[sys.executable, "-c", TAKES_TURNS, str(tmp_path), *names] for names in ("ab", "ba")]
    document = runs(capsys, *jobs)
    assert codes(document) == [0, 0]
    # Turns after the last look at a job are not seen.
    assert all(1 < job["turns"] <= 61 for job in document["jobs"])
    assert files_of(document["group"]) == []


KEEPS_ITS_TURN = """
import os, signal
from crossover_ddp import GPUMutex
GPUMutex(device="dev0").acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_segments_of_killed_jobs_are_swept(
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    document = runs(capsys, [sys.executable, "-c", KEEPS_ITS_TURN])
    assert document["exit_code"] == 128 + signal.SIGKILL
    assert files_of(document["group"]) == []
