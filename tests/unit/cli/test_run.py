"""`crossover-ddp run` with real processes: ends, signals, queues, logs, and no processes left."""

import contextlib
import io
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

import pytest

from crossover_ddp import cli
from crossover_ddp.cli import run as cli_run
from tests.harness.waiting import eventually, state

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ["-m", "crossover_ddp.cli", "run"]
FOREVER = "sleep 1000"
UP = "touch $UP/$MASTER_PORT"  # the job is under way


def until(path: Path) -> str:
    return f"until [ -s {path} ]; do sleep 0.02; done"


class Run:
    """A run under way, with its logs in its own directory. `close` ends all its processes."""

    def __init__(self, here: Path, begin: str, *words: str, **variables: str) -> None:
        (here / "up").mkdir(exist_ok=True)
        self.here = here
        become_the_command = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import ctypes, os, signal, sys; {begin}; {become_the_command}",
                *COMMAND,
                *words,
            ],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT), "UP": str(here / "up"), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.shown = ""

    def up(self, jobs: int = 1) -> "Run":
        assert eventually(lambda: len([*(self.here / "up").iterdir()]) == jobs)
        return self

    def signalled(self, number: int) -> "Run":
        self._process.send_signal(number)
        return self

    def code(self) -> int:
        """Wait for the end, and return the exit code. No process of a job may be left."""
        _, self.shown = self._process.communicate(timeout=60)
        assert self.processes() == []
        return self._process.returncode

    def processes(self) -> list[int]:
        """Return the processes of the run's jobs."""
        mark = f"CROSSOVER_RUN_JOB={self.pid}-".encode()
        found = []
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
    """Start jobs, each a script for bash, by a process that first executes ``begin``."""
    begun: list[Run] = []

    def starting(*jobs: str, options: str = "", begin: str = "pass", **variables: str) -> Run:
        words = [word for job in jobs for word in ("--", "bash", "-c", job)]
        begun.append(Run(tmp_path, begin, *shlex.split(options), *words, **variables))
        return begun[-1]

    yield starting
    for each in begun:
        each.close()


@pytest.mark.parametrize(
    ("job", "code"), [("true", 0), ("kill -KILL $$", 137), ("exec nosuch", 127)]
)
def test_the_exit_code_is_that_of_the_job_even_if_the_caller_ignores_sigchld(
    job: str, code: int, runs: Runs
) -> None:
    assert runs(job, "true", begin="signal.signal(signal.SIGCHLD, signal.SIG_IGN)").code() == code


def test_the_first_failed_job_gives_the_exit_code_and_a_log_may_be_missing(
    runs: Runs, tmp_path: Path
) -> None:
    failed, done = tmp_path / "failed", tmp_path / "done"
    waits = f"{until(failed)}; sleep 0.2; rm crossover-run/1.log; touch {done}; exit 4"
    run = runs(waits, f"echo why | tee {failed}; exit 3")
    assert run.code() == 3
    assert done.exists()
    assert re.search(
        r"^2 ended with 3 after .* s, crossover-run/2.log\n    why$", run.shown, re.MULTILINE
    )


def test_no_more_than_k_run_at_once_and_the_next_starts_when_one_ends(
    runs: Runs, tmp_path: Path
) -> None:
    job = f"echo 1 >>{tmp_path}/log; sleep 0.2; echo -1 >>{tmp_path}/log"
    assert runs(*[job] * 5, options="--at-once 2").code() == 0
    depths = [*itertools.accumulate(map(int, (tmp_path / "log").read_text().split()))]
    assert (max(depths), len(depths)) == (2, 10)


