"""A short form of the averaging states' campaign: `python -m tests.faults.averaging_campaign` is the long one."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults import averaging_campaign
from tests.faults.averaging_campaign import FAULTS, plan_lives
from tests.harness.campaign import SEED

SHORT_EVENTS = 4


def run(tmp_path: Path, arguments: Sequence[object]) -> dict[str, Any]:
    return averaging_campaign.main([*map(str, arguments), "--keep", str(tmp_path)])


@pytest.mark.quiet
def test_random_faults_leave_no_hang_and_no_wrong_bit(tmp_path: Path) -> None:
    found = run(tmp_path, ["--seed", SEED, "--events", SHORT_EVENTS, "--lanes", 1])
    assert found["failures"] == [], json.dumps(found["failures"], indent=1)
    assert found["events"] == SHORT_EVENTS
    assert found["steps"] > SHORT_EVENTS * averaging_campaign.STEPS / 4


def test_lives_have_all_faults_and_restart_with_two_and_four_ranks() -> None:
    lives = [life for seed in range(40) for life in plan_lives(random.Random(seed), 8)]
    assert {life.fault for life in lives} == set(FAULTS)
    assert {life.world_size for life in lives} == {2, 4}
    assert all(0 <= life.victim < life.world_size for life in lives)
    for seed in range(40):
        one, other = (plan_lives(random.Random(seed), 8) for _ in range(2))
        assert one == other
        for before, after in itertools.pairwise(one):
            assert (after.world_size != before.world_size) == (before.fault == "restart")
