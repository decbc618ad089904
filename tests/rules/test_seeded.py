"""Seeded faults: each can still be seeded, and its tests are there. `python -m tests.seeded` sees them found."""

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
