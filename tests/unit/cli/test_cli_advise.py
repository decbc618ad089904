"""`crossover-ddp advise` from outside: what it reads, says and refuses, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from crossover_ddp import cli
from crossover_ddp._timeline.merge import RawSpan
from crossover_ddp.cli.advise import command as cli_advise
from crossover_ddp.cli.advise import short_run
from crossover_ddp.cli.advise.step_figures import THE_LINE
from crossover_ddp.cli.output import FINE, FOUND, USAGE
from tests.harness.waiting import eventually, gone
from tests.unit.cli.made_up_steps import split_rank

ROOT = Path(__file__).resolve().parents[3]
MEGABYTE = 2**20
# Its child has left the session, as torchrun's workers have.
MILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
print("started", flush=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(99)
"""
# Neither it nor its child, which inherits that, minds SIGTERM.
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{MILD}"


def write(directory: Path, ranks: dict[int, Sequence[RawSpan]], pid: int = 1) -> Path:
    directory.mkdir(exist_ok=True)
    for rank, spans in ranks.items():
        lines = [{"version": 2, "rank": rank, "device": "d", "pid": pid}]
        lines += [{"kind": s.kind, "begin_s": s.begin_s, "end_s": s.end_s, **s.detail} for s in spans]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"rank{rank}-{pid}.jsonl").write_text(text + '{"kind": "comp')
    return directory


def recorded(directory: Path, *, beta_s: float = 1e-7) -> Path:
    rank = split_rank(
        [0.6, 0.8, 1.0],
        [MEGABYTE, MEGABYTE // 4, MEGABYTE],
        compute_s=1.0,
        alpha_s=0.001,
        beta_s=beta_s,
        largest_share=1.0,
    )
    return write(directory, {0: rank, 1: rank})


# --- a recorded directory -----------------------------------------------------------------------------------------


def test_a_recorded_directory_is_advised_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", str(recorded(tmp_path / "t")), "--json"]) == FINE
    told = json.loads(capsys.readouterr().out)
    assert told["figures"]["ranks"] == [0, 1]
    assert told["figures"]["compute_s"] == pytest.approx(1.0)
    assert told["advice"]["best"].startswith("crossover")


def test_the_report_has_ways_lines_and_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", str(recorded(tmp_path / "t"))]) == FINE
    shown = capsys.readouterr().out
    assert "C 1000 ms compute" in shown
    assert "    model.register_comm_hook(CrossoverState(), crossover_hook)" in shown
    assert "→ crossover (two sibling jobs): " in shown


def test_not_worth_it_is_said_without_lines_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", str(recorded(tmp_path / "t", beta_s=1e-9))]) == FINE
    shown = capsys.readouterr().out
    assert "→ do not bother: communication costs only 0." in shown
    assert "register_comm_hook" not in shown


def test_an_empty_directory_names_the_line_to_add(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", str(tmp_path), "--json"]) == FOUND
    assert THE_LINE in capsys.readouterr().err


def test_files_that_are_no_timelines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0-1.jsonl").write_text("a shopping list\n")
    assert cli.main(["advise", str(tmp_path)]) == FOUND
    assert "rank0-1.jsonl, line 1: expected the header of a timeline" in capsys.readouterr().err


def test_two_runs_in_one_directory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = split_rank([1.0], [1000], compute_s=1.0, alpha_s=0.0, beta_s=1e-6)
    write(tmp_path, {0: rank, 1: rank})
    write(tmp_path, {0: rank}, pid=2)
    assert cli.main(["advise", str(tmp_path)]) == FOUND
    assert "got rank 0 more than once" in capsys.readouterr().err


# --- a command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["runs/that/is/not/there"], ["--", "no-such-command-at-all", "--lr", "1"]])
def test_what_is_neither_a_directory_nor_a_command_is_wrong_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", "--json", *words]) == USAGE
    assert "expected a" in capsys.readouterr().err


def test_options_of_the_command_stay_its_own() -> None:
    parsed = cli.parser().parse_args(["advise", "--seconds", "5", "--", "run.py", "--json", "--steps", "1"])
    assert (parsed.what, parsed.json, parsed.seconds) == (["run.py", "--json", "--steps", "1"], False, 5.0)


@pytest.mark.parametrize("option", [["--steps", "3"], ["--seconds", "0"], ["--startup", "x"]])
def test_numbers_that_measure_nothing_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["advise", *option, "--", "true"])
    assert caught.value.code == USAGE


def test_a_command_that_fails_shows_its_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import sys; print('all is well'); sys.exit('no such data set')"
    assert cli.main(["advise", "--json", "--", sys.executable, "-c", script]) == FOUND
    said = capfd.readouterr().err
    assert "exit status 1, before its first step" in said
    assert "    no such data set" in said


def test_a_command_that_records_nothing_is_told_what_to_add(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["advise", "--json", "--verbose", "--", sys.executable, "-c", "print('trained')"]) == FOUND
    )
    said = capfd.readouterr()
    assert THE_LINE in said.err
    assert "ended by itself" in said.err
    assert said.err.startswith("trained")  # shown as it came, and away from the JSON
    assert said.out == ""


def test_a_job_that_never_begins_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert cli.main(["advise", "--json", "--startup", "1", "--", *command]) == FOUND
    assert "the command was ended after" in capfd.readouterr().err
    assert time.monotonic() - began_s < 30


def test_a_run_leaves_no_process_behind(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    ended = short_run.run(
        [sys.executable, "-c", STUBBORN, str(noted)],
        tmp_path / "timeline",
        enough=lambda _: noted.exists() and noted.read_text() != "",
        grace_s=0.5,
    )
    assert ended == short_run.Ended(None, "started")
    assert eventually(lambda: gone(int(noted.read_text())))


@pytest.mark.parametrize(
    ("number", "code", "script"), [(signal.SIGINT, 130, MILD), (signal.SIGTERM, 143, STUBBORN)]
)
def test_a_signal_ends_the_job_too(number: signal.Signals, code: int, script: str, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    command = [sys.executable, "-m", "crossover_ddp.cli", "advise", "--json", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", script, str(noted)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    try:
        assert eventually(lambda: noted.exists() and noted.read_text() != "", 60.0)
        process.send_signal(number)
        assert process.wait(30) == code
    finally:
        process.kill()
    assert gone(int(noted.read_text()))
    assert [each.name for each in tmp_path.iterdir()] == ["pid"]


def test_progress_counts_whole_steps_of_the_slowest_rank(tmp_path: Path) -> None:
    rank = split_rank([1.0], [1000], compute_s=1.0, alpha_s=0.0, beta_s=1e-6)
    write(tmp_path, {0: rank, 1: rank[: len(rank) // 2]})
    arguments = cli.parser().parse_args(["advise", "--steps", "9", "--", "x"])
    progress = cli_advise._Progress(tmp_path, arguments)
    assert progress.enough(0.0)
    assert progress.steps == 9
