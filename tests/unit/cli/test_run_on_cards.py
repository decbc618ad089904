"""`crossover-ddp run --gpus-each` with a fake nvidia-smi: cards of its own for each job, in a queue."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp import cli
from crossover_ddp.cli import cards
from crossover_ddp.cli.run import expected_s

from .test_run import Run, Runs, runs, until, variables

__all__ = ["runs"]
GPUS = """\
GPU 0: NVIDIA H100 (UUID: GPU-aa)
GPU 1: NVIDIA A100 (UUID: GPU-bb)
  MIG 3g.20gb     Device  0: (UUID: MIG-b1)
  MIG 3g.20gb     Device  1: (UUID: MIG-b2)
GPU 2: NVIDIA H100 (UUID: GPU-cc)
"""
LISTED = ["GPU-aa", "MIG-b1", "MIG-b2", "GPU-cc"]


@pytest.fixture
def no_cards_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CROSSOVER_GROUP"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cards_named: None) -> Path:
    """Put an nvidia-smi on the path, alone with a shell, and return its file."""
    (here := tmp_path / "bin").mkdir()
    (here / "sh").symlink_to("/bin/sh")
    (here / "cat").symlink_to("/bin/cat")
    answers(program := here / "nvidia-smi", f"cat <<'END'\n{GPUS}END")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(here))
    return program


def answers(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")


def test_cards_are_those_of_the_environment_else_those_that_nvidia_smi_lists(driver: Path) -> None:
    """A MIG instance is a card, and its GPU is none."""
    assert cards.cards({}) == LISTED
    assert cards.cards({"CUDA_VISIBLE_DEVICES": "3, MIG-b1,1,-1,0"}) == ["3", "MIG-b1", "1"]
    assert cards.shares(LISTED, 1) == LISTED
    assert cards.shares(LISTED, 2) == ["GPU-aa,MIG-b1", "MIG-b2,GPU-cc"]
    assert cards.shares(LISTED, 3) == ["GPU-aa,MIG-b1,MIG-b2"]


@pytest.mark.parametrize(
    ("options", "script", "visible", "message"),
    [
        ("--gpus-each 5", "", None, "expected at most 4 GPUs for each job, since the cards here"),
        (
            "--gpus-each 2",
            "",
            "7",
            "expected at most 1 GPUs for each job, since the cards here are 7",
        ),
        ("--gpus-each 1", "", "", "got none: CUDA_VISIBLE_DEVICES is ''"),
        ("--gpus-each 1", "", "-1,0", "got none: CUDA_VISIBLE_DEVICES is '-1,0'"),
        ("--gpus-each 1", "", "NoDevFiles", "got none: CUDA_VISIBLE_DEVICES is 'NoDevFiles'"),
        ("--gpus-each 1", "", "0,1,0", "expected each card once"),
        ("--gpus-each 1", "echo No devices were found; exit 6", None, "nvidia-smi lists none"),
        ("--gpus-each 1", "echo NVIDIA-SMI has failed; exit 9", None, "NVIDIA-SMI has failed"),
        ("--gpus-each 1", "gone", None, "expected nvidia-smi on PATH"),
        ("--gpus-each 1 --at-once 2", "", None, "not allowed with argument"),
    ],
)
def test_too_few_cards_start_no_job(
    options: str,
    script: str,
    visible: str | None,
    message: str,
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script == "gone":
        driver.unlink()
    elif script:
        answers(driver, script)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = ["run", *options.split(), "--logs", str(tmp_path / "logs"), "--", "true"]
    try:
        code = cli.main(words)
    except SystemExit as error:
        assert error.code == 2
        code = 2
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("setting", ["", "env ", "bash -c '", "timeout 9 env A=1 "])
def test_a_command_that_chooses_its_cards_is_refused(
    setting: str, driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{setting}CUDA_VISIBLE_DEVICES=0 python t.py{chr(39) * setting.count(chr(39))}"
    words = ["--logs", str(tmp_path / "logs"), "--", command]
    assert cli.main(["run", "--gpus-each", "1", *words]) == 2
    assert "expected commands that leave their cards to --gpus-each" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def begun(run: Run) -> dict[str, str]:
    """Return the cards of each job, by its number."""
    found = re.findall(r"^(\d+) started on CUDA_VISIBLE_DEVICES=(\S+): ", run.shown, re.MULTILINE)
    return dict(found)


def test_the_next_job_starts_on_the_cards_of_the_one_that_ended(
    runs: Runs, tmp_path: Path, no_cards_named: None
) -> None:
    """Torch is not imported: this one would end the command."""
    (hidden := tmp_path / "hidden").mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    root = Path(__file__).resolve().parents[3]
    third = tmp_path / "third"
    shows = "echo cards=$CUDA_VISIBLE_DEVICES"
    jobs = [f"{shows}; {until(third)}", shows, f"{shows}; echo 1 >{third}", f"{shows}; exit 3"]
    run = runs(
        *jobs,
        options="--gpus-each 2",
        CUDA_VISIBLE_DEVICES="4,GPU-x,MIG-y,7,9",
        PYTHONPATH=f"{hidden}:{root}",
    )
    assert run.code() == 3
    assert run.shown.startswith("4 jobs, 2 at once, in a group each, logs in crossover-run\n")
    logs = [re.findall("cards=(.*)", run.log(job))[0] for job in range(1, 5)]
    assert logs[:3] == ["4,GPU-x", "MIG-y,7", "MIG-y,7"]
    assert begun(run) == {str(number): each for number, each in enumerate(logs, 1)}
    assert re.search(r"^1 of 4 done, 2 running, 0 failed; about \d+ s left$", run.shown, re.M)
    assert "3 of 4 done, 0 running, 1 failed\n" in run.shown


def test_jobs_on_their_own_cards_are_in_groups_of_their_own(
    runs: Runs, tmp_path: Path, no_cards_named: None
) -> None:
    """A group that the user names is kept: cards have names of their own in it."""
    (here := tmp_path / "bin").mkdir()
    answers(here / "nvidia-smi", f"cat <<'END'\n{GPUS}END")
    (here / "nvidia-smi").chmod(0o755)
    for given_group, groups in (("", 2), ("mine", 1)):
        run = runs(
            "PATH=/bin:/usr/bin env",
            "PATH=/bin:/usr/bin env",
            options="--gpus-each 1",
            CROSSOVER_GROUP=given_group,
            PATH=f"{here}:/bin:/usr/bin",
        )
        assert len({*variables(run, 2, "CROSSOVER_GROUP")}) == groups
        assert begun(run) == {"1": "GPU-aa", "2": "MIG-b1"}


def test_a_job_that_cannot_start_leaves_its_cards_to_the_next(
    tmp_path: Path, no_cards_named: None
) -> None:
    (tmp_path / "sweep.txt").write_text(f"true {'x' * 200_000}\ntrue\n")
    words = ("--commands", "sweep.txt", "--gpus-each", "1")
    run = Run(tmp_path, "pass", *words, CUDA_VISIBLE_DEVICES="5")
    try:
        assert run.code() == 126
        assert begun(run) == {"2": "5"}
    finally:
        run.close()


def test_the_expected_end_follows_from_the_mean_of_jobs_that_ended_well() -> None:
    assert expected_s([], [1.0], 5) is None
    assert expected_s([10.0], [], 0) is None
    assert expected_s([8.0, 12.0], [4.0, 9.0], 0) == 6.0
    assert expected_s([8.0, 12.0], [4.0, 9.0], 3) == 21.0  # 1 + 10 + 10, 6 + 10
    assert expected_s([10.0], [25.0], 1) == 10.0


@given(
    took_s=st.floats(0.1, 1e5),
    running_s=st.lists(st.floats(0, 1e5), min_size=1, max_size=8),
    waiting=st.integers(0, 50),
)
def test_a_queue_takes_as_long_as_its_work_divided_by_its_places(
    took_s: float, running_s: list[float], waiting: int
) -> None:
    left_s = expected_s([took_s], running_s, waiting)
    assert left_s is not None
    work_s = sum(max(0.0, took_s - each) for each in running_s) + waiting * took_s
    even_s = work_s / len(running_s)
    assert even_s * (1 - 1e-9) <= left_s <= even_s + took_s * (1 + 1e-9)
