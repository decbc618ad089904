"""What `make dist` builds is whole: a stranger installs the wheel into an empty place, and a minimal recipe trains."""

import fcntl
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import crossover_ddp
from tests.harness import spawn_script

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built, place = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with (
        ROOT / "pyproject.toml"
    ).open() as turn:  # setuptools works in the tree, and pytest's workers share it
        fcntl.flock(turn, fcntl.LOCK_EX)
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, ROOT], check=True
        )
    (wheel,) = built.glob("*.whl")
    assert len([*built.glob("*.tar.gz")]) == 1
    own = re.compile(r"crossover_ddp(-[\d.]+\.dist-info)?/")
    assert [*filter(own.match, names := zipfile.ZipFile(wheel).namelist())] == names
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", place, wheel], check=True
    )
    return place


def test_a_minimal_recipe_trains_with_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shown = "import crossover_ddp\nprint(crossover_ddp.__file__, crossover_ddp.__version__)\n"
    recipe = (ROOT / "recipes/minimal_decoupled.py").read_text()
    script.write_text(
        recipe.replace("dist.init_process_group", shown + "dist.init_process_group", 1)
    )
    environment = {"PYTHONPATH": os.fspath(installed), "PYTHONNOUSERSITE": "1"}
    # One interpreter that imports torch, not three: what torchrun does is no part of the wheel.
    with spawn_script(script, 1, environment=environment, cwd=tmp_path) as ranks:
        (output,) = ranks.wait(180)
    assert f"{installed}/crossover_ddp/__init__.py {crossover_ddp.__version__}" in output
    assert "epoch 0: loss" in output


def test_the_installed_command_says_its_version(installed: Path) -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.fspath(installed)}
    said = subprocess.check_output(
        [installed / "bin/crossover-ddp", "--version"], env=environment, text=True
    )
    assert said == f"crossover-ddp {crossover_ddp.__version__}\n"


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    words = tmp_path / "words"
    line = "crossover-ddp st"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    environment = {**ENVIRONMENT, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(words)}
    command = [sys.executable, "-m", "crossover_ddp.cli"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert words.read_text().split() == ["status"]
