"""Seeded faults: each can still be seeded, and its tests are still there. `python -m tests.seeded` sees them found."""

from pathlib import Path

import pytest

from tests.seeded.fault import ROOT, Fault
from tests.seeded.faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{Path(fault.path).stem}-{fault.why}")
def test_a_fault_can_be_seeded_and_has_tests(fault: Fault) -> None:
    compile(fault.seeded(ROOT), fault.path, "exec")
    assert fault.tests
    assert fault.missing(ROOT) == []


def test_a_fault_of_other_days_is_refused() -> None:
    fault = Fault("nothing", "tests/seeded/__init__.py", "a text that stands nowhere in it", "", ("-k", "x"))
    with pytest.raises(ValueError, match="found it 0 times"):
        fault.seeded(ROOT)
