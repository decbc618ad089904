"""Each seeded fault can still be seeded, and its tests are there; each known defect has a test."""

import re

import pytest

from tests.seeded.fault import FAULTS, ROOT, Fault


def test_faults_can_be_seeded_and_their_tests_are_there() -> None:
    for fault in FAULTS:
        seeded = fault.seeded(ROOT)
        if fault.path.endswith(".py"):
            compile(seeded, fault.path, "exec")  # says which one it is
    assert [fault.why for fault in FAULTS if not fault.tests or fault.missing(ROOT)] == []


def test_a_fault_of_other_days_is_refused() -> None:
    fault = Fault("tests/seeded/__init__.py", "nothing", ["-k", "x"], ["-a line that stands nowhere in it"])
    with pytest.raises(ValueError, match="found them 0 times"):
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
