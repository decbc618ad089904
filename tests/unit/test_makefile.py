"""Make's targets, as make would carry them out (nothing is installed): environments, and what CI runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHER = ".venv-torch-2.11.0"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="the program make is missing")


def commands(*words: str) -> str:
    """Return what make would run, everything made anew."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS"))
        and name not in ("TORCH", "PYTEST_ARGS", "PYTHON", "WORKERS")
    }
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *words],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_the_suite_runs_in_venv_with_the_newest_torch() -> None:
    lines = commands("test")
    assert "torch==" not in lines
    assert "bin/mypy" in lines
    assert ".venv-" not in lines
    assert re.search(r"--editable '\.\[dev\]'\s*$", lines, flags=re.MULTILINE)
    assert re.search(
        r" \.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder\s*$",
        lines,
        flags=re.MULTILINE,
    )
    assert re.search(r" \.venv/bin/python -m pytest\s*$", commands("test", "WORKERS="), flags=re.MULTILINE)


@pytest.mark.parametrize("target", ["test", "marked", "demo"])
def test_a_version_of_torch_has_an_environment_of_its_own(target: str) -> None:
    lines = commands(target, "TORCH=2.11.0")
    assert f"-m venv --clear {OTHER}\n" in lines
    assert re.search(
        rf"{OTHER}/bin/python -m pip install .*'\.\[dev\]' torch==2\.11\.0$", lines, flags=re.MULTILINE
    )
    assert f"touch {OTHER}/.installed" in lines
    assert not re.search(r"\.venv/", lines)
    assert "bin/mypy" not in lines


def test_marked_runs_the_tests_that_depend_on_torch() -> None:
    assert re.search(r"/python -m pytest -m torch_version ", commands("marked"))


def test_git_and_clean_know_every_environment() -> None:
    assert ".venv-torch-*/" in (ROOT / ".gitignore").read_text().splitlines()
    assert re.search(r"^rm -rf \.venv \.venv-torch-\* ", commands("clean"), flags=re.MULTILINE)


@pytest.mark.parametrize(("of_marked", "of_test", "expected"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (1, 2, 2)])
def test_ci_fails_with_either_run_and_ends_with_the_main_one(
    of_marked: int, of_test: int, expected: int, tmp_path: Path
) -> None:
    """With a make that only says what it was asked for; both runs are made whatever becomes of the first."""
    for name in ("ip", "tc"):
        _program(tmp_path / name, "exit 0")
    _program(
        tmp_path / "make",
        'echo "make $*"',
        f'case " $* " in *" marked "*) exit {of_marked};; *" test "*) exit {of_test};; *) exit 99;; esac',
    )
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "make --no-print-directory marked TORCH=2.11.0",
        "make --no-print-directory test",
    ]
    assert done.returncode == expected


def _program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
