"""A short form of the averaging states' campaign: `python -m tests.faults.averaging_campaign` is the long one."""

import json
from pathlib import Path

import pytest

from tests.faults import averaging_campaign
from tests.harness.campaign import SEED

SHORT_EVENTS = 4


@pytest.mark.quiet
def test_random_faults_leave_no_hang_and_no_wrong_bit(tmp_path: Path) -> None:
    arguments = ["--seed", SEED, "--events", SHORT_EVENTS, "--lanes", 1, "--keep", tmp_path]
    found = averaging_campaign.main([*map(str, arguments)])
    assert found["failures"] == [], json.dumps(found["failures"], indent=1)
    assert found["events"] == SHORT_EVENTS
    assert found["steps"] > SHORT_EVENTS * averaging_campaign.STEPS / 4
