"""A short form of the fault campaign; `python -m tests.faults.campaign` is the long one."""

import pytest

from tests.faults import campaign
from tests.harness.campaign import SEED, only_in_campaign


@only_in_campaign
@pytest.mark.quiet
def test_a_steady_job_survives_guests_that_come_go_die_and_stop() -> None:
    arguments = ["--events", "5", "--seed", str(SEED), "--long-stop", "5.5", "--pace", "0.3", "--rate", "300"]
    result = campaign.main(arguments)
    assert result["failures"] == []
    assert result["steps"] > 10
    assert result["guests"] > 0
