"""``crossover-ddp`` as a command: usage, help, closed streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossover_ddp import cli

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ("status", "doctor", "run", "timeline", "advise", "compare", "plan")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["run", "--at-once", "0"],
        ["plan"],
        ["advise", "--steps", "3"],
        ["compare", "--rounds", "1"],
    ],
)
def test_wrong_usage_shows_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert "usage: crossover-ddp" in capsys.readouterr().err


HELP = """
import contextlib, sys
sys.modules["torch"] = None
from crossover_ddp.cli import main
for words in ([], *([word] for word in sys.argv[1:])):
    with contextlib.suppress(SystemExit):
        main([*words, "--help"])
"""


def test_help_starts_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP, *COMMANDS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exit codes:") >= len(COMMANDS)


def test_a_closed_pipe_at_standard_output_is_no_error() -> None:
    """Output that fits in the buffer of a pipe is flushed before Python exits."""
    theirs, ours = os.pipe()
    os.close(theirs)
    command = [sys.executable, "-m", "crossover_ddp.cli", "doctor"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=ours, stderr=subprocess.PIPE, text=True
    )
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_disturb_a_command(closed: str, tmp_path: Path) -> None:
    """The next file that is opened must not get the descriptor of a closed stream."""
    command = f"{sys.executable} -m crossover_ddp.cli run --logs {tmp_path} -- 'echo done' {closed}"
    for line, code in {
        command: 0,
        f"{sys.executable} -m crossover_ddp.cli timeline {tmp_path} -o {tmp_path}/x {closed}": 1,
    }.items():
        assert subprocess.run(line, shell=True, cwd=ROOT).returncode == code
    assert (tmp_path / "1.log").read_text() == "done\n"


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        ("doctor --sweep --json", 2),
        ("run --name x --grace=3 --fail-fast --try-first --json", 5),
        ("timeline . --picture x.png --from 1 --to 2 --json", 4),
        ("status --watch --group g", 2),
        ("plan m --cluster c --microbatches 1 --json --picture x", 2),
        ("advise --seconds 3 --startup 1 --verbose", 3),
    ],
)
def test_removed_options_are_reported(
    line: str, gone: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.parse(line.split()).command == line.split()[0]
    assert capsys.readouterr().err.count("does nothing any more") == gone
