"""Every known defect has a test."""

import re
from pathlib import Path

# How many defects each list has; strangers' programs begin at 0.
POINTS = {"strangers-": range(38), "kfac-S": range(1, 11), "codecs-S": range(1, 21)}
POINTS |= {"decoupled-": range(1, 18), "turns-": range(1, 15)}
GONE = {"decoupled-10"}  # with DecoupledState.plan_codec; turns-15 with semaphores on a device
TESTS = Path(__file__).parents[1]


def test_every_known_defect_has_a_test() -> None:
    texts = (path.read_text() for path in TESTS.rglob("test_*.py"))
    marks = [mark for text in texts for mark in re.findall(r"mark\.defect\((.*?)\)", text)]
    marked = {number for mark in marks for number in re.findall(r'"([^"]+)"', mark)}
    known = {f"{report}{number}" for report, numbers in POINTS.items() for number in numbers} - GONE
    assert not known - marked, "these have no test"
    assert not marked - known, "nobody knows these"
