"""The wheel of `make dist` is complete: installed alone, it trains a minimal recipe."""

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
    """Build the wheel and install it, without dependencies, into a directory of its own."""
    built = tmp_path_factory.mktemp("dist")
    target = tmp_path_factory.mktemp("installed")
    # setuptools writes to the tree, which pytest's workers share.
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, ROOT]
        subprocess.run(build, check=True)
    (wheel,) = built.glob("*.whl")
    assert len([*built.glob("*.tar.gz")]) == 1
    own = re.compile(r"crossover_ddp(-[\d.]+\.dist-info)?/")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if not own.match(name)] == []
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(install, check=True)
    assert (target / "crossover_ddp/_compression/kernels.c").exists(), "codecs would stay plain"
    return target


def test_a_minimal_recipe_trains_with_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shown = "import crossover_ddp\nprint(crossover_ddp.__file__, crossover_ddp.__version__)\n"
    recipe = (ROOT / "recipes/minimal_auto.py").read_text()
    script.write_text(
        recipe.replace("dist.init_process_group", shown + "dist.init_process_group", 1)
    )
    environment = {"PYTHONPATH": os.fspath(installed), "PYTHONNOUSERSITE": "1"}
    # Without torchrun: its two further interpreters would import torch and not test the wheel.
    with spawn_script(script, 1, environment=environment, cwd=tmp_path) as ranks:
        (output,) = ranks.wait(180)
    assert f"{installed}/crossover_ddp/__init__.py {crossover_ddp.__version__}" in output
    assert "epoch 0: loss" in output


def test_the_installed_command_prints_its_version(installed: Path) -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.fspath(installed)}
    command = [installed / "bin/crossover-ddp", "--version"]
    output = subprocess.check_output(command, env=environment, text=True)
    assert output == f"crossover-ddp {crossover_ddp.__version__}\n"


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    completions = tmp_path / "completions"
    line = "crossover-ddp st"
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    environment = {**ENVIRONMENT, **variables, "_ARGCOMPLETE_STDOUT_FILENAME": str(completions)}
    command = [sys.executable, "-m", "crossover_ddp.cli"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert completions.read_text().split() == ["status"]
