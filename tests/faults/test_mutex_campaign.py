"""A short form of the mutex's campaign, and what judges it: `python -m tests.faults.mutex_campaign` is the long one."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import mutex_campaign
from tests.faults.oracles import FOREVER, Leftovers, Rank, Story, read_rank, violations
from tests.faults.schedules import FAULTS, MEDDLINGS, Deed, JobPlan, Schedule, schedule
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
def test_a_schedule_is_a_function_of_its_seed(isolated: bool) -> None:
    for seed in range(50):
        one = schedule(seed, 40, isolated=isolated)
        assert one == schedule(seed, 40, isolated=isolated)
        assert len(one.faults) == 40
        assert one != schedule(seed + 1, 40, isolated=isolated)


def test_schedules_know_every_fault() -> None:
    faults: set[str] = set()
    for seed in range(300):
        faults.update(schedule(seed, 40, isolated=True).faults)
    assert faults == {*FAULTS, *MEDDLINGS}


def test_without_namespaces_nothing_is_planned_that_needs_them() -> None:
    for seed in range(100):
        plan = schedule(seed, 40, isolated=False)
        assert not {"full", "reuse-pid"} & set(plan.faults)
        assert not any(job.clock_offset_s for job in plan.jobs)


def test_schedules_stay_within_the_world_they_describe() -> None:
    for seed in range(100):
        plan = schedule(seed, 40, isolated=True)
        assert 1 <= plan.devices <= 4
        for job in plan.jobs:
            assert set(job.devices) <= set(range(plan.devices))
            assert job.leaves_at_s <= plan.ends_at_s
            assert all(set(deed.ranks) <= set(range(len(job.devices))) for deed in job.deeds)
        stopped = [(b.job, b.ranks) for b in plan.blows if b.kind == "stop"]
        continued = [(b.job, b.ranks) for b in plan.blows if b.kind == "continue"]
        assert sorted(stopped) == sorted(continued)


# --- what judges them: one broken promise each --------------------------------------------------------------------

LEASE_S = 1.0


def plan_of(number: int, **changes: Any) -> JobPlan:
    job = JobPlan(number, 0, (0,), 0.0, 9.0, LEASE_S, 0.001, 0.001, "host", "plain")
    return replace(job, **changes)


def rank_of(number: int, *lines: Sequence[Any], **changes: Any) -> Rank:
    joined = ["joined", 0.1, number, 200 + number, True, 100 + number]
    ends = [["leaving", 9.0, "closed"], ["left", 9.1, "closed"], ["done", 9.1, {}]]
    return read_rank(plan_of(number, **changes), 0, [["lease", 0.1, LEASE_S], joined, *lines, *ends])


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


def test_a_turn_held_since_before_files_were_meddled_with_may_be_waited_for() -> None:
    holder = rank_of(0, *turn(1, 1.0, 1.0, 8.0))
    assert told(holder, rank_of(1, *turn(2, 1.5, 8.001, 8.1)), meddled_s=[1.2]) == []
    assert "0.500 s after it could" in told(holder, rank_of(1, *turn(2, 1.5, 8.5, 8.6)), meddled_s=[1.2])[0]


def test_a_death_frees_the_turn_and_not_before() -> None:
    killed = read_rank(plan_of(0), 0, [["joined", 0.1, 0, 200, True, 100], ["begin", 1.0, 1, 1.0, 77]])
    killed.killed_s = 2.0
    assert told(killed, rank_of(1, *turn(2, 1.0, 2.001, 3.0))) == []
    assert "two holders" in told(killed, rank_of(1, *turn(2, 1.0, 1.9, 3.0)))[0]
    assert "after it could" in told(killed, rank_of(1, *turn(2, 1.0, 2.9, 3.0)))[0]


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


def test_a_rank_killed_before_it_could_note_the_end_may_have_given_its_turn_back() -> None:
    lines = [["joined", 0.1, 0, 200, True, 100], ["begin", 1.0, 1, 1.0, 77], ["ending", 1.8]]
    killed = read_rank(plan_of(0), 0, lines)
    killed.killed_s = 2.0
    assert told(killed, rank_of(1, *turn(2, 1.0, 1.9, 3.0))) == []
    assert "two holders" in told(killed, rank_of(1, *turn(2, 1.0, 1.7, 3.0)))[0]


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


def test_a_log_that_names_somebody_else_is_told() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 2.0), ["log", 5.0, 77, "01"])
    assert "turn 1 of job 0 is slot 1's in the log" in told(first)[0]


def test_ranks_of_a_job_with_other_turns_are_told() -> None:
    first = rank_of(0, *turn(1, 1.0, 1.0, 2.0), devices=(0, 0))
    second = read_rank(first.job, 1, [*turn(2, 1.0, 1.0, 2.0), ["done", 9.0, {}]])
    assert any("had different turns: [1] and [2]" in each for each in told(first, second))


def test_giving_up_without_a_cause_is_told() -> None:
    lines = [["joined", 0.1, 0, 200, True, 100], ["leaving", 1.0, "OSError: x"], ["done", 2.0, {}]]
    assert told(read_rank(plan_of(0), 0, lines)) == ["job 0 rank 0 gave up turns: OSError: x"]
    assert told(read_rank(plan_of(0), 0, lines), meddled_s=[0.9]) == []


def test_a_rank_that_never_ends_is_told() -> None:
    rank = read_rank(plan_of(0), 0, [["joined", 0.1, 0, 200, True, 100]])
    assert rank.killed_s == FOREVER
    assert "did not end by itself" in told(rank)[0]


def test_leftovers_are_told_unless_the_last_was_killed_or_the_file_was_refused() -> None:
    path = "/dev/shm/crossover_ddp-0/campaign-1-0@.turns"
    rank = rank_of(0)
    assert "left behind" in told(rank, leftovers=Leftovers([path]))[0]
    killed = read_rank(plan_of(1), 0, [])
    killed.killed_s = 9.5
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


def test_deeds_are_read() -> None:
    rank = rank_of(0, ["deed", 1.0, "fork"], deeds=(Deed(1.0, "fork", (0,)),))
    assert rank.deeds == [(1.0, "fork")]
