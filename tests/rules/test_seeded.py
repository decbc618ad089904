"""Each seeded fault can still be seeded, and its tests are there; each known defect has a test."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeded.fault import FAULTS, ROOT, SEARCHED, Fault

RENAMED = re.compile(
    r"\b(Bucket|Backward|Exchange|DecoupledState|Pending|Owners|FactorCapture|Turns|CodedLink|ModuleBuffers)\b"
)


def test_faults_can_be_seeded_and_their_tests_are_there() -> None:
    for fault in FAULTS:
        path, seeded = fault.seeded(ROOT)
        if path.endswith(".py"):
            compile(seeded, fault.why, "exec")  # a SyntaxError says which fault it is
    assert [fault.why for fault in FAULTS if not fault.tests or fault.missing(ROOT)] == []


def test_faults_survive_a_rename_of_ten_classes_and_another_layout(tmp_path: Path) -> None:
    """Each fault's mutation is the same code, renamed, whatever the width of lines."""

    def renamed(text: str) -> str:
        return RENAMED.sub(r"\1Renamed", text)

    for path in (path for directory in SEARCHED for path in (ROOT / directory).rglob("*.py")):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(path.read_text()))
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--quiet", "--line-length", "79"]
    subprocess.run([*ruff, str(tmp_path)], check=True)
    for fault in FAULTS:
        path, seeded = fault.seeded(ROOT)
        if not path.endswith(".py"):
            continue
        diff = [renamed(line) for line in fault.diff]
        path_there, there = dataclasses.replace(
            fault, target=renamed(fault.target), diff=diff
        ).seeded(tmp_path)
        assert path_there == path
        assert ast.dump(ast.parse(there)) == ast.dump(ast.parse(renamed(seeded))), fault.why


def test_the_code_of_a_fault_must_be_there() -> None:
    fault = Fault("copy_tree", "nothing", ["-k", "x"], ["-there.is.no.such(line)"])
    with pytest.raises(ValueError, match="found it 0 times"):
        fault.seeded(ROOT)


# How many defects each list has; strangers' programs begin at 0.
POINTS = {"strangers-": range(38), "kfac-S": range(1, 11), "codecs-S": range(1, 21)}
POINTS |= {"decoupled-": range(1, 18), "turns-": range(1, 15)}
GONE = {"decoupled-10"}  # with DecoupledState.plan_codec; turns-15 with semaphores on a device


def test_every_known_defect_has_a_test() -> None:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marks = [mark for text in texts for mark in re.findall(r"mark\.defect\((.*?)\)", text)]
    marked = {number for mark in marks for number in re.findall(r'"([^"]+)"', mark)}
    known = {f"{report}{number}" for report, numbers in POINTS.items() for number in numbers} - GONE
    assert not known - marked, "these have no test"
    assert not marked - known, "nobody knows these"
