"""A short form of the mutex's campaign, and what judges it: `python -m tests.faults.mutex_campaign` is the long one."""

import dataclasses
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
    "early_ends": "before that had done turn",
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
    joined = ["joined", 0.1, number, True, 100 + number]
    plan = JobPlan(number, **{"lease_s": LEASE_S, "leaves_at_s": 9.0, **changes})
    rank = read_rank(plan, 0, [["lease", 0.1, LEASE_S], joined, *lines])
    rank.killed_s = killed_s
    return rank


def forgave(at_s: float, turn: int, since_s: float, lease_s: float = LEASE_S) -> list[Any]:
    """Lose patience with job 0."""
    return ["forgave", at_s, 100, turn, since_s, lease_s]


def turn(number: int, wanted_s: float, begins_s: float, ends_s: float) -> list[list[Any]]:
    return [["begin", begins_s, number, wanted_s, 77], ["end", ends_s, number]]


def told(*ranks: Rank, meddled_s: Sequence[float] = (), leftovers: Leftovers | None = None) -> list[str]:
    plan = Schedule(1, 1, 1, tuple(rank.job for rank in ranks), (), 9.0, ())
    found = {rank.key: rank for rank in ranks}
    return violations(Story(plan, found, {0: meddled_s}, leftovers or Leftovers(), late_s=0.0, slack_s=0.2))


def first(ends_s: float, *lines: Sequence[Any]) -> Rank:
    return rank_of(0, *turn(1, 1.0, 1.0, ends_s), *lines)


def second(begins_s: float, *lines: Sequence[Any]) -> Rank:
    return rank_of(1, *turn(2, 1.0, begins_s, 3.0), *lines)


def alone(ends_s: float) -> Rank:
    """A rank whose first turn had no number yet when it began."""
    return rank_of(0, ["begin", 1.0, 0, 1.0, 0], ["end", ends_s, 1], ["log", 8.0, 77, "0001"])


HELD, SHORT, LATE = first(4.0), first(2.0), second(2.5)
FORGAVE = forgave(2.5, 1, 1.5)
AGAIN = rank_of(1, FORGAVE, forgave(4.0, 3, 3.0))
PASSING = rank_of(1, FORGAVE, *turn(4, 3.0, 3.0, 5.0))
IMPATIENT = rank_of(1, forgave(5.0, 1, 4.0))
GIVING_UP = cut_off(0, ["leaving", 1.0, "OSError: x"], ["done", 2.0, {}])
DEAD, ENDING = (
    cut_off(0, ["begin", 1.0, 1, 1.0, 77], *lines, killed_s=2.0) for lines in ([], [["ending", 1.8]])
)


def stopped(rank: Rank, begin_s: float, end_s: float) -> Rank:
    return dataclasses.replace(rank, stops=[(begin_s, end_s)])


def with_leases(lease_s: float) -> Rank:
    """A rank whose lease was not given, and its turns of 1.9 s and 5 s."""
    lines = [*turn(1, 1.0, 1.0, 2.9), *turn(2, 3.0, 3.0, 8.0), ["lease", 8.5, lease_s]]
    rank = rank_of(0, ["lease", 0.1, 5.0], *lines, lease_s=None)
    del rank.leases[0]
    return rank


