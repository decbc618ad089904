"""`crossover-ddp run` with real processes: ends, signals, queues, logs, and that nothing is left behind."""

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from crossover_ddp import cli
from crossover_ddp.cli import jobs
from crossover_ddp.cli import run as cli_run
from tests.harness.waiting import eventually, state

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "crossover_ddp.cli", "run"]
FOREVER = "sleep 1000"
UP = "touch $UP/$MASTER_PORT"  # the job is under way


class Run:
    """One run under way, its logs in a directory of its own; none of its processes outlives the test."""

    def __init__(self, here: Path, *words: str, **variables: str) -> None:
        (here / "up").mkdir(exist_ok=True)
        self.here = here
        self._process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT), "UP": str(here / "up"), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.shown = ""

    def up(self, jobs: int) -> "Run":
        assert eventually(lambda: len([*(self.here / "up").iterdir()]) == jobs)
        return self

    def tell(self, number: int) -> "Run":
        self._process.send_signal(number)
        return self

    def tell_and_wait(self, number: int) -> "Run":
        """Send a signal and return once it was taken: of two that wait the process would hear one."""
        self.tell(number)
        status = Path(f"/proc/{self.pid}/status")
        assert eventually(lambda: not int(status.read_text().split("ShdPnd:")[1].split()[0], 16))
        return self

    def code(self) -> int:
        """Wait for the end; nothing may be left."""
        _, self.shown = self._process.communicate(timeout=60)
        assert self.processes() == []
        return self._process.returncode

    def processes(self) -> list[int]:
        """Return the processes of the run's jobs."""
        mark, found = f"CROSSOVER_RUN_JOB={self.pid}-".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def log(self, job: int) -> str:
        return (self.here / "crossover-run" / f"{job}.log").read_text()

    def close(self) -> None:
        for pid in (self.pid, *self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()


Runs = Callable[..., Run]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Start jobs, each a text for bash."""
    begun: list[Run] = []

    def starting(*jobs: str, options: str = "", **variables: str) -> Run:
        words = [word for job in jobs for word in ("--", "bash", "-c", job)]
        begun.append(Run(tmp_path, *shlex.split(options), *words, **variables))
        return begun[-1]

    yield starting
    for each in begun:
        each.close()


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "code"), [(["true", "true"], 0), (["kill -KILL $$"], 137), (["exec nosuch"], 127)]
)
def test_the_exit_code_is_the_jobs(jobs: list[str], code: int, runs: Runs) -> None:
    assert runs(*jobs).code() == code


def test_the_first_job_that_fails_gives_the_code_and_the_others_go_on(runs: Runs, tmp_path: Path) -> None:
    waits = f"until [ -e {tmp_path}/failed ]; do sleep 0.02; done; sleep 0.2"
    run = runs(f"{waits}; exit 4", f"echo why; touch {tmp_path}/failed; exit 3", f"touch {tmp_path}/done")
    assert run.code() == 3
    assert (tmp_path / "done").exists()
    assert re.search(r"^2 ended with 3 after .* s, crossover-run/2.log\n    why$", run.shown, re.MULTILINE)


def test_no_more_than_k_run_at_once_and_the_next_starts_when_one_ends(runs: Runs, tmp_path: Path) -> None:
    job = f"echo 1 >>{tmp_path}/log; sleep 0.2; echo -1 >>{tmp_path}/log"
    assert runs(*[job] * 5, options="--at-once 2").code() == 0
    depths = [*itertools.accumulate(map(int, (tmp_path / "log").read_text().split()))]
    assert (max(depths), len(depths)) == (2, 10)


def test_what_a_job_leaves_running_is_ended(runs: Runs) -> None:
    """One child in the job's group, one in a session of its own, as torchrun's ranks are, one that hears nothing."""
    deaf = 'setsid bash -c \'trap "" TERM; ' + UP + "; sleep 1000'"
    run = runs(f"{deaf} & {FOREVER} & setsid {FOREVER} & sleep 0.2; exit 0").up(1)
    assert eventually(lambda: len(run.processes()) == 1), "the deaf one"
    run.tell_and_wait(signal.SIGINT).tell(signal.SIGINT)
    assert run.code() == 128 + signal.SIGINT


def test_a_killed_runner_takes_its_jobs_along(runs: Runs) -> None:
    run = runs(f"{UP}; exec {FOREVER}").up(1)
    assert run.processes()
    run.tell(signal.SIGKILL)
    assert eventually(lambda: not run.processes())


@pytest.mark.parametrize("trouble", ["its log is a directory", "too long an argument"])
def test_a_job_that_cannot_start_fails_alone(trouble: str, runs: Runs, tmp_path: Path) -> None:
    (logs := tmp_path / "crossover-run").mkdir()
    if "log" in trouble:
        (logs / "2.log").mkdir()
    (tmp_path / "sweep.txt").write_text(f"true {'x' * 200_000 if 'long' in trouble else ''}\n")
    job = f"{UP}; until [ -e {tmp_path}/told ]; do sleep 0.02; done; echo done"
    run = runs(job, options="--commands sweep.txt").up(1)
    (tmp_path / "told").touch()
    assert run.code() == 126
    assert run.log(1) == "done\n"
    assert "\n2 ended with 126, not started: " in run.shown


def test_a_log_that_is_gone_is_no_error_of_the_run(runs: Runs, tmp_path: Path) -> None:
    job = f"until [ -e {tmp_path}/removed ]; do sleep 0.02; done; sleep 0.5; touch {tmp_path}/done"
    assert runs(job, f"rm crossover-run/2.log; touch {tmp_path}/removed; exit 3").code() == 3
    assert (tmp_path / "done").exists()


def began_by(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command become what such a process is."""
    goes_on = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    text = f"import ctypes, os, signal, sys; {code}; {goes_on}"
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", [sys.executable, "-c", text, *COMMAND[1:]])


def test_orphans_are_reaped_as_process_1_of_a_container_must(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_by("ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)", monkeypatch)  # PR_SET_CHILD_SUBREAPER
    leaves = f"(bash -c 'echo $$ >{tmp_path}/orphan' &); until [ -s {tmp_path}/orphan ]; do sleep 0.02; done"
    run = runs(f"{leaves}; {UP}; until [ -e {tmp_path}/told ]; do sleep 0.02; done; exit 5").up(1)
    orphan = int((tmp_path / "orphan").read_text())
    assert eventually(lambda: state(orphan) == "X")
    (tmp_path / "told").touch()
    assert run.code() == 5, "no job's code is reaped"


def test_exit_codes_arrive_although_the_caller_ignores_sigchld(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_by("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", monkeypatch)
    assert runs("exit 3").code() == 3


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_goes_to_all_jobs_and_ends_the_run_unless_it_is_only_passed_on(
    number: signal.Signals, runs: Runs, tmp_path: Path
) -> None:
    name = number.name.removeprefix("SIG")
    hears = f"trap 'echo heard; exit 0' {name}; {UP}; while :; do sleep 0.02; done"
    run = runs(hears, hears, f"touch {tmp_path}/started").up(2).tell(number)
    ends = number != signal.SIGUSR1
    assert run.code() == (128 + number if ends else 0)
    assert [run.log(job).count("heard") for job in (1, 2)] == [1, 1]
    assert (tmp_path / "started").exists() != ends


def test_a_second_ctrl_c_kills_at_once(runs: Runs, tmp_path: Path) -> None:
    run = runs(f"trap 'touch {tmp_path}/heard' INT; {UP}; while :; do sleep 0.02; done").up(1)
    run.tell(signal.SIGINT)
    assert eventually((tmp_path / "heard").exists)
    began_s = time.monotonic()
    assert run.tell(signal.SIGINT).code() == 128 + signal.SIGINT
    assert time.monotonic() - began_s < 25, "that is what the grace would take"


OF_THREADS = 0b11 << 31  # two signals are the C library's own, which blocks them for moments


def test_jobs_have_the_signals_that_the_runner_waits_for(runs: Runs) -> None:
    run = runs("grep -E 'SigBlk|SigIgn' /proc/self/status")
    assert run.code() == 0
    masks = [int(mask, 16) & ~OF_THREADS for mask in re.findall(r"Sig\w+:\s+(\w+)", run.log(1))]
    assert len(masks) == 2
    assert {*masks} <= {0, 1 << signal.SIGPIPE - 1}, "Python ignores SIGPIPE"


def test_an_ignored_hang_up_stays_ignored(runs: Runs, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        run = runs(f"{UP}; until [ -e {tmp_path}/told ]; do sleep 0.02; done; sleep 0.2").up(1)
        run.tell(signal.SIGHUP)
        (tmp_path / "told").touch()
        assert run.code() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# --- what jobs get -------------------------------------------------------------------------------------------------


def variables(run: Run, jobs: int, name: str) -> list[str]:
    assert run.code() == 0, run.shown
    found = [re.search(f"^{name}=(.*)$", run.log(job), re.MULTILINE) for job in range(1, jobs + 1)]
    return [each[1] if each else "" for each in found]


def test_siblings_have_one_group_and_ports_of_their_own(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSOVER_GROUP", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    groups = [{*variables(runs("env", "env"), 2, "CROSSOVER_GROUP")} for _ in range(2)]
    assert [len(each) for each in groups] == [1, 1]
    assert groups[0] != groups[1]
    assert variables(runs("env", CROSSOVER_GROUP="mine"), 1, "CROSSOVER_GROUP") == ["mine"]
    for name in ("MASTER_PORT", "PET_MASTER_PORT"):
        assert len({*variables(runs("env", "env"), 2, name)}) == 2
        assert variables(runs("env", "env", MASTER_PORT="7000"), 2, name) == ["7000", "7001"]
    assert variables(runs("env; : --nnodes 2", "env"), 1, "MASTER_PORT") == ["29500"]


def test_ports_are_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.socket, "socket", MagicMock())  # all are free
    monkeypatch.setattr(jobs, "_NOT_EPHEMERAL", range(20, 30))
    assert sorted(itertools.islice(jobs.free_ports(), 10)) == [*range(20, 30)]


def test_a_port_that_is_chosen_at_the_start_is_no_common_one(runs: Runs, tmp_path: Path) -> None:
    words = "true --rdzv-endpoint 127.0.0.1:0 '--rdzv-endpoint=[::1]:0' --master-port 0\n"
    (tmp_path / "sweep.txt").write_text(words * 2)
    assert runs(options="--commands sweep.txt").code() == 0


def test_each_job_has_a_timeline_directory_of_its_own(runs: Runs) -> None:
    run = runs("env", "env", CROSSOVER_TIMELINE="/x")
    assert variables(run, 2, "CROSSOVER_TIMELINE") == ["/x/1", "/x/2"]


def test_commands_come_from_files_with_variables_of_their_own(runs: Runs, tmp_path: Path) -> None:
    text = "# a sweep\nLR=1 env\n\nLR='2 # 3' \\\n env # and another\n"
    (tmp_path / "sweep.txt").write_text(text)
    assert variables(runs(options="--commands sweep.txt"), 2, "LR") == ["1", "2 # 3"]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--", "a | b"], "without shell syntax, got '|'"),
        (["--", 'a "$HOME"'], "without shell syntax, got '$'"),
        (["--", "python t.py ~/data"], "without shell syntax, got '~'"),
        (["--", "a \"it's $HOME\" 'b'"], "without shell syntax, got '$'"),
        (["--", 'a "b # $c"'], "without shell syntax, got '$'"),
        (["--", r'a "\$b"'], "without shell syntax, got '$'"),
        (["--", "a 'b'#c; d"], "without shell syntax, got ';'"),
        (["--", "a 'b"], "No closing quotation"),
        (["--", "MASTER_PORT=7 true", "--", "MASTER_PORT=7 true"], "a rendezvous of its own"),
        (["--commands", "/nowhere"], "/nowhere"),
        (["--logs", "/dev/null/x"], "/dev/null/x"),
        ([], "got none"),
        (["--", ""], "got none"),
    ],
)
def test_nothing_is_started_if_anything_is_wrong(
    words: list[str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    touch = [*words, "--", f"touch {tmp_path}/started"] if words[-1:] not in ([], [""]) else words
    assert cli.main(["run", *touch]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "text", ["a '$HOME | b'", r"a \$b \;", "a '#' b", 'a "b c; d"', "t.py *.jpg x~y", "a # | b"]
)
def test_plain_text_is_no_shell_syntax(text: str) -> None:
    assert cli_run.command_words(text) == shlex.split(text, comments=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a x#1 --lr 2", ["a", "x#1", "--lr", "2"]),
        ("a 'x'#1 b # c", ["a", "x#1", "b"]),
        (r"a \ #1 '#' \# b", ["a", " #1", "#", "#", "b"]),
        ('a "b # c" #d', ["a", "b # c"]),
        ("a #'b", ["a"]),
    ],
)
def test_a_comment_begins_where_a_word_does(text: str, words: list[str]) -> None:
    assert cli_run.command_words(text) == words