def test_processes_that_a_job_leaves_running_are_ended(runs: Runs) -> None:
    """One in the job's group, one in its own session, as torchrun's ranks, one ignores SIGTERM."""
    stubborn = 'setsid bash -c \'trap "" TERM; ' + UP + "; sleep 1000'"
    run = runs(f"{stubborn} & {FOREVER} & setsid {FOREVER} & sleep 0.2; exit 0").up()
    assert eventually(lambda: len(run.processes()) == 1), "the stubborn one"
    began_s = time.monotonic()
    status = Path(f"/proc/{run.signalled(signal.SIGINT).pid}/status")
    # Two equal signals that are pending would be delivered as one.
    assert eventually(lambda: not int(status.read_text().split("ShdPnd:")[1].split()[0], 16))
    assert run.signalled(signal.SIGINT).code() == 128 + signal.SIGINT
    assert time.monotonic() - began_s < 25, "the grace would take longer"


def test_the_jobs_of_a_killed_runner_are_ended(runs: Runs) -> None:
    run = runs(f"{UP}; exec {FOREVER}").up()
    assert run.processes()
    run.signalled(signal.SIGKILL)
    assert eventually(lambda: not run.processes())


@pytest.mark.parametrize("trouble", ["its log is a directory", "too long an argument"])
def test_a_job_that_cannot_start_does_not_end_the_others(
    trouble: str, runs: Runs, tmp_path: Path
) -> None:
    (logs := tmp_path / "crossover-run").mkdir()
    if "log" in trouble:
        (logs / "2.log").mkdir()
    (tmp_path / "sweep.txt").write_text(f"true {'x' * 200_000 if 'long' in trouble else ''}\n")
    job = f"{UP}; {until(tmp_path / 'continue')}; echo done"
    run = runs(job, options="--commands sweep.txt").up()
    (tmp_path / "continue").write_text("now")
    assert run.code() == 126
    assert run.log(1) == "done\n"
    assert "\n2 ended with 126, not started: " in run.shown


def test_orphans_of_jobs_are_reaped(runs: Runs, tmp_path: Path) -> None:
    orphan, end = tmp_path / "orphan", tmp_path / "end"
    leaves = f"(bash -c 'echo $$ >{orphan}' &); {until(orphan)}; {UP}; {until(end)}; exit 5"
    become_subreaper = "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"  # PR_SET_CHILD_SUBREAPER
    run = runs(leaves, begin=become_subreaper).up()
    assert eventually(lambda: state(int(orphan.read_text())) == "X")
    end.write_text("now")
    assert run.code() == 5, "no job's code is reaped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_jobs_receive_signals_and_all_but_sigusr1_end_the_run(
    number: signal.Signals, runs: Runs, tmp_path: Path
) -> None:
    waits = f"trap 'echo received; exit 0' {number.name}; {UP}; while :; do sleep 0.02; done"
    run = runs(waits, waits, f"touch {tmp_path}/started").up(2).signalled(number)
    ends = number != signal.SIGUSR1
    assert run.code() == (128 + number if ends else 0)
    assert [run.log(job).count("received") for job in (1, 2)] == [1, 1]
    assert (tmp_path / "started").exists() != ends


def test_jobs_do_not_inherit_the_blocked_signals_of_the_runner(runs: Runs) -> None:
    run = runs("grep -E 'SigBlk|SigIgn' /proc/self/status")
    assert run.code() == 0
    of_threads = 0b11 << 31  # signals of the C library, which blocks them now and then
    masks = [int(mask, 16) & ~of_threads for mask in re.findall(r"Sig\w+:\s+(\w+)", run.log(1))]
    assert len(masks) == 2
    assert {*masks} <= {0, 1 << signal.SIGPIPE - 1}, "Python ignores SIGPIPE"


