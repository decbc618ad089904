"""A short form of the mutex's campaign, and what judges it: `python -m tests.faults.mutex_campaign` is the long one."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults import mutex_campaign
from tests.faults.oracles import FOREVER, Leftovers, Rank, Story, read_rank, violations
from tests.faults.schedules import FAULTS, MEDDLINGS, JobPlan, Schedule, schedule
from tests.harness.campaign import SEED, only_in_campaign

SHORT_EVENTS = 120
BROKEN_EVENTS = 20
TOLD = {
    "overlap": "two holders",
    "deafness": "after it could",
    "early_ends": "before that had done turn",
    "leftovers": "left behind in shared memory",
}
LEASE_S = 1.0


def run(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    return mutex_campaign.main([*map(str, arguments), "--keep", str(tmp_path)])


@pytest.mark.quiet
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    found = run(tmp_path, "--seed", SEED, "--events", SHORT_EVENTS, "--lanes", 3)
    assert found["violations"] == 0, json.dumps(found["failures"], indent=1)
    assert found["events"] == SHORT_EVENTS
    assert found["turns"] > SHORT_EVENTS


@only_in_campaign
@pytest.mark.quiet
@pytest.mark.parametrize("sabotage", TOLD)
def test_the_campaign_notices_a_broken_package(sabotage: str, tmp_path: Path) -> None:
    for seed in range(1, 9):  # on a busy machine siblings may not meet in one
        arguments = ["--seed", seed, "--events", BROKEN_EVENTS, "--lanes", 1, "--sabotage", sabotage]
        found = run(tmp_path, *arguments)
        told = [each for failure in found["failures"] for each in failure["violations"]]
        if any(TOLD[sabotage] in each for each in told):
            break
    else:
        raise AssertionError(f"nobody noticed: {told}")
    kept = json.loads((tmp_path / f"seed{seed}" / "schedule.json").read_text())
    plan = schedule(seed, BROKEN_EVENTS, isolated=found["isolated"])
    assert kept["faults"] == list(plan.faults), "it replays from its seed"


@pytest.mark.parametrize("isolated", [True, False])
def test_a_schedule_is_a_function_of_its_seed_within_the_world_that_it_describes(isolated: bool) -> None:
    plans = [schedule(seed, 40, isolated=isolated) for seed in range(300)]
    found = {fault for plan in plans for fault in plan.faults}
    assert {*FAULTS, *MEDDLINGS} - found == ({"meddle"} if isolated else {"meddle", "full", "reuse-pid"})
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


def turn(
    number: int, wanted_s: float, begins_s: float, ends_s: float, done_s: float = 0.0
) -> list[list[Any]]:
    return [["begin", begins_s, number, wanted_s, 77], ["end", ends_s, number, done_s]]


def told(ranks: Sequence[Rank], meddled_s: float = FOREVER, leftovers: Leftovers | None = None) -> list[str]:
    plan = Schedule(1, 1, 1, tuple(rank.job for rank in ranks), (), 9.0, ())
    found, meddled = {rank.key: rank for rank in ranks}, {} if meddled_s == FOREVER else {0: [meddled_s]}
    return violations(Story(plan, found, meddled, leftovers or Leftovers(), late_s=0.0, slack_s=0.2))


def first(ends_s: float, *lines: Sequence[Any]) -> Rank:
    return rank_of(0, *turn(1, 1.0, 1.0, ends_s), *lines)


def second(begins_s: float, *lines: Sequence[Any]) -> Rank:
    return rank_of(1, *turn(2, 1.0, begins_s, 3.0), *lines)


def alone(ends_s: float) -> Rank:
    """A rank whose first turn had no number yet when it began."""
    return rank_of(0, ["begin", 1.0, 0, 1.0, 0], ["end", ends_s, 1, 0.0], ["log", 8.0, 77, "0001"])


HELD, SHORT, LATE = first(4.0), first(2.0), second(2.5)
FORGAVE = forgave(2.5, 1, 1.5)
AGAIN = rank_of(1, FORGAVE, forgave(4.0, 3, 3.0))
PASSING = rank_of(1, FORGAVE, *turn(4, 3.0, 3.0, 5.0))
TWO_RANKS = rank_of(0, *turn(1, 1.0, 1.0, 2.0), devices=(0, 0))
WITH_IT = read_rank(TWO_RANKS.job, 1, [*turn(2, 1.0, 1.0, 2.0), ["done", 9.0, {}]])
PATH = "/dev/shm/crossover_ddp-0/campaign-1-0@.turns"
REFUSED = [f"got something else at {PATH}; remove it"]
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
        ([HELD, LATE], "two holders"),
        ([HELD, rank_of(1, FORGAVE, *turn(2, 1.0, 2.5, 3.0))], ""),
        # A late begin, unless the rank itself was stopped.
        ([SHORT, LATE], "0.500 s after it could"),
        ([SHORT, stopped(LATE, 2.1, 2.45)], ""),
        # A turn that began alone holds those after it, too.
        ([alone(2.45), LATE], ""),
        ([alone(4.0), LATE], "two holders"),
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
        ([first(2.6, *turn(3, 2.7, 2.8, 4.5)), PASSING], "two holders"),
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
            [rank_of(0, *turn(1, 1.0, 1.0, 2.0, 2.3)), second(2.001)],
            "turn 2 of job 1 rank 0 on device 0 began 0.2990 s before that had done turn 1 of job 0",
        ),
        ([TWO_RANKS, WITH_IT], "had different turns: [1] and [2]"),
    ],
)
def test_each_broken_promise_is_told_and_nothing_else(ranks: Sequence[Rank], violation: str) -> None:
    found = told(ranks)
    assert any(violation in each for each in found) if violation else found == []


@pytest.mark.parametrize(
    ("ranks", "meddled_s", "violation"),
    [
        ([HELD, LATE], 2.4, ""),
        ([first(8.0), rank_of(1, *turn(2, 1.5, 8.001, 8.1))], 1.2, ""),
        ([first(8.0), rank_of(1, *turn(2, 1.5, 8.5, 8.6))], 1.2, "0.500 s after it could"),
        ([GIVING_UP], 0.9, ""),
        # A log cut short counts anew, while the device is still at an earlier one's turn.
        ([rank_of(0, *turn(5, 1.0, 1.0, 2.0, 2.3)), rank_of(1, *turn(2, 2.6, 2.6, 2.8, 2.9))], 1.5, ""),
    ],
)
def test_where_files_were_meddled_with_turns_may_overlap_be_waited_for_and_given_up(
    ranks: Sequence[Rank], meddled_s: float, violation: str
) -> None:
    found = told(ranks, meddled_s)
    assert any(violation in each for each in found) if violation else found == []


@pytest.mark.parametrize(
    ("killed_s", "leftovers", "allowed"),
    [
        (FOREVER, Leftovers([PATH]), False),
        (9.5, Leftovers([PATH]), True),
        (5.0, Leftovers([PATH]), False),
        (9.5, Leftovers([PATH], [PATH]), False),
        (9.5, Leftovers([PATH], [PATH], REFUSED), True),
    ],
)
def test_leftovers_are_told_unless_the_last_was_killed_or_the_file_was_refused(
    killed_s: float, leftovers: Leftovers, allowed: bool
) -> None:
    ranks = [rank_of(0), rank_of(1) if killed_s == FOREVER else cut_off(1, killed_s=killed_s)]
    found = told(ranks, leftovers=leftovers)
    assert found == [] if allowed else "left behind" in found[0]
