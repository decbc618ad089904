"""A short form of the fault campaign; `python -m tests.faults.campaign` is the long one."""

import time

from tests.faults import campaign


def test_a_steady_job_survives_guests_that_come_go_die_and_stop() -> None:
    seed = int(time.time())
    result = campaign.main(["--events", "14", "--seed", str(seed), "--long-stop", "7", "--pace", "0.5"])
    assert result["steps"] > 10
    assert result["guests"] > 0
