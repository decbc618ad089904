"""A short form of the mutex's campaign, and what judges it: `python -m tests.faults.mutex_campaign` is the long one."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults import mutex_campaign
from tests.faults.oracles import FOREVER, Leftovers, Rank, Story, read_rank, violations
from tests.faults.schedules import FAULTS, MEDDLINGS, JobPlan, Schedule, schedule
from tests.harness.campaign import SEED, only_in_campaign

SHORT_EVENTS = 120
BROKEN_SEEDS, BROKEN_EVENTS = (11, 6, 3, 24), 20
SABOTAGES = {
    "overlap": "two holders on device",
    "deafness": "after it could",
    "leftovers": "left behind in shared memory",
}


# --- real ranks -----------------------------------------------------------------------------------------------


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    return mutex_campaign.main([*arguments, "--keep", str(tmp_path / "kept")])


@pytest.mark.quiet
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    found = run(tmp_path, "--seed", str(SEED), "--events", str(SHORT_EVENTS), "--lanes", "3")
    assert found["violations"] == 0, json.dumps(found["failures"], indent=1)
    assert found["events"] == SHORT_EVENTS
    assert found["turns"] > SHORT_EVENTS


def run_broken(tmp_path: Path, sabotage: str) -> tuple[int, dict[str, Any]]:
    """Return the first seed whose schedule gave the sabotage away: on a busy machine siblings may not meet in one."""
    for seed in BROKEN_SEEDS:
        arguments = ["--seed", str(seed), "--events", str(BROKEN_EVENTS), "--lanes", "1"]
        found = run(tmp_path / sabotage, *arguments, "--sabotage", sabotage)
        violations = [each for failure in found["failures"] for each in failure["violations"]]
        if any(SABOTAGES[sabotage] in each for each in violations):
            return seed, found
    raise AssertionError(f"nobody noticed {sabotage}: {violations}")


@only_in_campaign
@pytest.mark.quiet
def test_the_campaign_notices_a_broken_package(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(SABOTAGES)) as pool:
        results = dict(
            zip(SABOTAGES, pool.map(lambda each: run_broken(tmp_path, each), SABOTAGES), strict=True)
        )
    for sabotage, (seed, found) in results.items():
        (failure,) = found["failures"]
        assert failure["seed"] == seed
        kept = json.loads((tmp_path / sabotage / "kept" / f"seed{seed}" / "schedule.json").read_text())
        plan = schedule(seed, BROKEN_EVENTS, isolated=found["isolated"])
        assert kept["faults"] == list(plan.faults), "it replays from its seed"


# --- schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolated", [True, False])
def test_a_schedule_is_a_function_of_its_seed_within_the_world_that_it_describes(isolated: bool) -> None:
    plans = [schedule(seed, 40, isolated=isolated) for seed in range(300)]
    found = {fault for plan in plans for fault in plan.faults}
    assert {*FAULTS, *MEDDLINGS} - found == (set() if isolated else {"full", "reuse-pid"})
    assert isolated == any(job.clock_offset_s for plan in plans for job in plan.jobs)
    for seed, plan in enumerate(plans[:100]):
        assert plan == schedule(seed, 40, isolated=isolated) != plans[seed + 1]
        assert len(plan.faults) == 40
        assert 1 <= plan.devices <= 4
        for job in plan.jobs:
            assert set(job.devices) <= set(range(plan.devices))
            assert job.leaves_at_s <= plan.ends_at_s
            assert all(set(deed.ranks) <= set(range(len(job.devices))) for deed in job.deeds)
        stopped, continued = (
            sorted((blow.job, blow.ranks) for blow in plan.blows if blow.kind == kind)
            for kind in ("stop", "continue")
        )
        assert stopped == continued


# --- what judges them: one broken promise each --------------------------------------------------------------------

LEASE_S = 1.0


def rank_of(number: int, *lines: Sequence[Any], **changes: Any) -> Rank:
    ends = [["leaving", 9.0, "closed"], ["left", 9.1, "closed"], ["done", 9.1, {}]]
    return cut_off(number, *lines, *ends, **changes)


def cut_off(number: int, *lines: Sequence[Any], killed_s: float = FOREVER, **changes: Any) -> Rank:
    """A rank whose record says no more than that it has joined, and these lines."""
    joined = ["joined", 0.1, number, 200 + number, True, 100 + number]
    plan = JobPlan(number, **{"lease_s": LEASE_S, "leaves_at_s": 9.0, **changes})
    rank = read_rank(plan, 0, [["lease", 0.1, LEASE_S], joined, *lines])
    rank.killed_s = killed_s
    return rank


def forgave(at_s: float, turn: int, since_s: float, lease_s: float = LEASE_S) -> list[Any]:
    """Lose patience with job 0."""
    return ["forgave", at_s, 100, turn, since_s, lease_s, False]


def turn(number: int, wanted_s: float, begins_s: float, ends_s: float) -> list[list[Any]]:
    return [["begin", begins_s, number, wanted_s, 77], ["end", ends_s, number]]


def told(*ranks: Rank, meddled_s: Sequence[float] = (), leftovers: Leftovers | None = None) -> list[str]:
    plan = Schedule(1, 1, 1, tuple(rank.job for rank in ranks), (), 9.0, ())
    found = {rank.key: rank for rank in ranks}
    return violations(Story(plan, found, {0: meddled_s}, leftovers or Leftovers(), late_s=0.0, slack_s=0.2))


def test_turns_one_after_the_other_are_well() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 2.0), *turn(3, 2.5, 3.0, 3.5))
    second = rank_of(1, *turn(2, 1.5, 2.001, 3.0))
    assert told(first, second) == []


def test_two_holders_are_told_unless_a_lease_was_over_or_the_files_were_meddled_with() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 4.0))
    overlapping = turn(2, 1.0, 2.5, 3.0)
    assert "two holders on device 0" in told(first, rank_of(1, *overlapping))[0]
    assert told(first, rank_of(1, forgave(2.5, 1, 1.5), *overlapping)) == []
    assert told(first, rank_of(1, *overlapping), meddled_s=[2.4]) == []


def test_a_late_begin_is_told_unless_the_rank_itself_was_stopped() -> None:
    first, late = rank_of(0, *turn(1, 1.0, 1.0, 2.0)), rank_of(1, *turn(2, 1.0, 2.5, 3.0))
    assert "0.500 s after it could" in told(first, late)[0]
    late.stops = [(2.1, 2.45)]
    assert told(first, late) == []


@pytest.mark.parametrize(
    ("line", "violation"),
    [
        (forgave(2.5, 1, 2.0), "after 0.500 s of a lease of 1.0 s"),
        (forgave(3.5, 1, 1.5), "only after 2.000 s"),
        (forgave(5.0, 1, 4.0), "which was given back 1.000 s before"),
        (forgave(2.5, 1, 2.0, lease_s=0.5), "after a lease of 0.5 s: published were [1.0]"),
        ([*forgave(2.5, 1, 1.5)[:-1], True], "after 1.000 s of a lease of 1.0 s"),
    ],
)
def test_patience_lost_too_early_too_late_or_with_nobody_is_told(line: list[Any], violation: str) -> None:
    assert violation in told(rank_of(0, *turn(1, 1.0, 1.0, 4.0)), rank_of(1, line))[0]


def test_a_second_lease_of_a_job_that_has_not_moved_is_told() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 7.0))
    again = rank_of(1, forgave(2.5, 1, 1.5), forgave(4.0, 3, 3.0))
    assert any("although nobody of it had moved" in each for each in told(first, again))
    moving = rank_of(0, *turn(1, 1.0, 1.0, 2.6), *turn(3, 2.7, 2.8, 7.0))
    assert told(moving, again) == []


def test_a_later_turn_of_a_job_that_has_not_moved_may_be_passed_over() -> None:
    passing = rank_of(1, forgave(2.5, 1, 1.5), *turn(4, 3.0, 3.0, 5.0))
    unmoved = rank_of(0, *turn(1, 1.0, 1.0, 3.5), *turn(3, 3.6, 3.6, 4.5))
    assert told(unmoved, passing) == []
    moved = rank_of(0, *turn(1, 1.0, 1.0, 2.6), *turn(3, 2.7, 2.8, 4.5))
    assert "two holders on device 0" in told(moved, passing)[0]


@pytest.mark.parametrize(
    ("lease_s", "is_told"), [(5.0, False), (8.0, False), (12.0, True), (4.9, True), (61.0, True)]
)
def test_a_lease_that_does_not_follow_the_turns_is_told(lease_s: float, is_told: bool) -> None:
    lines = [*turn(1, 1.0, 1.0, 2.9), *turn(2, 3.0, 3.0, 8.0), ["lease", 8.5, lease_s]]
    rank = rank_of(0, ["lease", 0.1, 5.0], *lines, lease_s=None)
    del rank.leases[0]
    assert any("published a lease of" in each for each in told(rank)) == is_told


def test_a_turn_whose_end_a_stop_kept_back_was_not_given_back() -> None:
    impatient = rank_of(1, forgave(5.0, 1, 4.0))
    stopped = rank_of(0, *turn(1, 1.0, 1.0, 2.0))
    stopped.stops = [(2.01, 6.0)]
    assert told(stopped, impatient) == []
    stopped.stops = [(2.5, 6.0)]
    assert "which was given back 3.000 s before" in told(stopped, impatient)[0]


@pytest.mark.parametrize(
    ("begins_s", "violation"), [(2.001, ""), (1.9, ""), (1.7, "two holders"), (2.9, "after it could")]
)
def test_a_death_frees_the_turn_and_not_before(begins_s: float, violation: str) -> None:
    """Unless it had begun to give it back, and was killed before it could note the end."""
    held, later = ["begin", 1.0, 1, 1.0, 77], rank_of(1, *turn(2, 1.0, begins_s, 3.0))
    assert any(
        violation in each for each in told(cut_off(0, held, ["ending", 1.8], killed_s=2.0), later)
    ) == bool(violation)
    assert bool(told(cut_off(0, held, killed_s=2.0), later)) == (begins_s != 2.001)


def test_a_turn_held_since_before_files_were_meddled_with_may_be_waited_for() -> None:
    holder = rank_of(0, *turn(1, 1.0, 1.0, 8.0))
    assert told(holder, rank_of(1, *turn(2, 1.5, 8.001, 8.1)), meddled_s=[1.2]) == []
    assert "0.500 s after it could" in told(holder, rank_of(1, *turn(2, 1.5, 8.5, 8.6)), meddled_s=[1.2])[0]


def test_a_log_that_names_somebody_else_other_turns_and_bad_ends_are_told() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 2.0), ["log", 5.0, 77, "01"])
    assert "turn 1 of job 0 is slot 1's in the log" in told(first)[0]
    first = rank_of(0, *turn(1, 1.0, 1.0, 2.0), devices=(0, 0))
    second = read_rank(first.job, 1, [*turn(2, 1.0, 1.0, 2.0), ["done", 9.0, {}]])
    assert any("had different turns: [1] and [2]" in each for each in told(first, second))
    gave_up = cut_off(0, ["leaving", 1.0, "OSError: x"], ["done", 2.0, {}])
    assert told(gave_up) == ["job 0 rank 0 gave up turns: OSError: x"]
    assert told(gave_up, meddled_s=[0.9]) == []
    assert "did not end by itself" in told(cut_off(0))[0]


def test_leftovers_are_told_unless_the_last_was_killed_or_the_file_was_refused() -> None:
    path = "/dev/shm/crossover_ddp-0/campaign-1-0@.turns"
    rank = rank_of(0)
    assert "left behind" in told(rank, leftovers=Leftovers([path]))[0]
    killed = cut_off(1, killed_s=9.5)
    assert told(rank, killed, leftovers=Leftovers([path])) == []
    killed.killed_s = 5.0
    assert "left behind" in told(rank, killed, leftovers=Leftovers([path]))[0]
    killed.killed_s = 9.5
    assert "left behind" in told(rank, killed, leftovers=Leftovers([path], [path]))[0]
    refused = Leftovers([path], [path], [f"got something else at {path}; remove it"])
    assert told(rank, killed, leftovers=refused) == []


def test_a_device_that_begins_too_early_is_told() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 2.0), ["device", 2.0, 1, 1.0, 2.3])
    second = rank_of(1, *turn(2, 1.0, 2.001, 3.0), ["device", 3.0, 2, 2.1, 3.0])
    assert "device 0 began turn 2 of job 1 0.2000 s before it ended turn 1 of job 0" in told(first, second)[0]
