"""Each seeded fault still applies and its tests exist. Each known defect has a test.

Marks by which `make` chooses files are set only in files of tests.
"""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeded.fault import FAULTS, ROOT, SEARCHED, Fault

RENAMED = re.compile(
    r"\b(Bucket|Backward|Exchange|DecoupledState|Pending|OwnerState|FactorCapture|Turns|CodedLink"
    r"|ModuleBuffers)\b"
)


def test_faults_can_be_seeded_and_their_tests_exist() -> None:
    for fault in FAULTS:
        path, seeded = fault.seeded(ROOT)
        if path.endswith(".py"):
            compile(seeded, fault.why, "exec")  # a SyntaxError names the fault
    assert [fault.why for fault in FAULTS if not fault.tests or fault.missing(ROOT)] == []


def test_faults_survive_a_rename_of_ten_classes_and_another_layout(tmp_path: Path) -> None:
    """After both each fault makes the same mutation, with the new names."""

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
        renamed_fault = dataclasses.replace(fault, target=renamed(fault.target), diff=diff)
        renamed_path, renamed_seeded = renamed_fault.seeded(tmp_path)
        assert renamed_path == path
        expected = ast.dump(ast.parse(renamed(seeded)))
        assert ast.dump(ast.parse(renamed_seeded)) == expected, fault.why


def test_a_fault_whose_code_does_not_exist_is_an_error() -> None:
    fault = Fault("copy_tree", "nothing", ["-k", "x"], ["-there.is.no.such(line)"])
    with pytest.raises(ValueError, match="found it 0 times"):
        fault.seeded(ROOT)


# The numbers of the defects in each report. The programs of outside users begin at 0. A test
# carries its defect's number as ``@pytest.mark.defect("kfac-S2")``. The test of a defect that is
# not mended is also marked ``xfail(strict=True, raises=…, reason="kfac-S2")``: it states the
# expected behaviour, and fails on the day that the defect is mended, so that the mark is removed.
NUMBERS = {"strangers-": range(38), "kfac-S": range(1, 11), "codecs-S": range(1, 21)}
NUMBERS |= {"decoupled-": range(1, 18), "turns-": range(1, 15)}
# These defects went with the code that had them: DecoupledState.plan_codec here, and semaphores on
# a device (turns-15, beyond the range above).
GONE = {"decoupled-10"}


def test_every_known_defect_has_a_test() -> None:
    marked = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for mark in re.findall(r"mark\.defect\((.*?)\)", path.read_text()):
            marked.update(re.findall(r'"([^"]+)"', mark))
    known = {f"{report}{number}" for report, numbers in NUMBERS.items() for number in numbers}
    assert not known - GONE - marked, "these have no test"
    assert not marked - (known - GONE), "no report has these"


@pytest.mark.parametrize("mark", ["quiet", "torch_version"])
def test_make_finds_the_files_of_a_mark(mark: str) -> None:
    """A test whose file does not contain the mark would not run at all, see `marked_files`."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if f"mark.{mark}" in path.read_text()]
    assert files
    assert [path for path in files if not path.name.startswith("test_")] == []