def test_an_ignored_hang_up_stays_ignored(runs: Runs, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        run = runs(f"{UP}; {until(tmp_path / 'end')}; sleep 0.2").up().signalled(signal.SIGHUP)
        (tmp_path / "end").write_text("now")
        assert run.code() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def variables(run: Run, jobs: int, name: str) -> list[str]:
    assert run.code() == 0, run.shown
    found = [re.search(f"^{name}=(.*)$", run.log(job), re.MULTILINE) for job in range(1, jobs + 1)]
    return [each[1] if each else "" for each in found]


def test_siblings_have_one_group_and_different_ports(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CROSSOVER_GROUP", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    groups, ports = list[set[str]](), ("MASTER_PORT", "PET_MASTER_PORT")
    for _ in range(2):
        run = runs("env", "env")
        groups.append({*variables(run, 2, "CROSSOVER_GROUP")})
        assert [len({*variables(run, 2, name)}) for name in ports] == [2, 2]
    assert [len(each) for each in (*groups, set.union(*groups))] == [1, 1, 2]
    run = runs("env", "env", CROSSOVER_GROUP="mine", MASTER_PORT="7000")
    assert variables(run, 2, "CROSSOVER_GROUP") == ["mine", "mine"]
    assert [variables(run, 2, name) for name in ports] == [["7000", "7001"]] * 2
    assert variables(runs("env; : --nnodes 2", "env"), 1, "MASTER_PORT") == ["29500"]


def test_commands_in_a_file_set_their_own_variables(runs: Runs, tmp_path: Path) -> None:
    """Ports that are chosen at the start never clash. A program may have "=" in its path."""
    (program := tmp_path / "lr=1").write_text(
        "#!/bin/sh\necho LR=$LR\necho CROSSOVER_TIMELINE=$CROSSOVER_TIMELINE"
    )
    program.chmod(0o755)
    any_port = "--rdzv-endpoint 127.0.0.1:0 '--rdzv-endpoint=[::1]:0' --master-port 0"
    lines = (
        f"{program} {any_port}",
        f"# a sweep, \\\nLR=1 env\n\nLR='2 # 3' PATH=/no \\\n {program} {any_port} # more",
    )
    (tmp_path / "sweep.txt").write_text("\n".join(lines))
    run = runs(options="--commands sweep.txt", CROSSOVER_TIMELINE="/x", LR="0")
    assert variables(run, 3, "LR") == ["0", "1", "2 # 3"]
    assert variables(run, 3, "CROSSOVER_TIMELINE") == ["/x/1", "/x/2", "/x/3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "a | b"], "without shell syntax, got '|'"),
        (["--", 'a "$HOME"'], "without shell syntax, got '$'"),
        (["--", "python t.py ~/data"], "without shell syntax, got '~'"),
        (["--", "DATA=~/data python t.py"], "without shell syntax, got 'DATA=~'"),
        (["--", "A=1 PATH=a:~/b c"], "without shell syntax, got 'PATH=a:~'"),
        (["--", "a 1\nb 2"], "without shell syntax, got '\\n'"),
        (["--", "a 'b'#c; d"], "without shell syntax, got ';'"),
        (["--", "a 'b"], "No closing quotation"),
        (["--", "MASTER_PORT=7 true", "--", "MASTER_PORT=7 true"], "a rendezvous of its own"),
        (["--commands", "/nowhere"], "/nowhere"),
        (["--logs", "/dev/null/x"], "/dev/null/x"),
        ([], "got none"),
        (["--", ""], "got none"),
    ],
)
def test_wrong_usage_starts_no_job(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch = [*words, "--", f"touch {tmp_path}/started"] if words[-1:] not in ([], [""]) else words
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert cli.main(["run", *touch]) == 2
    assert message in errors.getvalue()
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a '$HOME | b'", ["a", "$HOME | b"]),
        (r"a \$b \;", ["a", "$b", ";"]),
        ('t.py *.jpg x~y "b c; d"', ["t.py", "*.jpg", "x~y", "b c; d"]),
        ("a x#1 --lr 2 # | b", ["a", "x#1", "--lr", "2"]),
        ("a 'x'#1 b # c", ["a", "x#1", "b"]),
        (r"a \ #1 '#' \# b", ["a", " #1", "#", "#", "b"]),
        ('a "b # c" #d', ["a", "b # c"]),
        ("a #'b", ["a"]),
        ("\n a \\\n  --b 'c\n' \\\n # d\n", ["a", "--b", "c\n"]),
    ],
)
def test_a_comment_begins_at_the_begin_of_a_word(text: str, words: list[str]) -> None:
    assert cli_run.command_words(text) == words
