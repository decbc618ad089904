"""A short form of the averaging states' campaign: `python -m tests.faults.averaging_campaign` is the long one."""

import itertools
import json
import random
from pathlib import Path

import pytest

from tests.faults import averaging_campaign
from tests.faults.averaging_campaign import FAULTS, plan_lives
from tests.harness.campaign import SEED

SHORT_EVENTS = 4


@pytest.mark.quiet
def test_random_faults_leave_no_hang_and_no_wrong_bit(tmp_path: Path) -> None:
    arguments = ["--seed", SEED, "--events", SHORT_EVENTS, "--lanes", 1, "--keep", tmp_path]
    found = averaging_campaign.main([*map(str, arguments)])
    assert found["failures"] == [], json.dumps(found["failures"], indent=1)
    assert found["events"] == SHORT_EVENTS
    assert found["steps"] > SHORT_EVENTS * averaging_campaign.STEPS / 4


def test_lives_have_all_faults_and_restart_with_two_and_four_ranks() -> None:
    jobs = [plan_lives(random.Random(seed), 8) for seed in range(40)]
    assert jobs == [plan_lives(random.Random(seed), 8) for seed in range(40)]
    lives = [*itertools.chain(*jobs)]
    assert {life.fault for life in lives} == set(FAULTS)
    assert all(0 <= life.victim < life.world_size for life in lives)
    for before, after in itertools.chain(*map(itertools.pairwise, jobs)):
        assert {before.world_size, after.world_size} == (
            {2, 4} if before.fault == "restart" else {before.world_size}
        )