@pytest.mark.parametrize(
    ("ranks", "violation"),
    [
        # One after the other.
        ([first(2.0, *turn(3, 2.5, 3.0, 3.5)), rank_of(1, *turn(2, 1.5, 2.001, 3.0))], ""),
        # Two holders, unless a lease was over.
        ([HELD, LATE], "two holders on device 0"),
        ([HELD, rank_of(1, FORGAVE, *turn(2, 1.0, 2.5, 3.0))], ""),
        # A late begin, unless the rank itself was stopped.
        ([SHORT, LATE], "0.500 s after it could"),
        ([SHORT, stopped(LATE, 2.1, 2.45)], ""),
        # A turn that began alone holds those after it, too.
        ([alone(2.45), LATE], ""),
        ([alone(4.0), LATE], "two holders on device 0"),
        # Patience lost too early, too late, or with nobody.
        ([HELD, rank_of(1, forgave(2.5, 1, 2.0))], "after 0.500 s of a lease of 1.0 s"),
        ([HELD, rank_of(1, forgave(3.5, 1, 1.5))], "only after 2.000 s"),
        ([HELD, IMPATIENT], "which was given back 1.000 s before"),
        ([HELD, rank_of(1, forgave(2.5, 1, 2.0, 0.5))], "after a lease of 0.5 s: published were [1.0]"),
        # A second lease of a job that has not moved.
        ([first(7.0), AGAIN], "although nobody of it had moved"),
        ([first(2.6, *turn(3, 2.7, 2.8, 7.0)), AGAIN], ""),
        # A later turn of a job that has not moved may be passed over.
        ([first(3.5, *turn(3, 3.6, 3.6, 4.5)), PASSING], ""),
        ([first(2.6, *turn(3, 2.7, 2.8, 4.5)), PASSING], "two holders on device 0"),
        # A lease that does not follow the turns.
        *(([with_leases(lease_s)], "") for lease_s in (5.0, 8.0)),
        *(([with_leases(lease_s)], "published a lease of") for lease_s in (12.0, 4.9, 61.0)),
        # A turn whose end a stop kept back was not given back.
        ([stopped(SHORT, 2.01, 6.0), IMPATIENT], ""),
        ([stopped(SHORT, 2.5, 6.0), IMPATIENT], "which was given back 3.000 s before"),
        (
            [
                stopped(SHORT, 2.01, 2.9),
                rank_of(1, FORGAVE, *turn(2, 2.1, 2.5, 2.55)),
                rank_of(2, *turn(3, 2.2, 2.9, 3.0)),
            ],
            "",
        ),
        # A death frees the turn, and not before, unless it was killed before it could note the end.
        ([DEAD, second(2.001)], ""),
        ([DEAD, second(1.9)], "two holders"),
        ([DEAD, second(2.9)], "after it could"),
        ([ENDING, second(1.9)], ""),
        ([ENDING, second(1.7)], "two holders"),
        # A log that names somebody else, bad ends, a device that begins too early.
        ([first(2.0, ["log", 5.0, 77, "01"])], "turn 1 of job 0 is slot 1's in the log"),
        ([GIVING_UP], "job 0 rank 0 gave up turns: OSError: x"),
        ([cut_off(0)], "did not end by itself"),
        (
            [first(2.0, ["device", 2.0, 1, 2.3]), second(2.001, ["device", 3.0, 2, 3.0])],
            "turn 2 of job 1 began on device 0 0.2990 s before that had done turn 1 of job 0",
        ),
    ],
)
def test_each_broken_promise_is_told_and_nothing_else(ranks: Sequence[Rank], violation: str) -> None:
    found = told(*ranks)
    assert any(violation in each for each in found) if violation else found == []


def test_where_files_were_meddled_with_turns_may_overlap_be_waited_for_and_given_up() -> None:
    holder = first(8.0)
    assert told(HELD, LATE, meddled_s=[2.4]) == []
    assert told(holder, rank_of(1, *turn(2, 1.5, 8.001, 8.1)), meddled_s=[1.2]) == []
    assert "0.500 s after it could" in told(holder, rank_of(1, *turn(2, 1.5, 8.5, 8.6)), meddled_s=[1.2])[0]
    assert told(GIVING_UP, meddled_s=[0.9]) == []
    # A log cut short counts anew, while the device is still at an earlier one's turn.
    before = rank_of(0, *turn(5, 1.0, 1.0, 2.0), ["device", 2.0, 5, 2.3])
    assert told(before, rank_of(1, *turn(2, 2.6, 2.6, 2.8), ["device", 2.8, 2, 2.9]), meddled_s=[1.5]) == []


def test_ranks_of_one_job_with_different_turns_are_told() -> None:
    one = rank_of(0, *turn(1, 1.0, 1.0, 2.0), devices=(0, 0))
    other = read_rank(one.job, 1, [*turn(2, 1.0, 1.0, 2.0), ["done", 9.0, {}]])
    assert any("had different turns: [1] and [2]" in each for each in told(one, other))


def test_leftovers_are_told_unless_the_last_was_killed_or_the_file_was_refused() -> None:
    path, rank = "/dev/shm/crossover_ddp-0/campaign-1-0@.turns", rank_of(0)
    early, last = cut_off(1, killed_s=5.0), cut_off(1, killed_s=9.5)
    assert "left behind" in told(rank, leftovers=Leftovers([path]))[0]
    assert told(rank, last, leftovers=Leftovers([path])) == []
    assert "left behind" in told(rank, early, leftovers=Leftovers([path]))[0]
    assert "left behind" in told(rank, last, leftovers=Leftovers([path], [path]))[0]
    refused = Leftovers([path], [path], [f"got something else at {path}; remove it"])
    assert told(rank, last, leftovers=refused) == []
