"""Commands in the README and in docs/ name existing scripts and options. Short ones are run.

A command is an indented line that begins with one of `PROGRAMS`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from _hooks import HOOKS
from _options import parse_arguments
from crossover_ddp import cli
from studies.claims import CLAIMS
from tests.recipes.test_train import train_ranks

from . import RECIPES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAIN = "recipes/train.py"
PROGRAMS = (
    "make",
    "python",
    "torchrun",
    "crossover-ddp",
    "accelerate",
    "tests/gpu/run_all.sh",
    "pip",
)
TINY = "--steps 2 --image-size 32 --batch-size 4 --model-option 'channels=(8,8,16,16)'"
# Arguments that shorten a command, by its beginning. They override earlier ones.
SHORTER = {
    "crossover-ddp status": "",
    f"torchrun --nproc-per-node 2 {TRAIN} --model timm:resnet18 --hook crossover": TINY,
    f"torchrun --nproc-per-node 2 {TRAIN} --preset gpt": "--steps 2 --model-option depth=1",
}


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a document, continued lines joined, comments left out."""
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        joined = re.sub(r"\s*\\\n\s*", " ", block)
        for line in joined.splitlines():
            command = re.sub(r"\s{2,}#.*$", "", line.strip())
            words = command.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words and words[0] in PROGRAMS and not re.search(r"\s{3,}", command):
                yield command


FOUND = {command for document in DOCUMENTS for command in commands(document.read_text())}
SHORT = sorted(each for each in FOUND if each.startswith(tuple(SHORTER)))


def test_commands_are_found() -> None:
    text = (
        "text\n\n    make it\n    python a.py \\\n        --b 1   # why\n"
        "    X=1 torchrun c.py\n    | a | table |\n"
    )
    assert list(commands(text)) == ["make it", "python a.py --b 1", "X=1 torchrun c.py"]
    assert [key for key in SHORTER if not any(command.startswith(key) for command in FOUND)] == []


def missing(command: str) -> str | None:
    """Return a name in a command that does not exist, if any.

    It may be a script, a module of this project, a sub-command, a claim or a target.
    """
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    program, *rest = words
    if program == "python":
        rest = rest[1:] if rest[0] == "-m" and not rest[1].startswith("tests.") else rest
        there = Path(rest[1].replace(".", "/") + ".py") if rest[0] == "-m" else Path(rest[0])
        if rest[0].startswith(("recipes/", "tests/", "-m")) and not (ROOT / there).exists():
            return str(there)
        if rest[0].endswith("studies/run.py"):
            named = rest[rest.index("--claim") + 1 :] if "--claim" in rest else []
            return next((each for each in named[:1] if each not in CLAIMS and each != "NAME"), None)
    if program == "make":
        text = (ROOT / "Makefile").read_text()
        return next(
            (each for each in rest if re.fullmatch(r"[a-z]+", each) and f"\n{each}:" not in text),
            None,
        )
    try:
        if program == "crossover-ddp" and "…" not in command:
            cli.parse(rest)
        if TRAIN in words and "…" not in command:
            parse_arguments(words[words.index(TRAIN) + 1 :], HOOKS)
    except SystemExit:
        return command
    return None


def test_commands_name_existing_scripts_and_options() -> None:
    gone = ["make nothing", "python recipes/no.py", "crossover-ddp no", "python -m tests.no"]
    assert all(map(missing, [*gone, f"torchrun {TRAIN} --hook no"]))
    assert {command: found for command in sorted(FOUND) if (found := missing(command))} == {}


@pytest.mark.parametrize("command", SHORT)
def test_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = next(more for key, more in SHORTER.items() if command.startswith(key))
    words = shlex.split(f"{command} {more}")
    if words[0] == "crossover-ddp":
        assert cli.main(words[1:]) in (0, 1)
        return
    for log in train_ranks(words[4:], tmp_path / "log"):
        assert log[-1]["event"] == "end"


@pytest.mark.timeout(120)
def test_a_job_under_torchrun_is_measured_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = [str(RECIPES / "train.py"), "--preset", "tiny", "--hook", "decoupled"]
    steps = str(10**6 + os.getpid())  # only this test has a job of so many
    endless = ["--steps", steps, "--threads", "1", "--eval-every", "0", "--optimizer", "sgd"]
    code = cli.main(["advise", "--json", "--steps", "17", "--", *launch, *script, *endless])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)["figures"]
    assert found["ranks"] == 2
    assert found["compute_s"] > 0
    assert found["size_bytes"] == pytest.approx(2.1e5, rel=0.2)
    running = subprocess.run(["pgrep", "-f", f"steps {steps}"], capture_output=True, check=False)
    assert running.stdout == b""
