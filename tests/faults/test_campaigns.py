"""Short campaigns, the oracles of the mutex's campaign, and hand-written jobs that they judge.

`python -m tests.faults.mutex_campaign` is a long campaign.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults import averaging_campaign, mutex_campaign
from tests.faults.lanes import Lane
from tests.faults.mutex_campaign import lived
from tests.faults.oracles import FOREVER, Claim, Leftovers, Rank, Story, read_rank, violations
from tests.faults.schedules import FAULTS, MEDDLINGS, JobPlan, Schedule, schedule
from tests.harness import spawn_script
from tests.harness.campaign import SEED, only_in_campaign
from tests.harness.groups import files_of, new_group

SHORT_EVENTS = 120
AVERAGING_EVENTS = 4
BROKEN_EVENTS = 20
# A part of the violation that each sabotage must cause.
EXPECTED = {
    "overlap": "two holders",
    "deafness": "after it could",
    "early_ends": "before the device had finished turn",
    "leftovers": "left behind in shared memory",
}
LEASE_S = 1.0


def run(tmp_path: Path, *arguments: object, campaign: Any = mutex_campaign) -> dict[str, Any]:
    found: dict[str, Any] = campaign.main([*map(str, arguments), "--keep", str(tmp_path)])
    return found


@pytest.mark.quiet
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    found = run(tmp_path, "--seed", SEED, "--events", SHORT_EVENTS, "--lanes", 3)
    assert found["violations"] == 0, json.dumps(found["failures"], indent=1)
    assert found["events"] == SHORT_EVENTS
    assert found["turns"] > SHORT_EVENTS


@pytest.mark.quiet
def test_random_faults_of_replicas_leave_no_hang_and_no_wrong_bit(tmp_path: Path) -> None:
    arguments = ["--seed", SEED, "--events", AVERAGING_EVENTS, "--lanes", 1]
    found = run(tmp_path, *arguments, campaign=averaging_campaign)
    assert found["failures"] == [], json.dumps(found["failures"], indent=1)
    assert found["events"] == AVERAGING_EVENTS
    assert found["steps"] > AVERAGING_EVENTS * averaging_campaign.STEPS / 4


@only_in_campaign
@pytest.mark.quiet
@pytest.mark.parametrize("sabotage", EXPECTED)
def test_the_campaign_notices_a_broken_package(sabotage: str, tmp_path: Path) -> None:
    for seed in range(1, 9):  # on a busy machine siblings may not meet in one schedule
        arguments = ["--seed", seed, "--events", BROKEN_EVENTS, "--lanes", 1]
        found = run(tmp_path, *arguments, "--sabotage", sabotage)
        noticed = [each for failure in found["failures"] for each in failure["violations"]]
        if any(EXPECTED[sabotage] in each for each in noticed):
            break
    else:
        raise AssertionError(f"no campaign noticed it: {noticed}")


@pytest.mark.parametrize("isolated", [True, False])
def test_a_schedule_is_a_function_of_its_seed_and_has_all_faults(isolated: bool) -> None:
    plans = [schedule(seed, 40, isolated=isolated) for seed in range(200)]
    assert plans[1] == schedule(1, 40, isolated=isolated) != plans[0]
    found = {fault for plan in plans for fault in plan.faults}
    assert {*FAULTS, *MEDDLINGS} - found == (
        {"meddle"} if isolated else {"meddle", "full", "reuse-pid"}
    )


def rank_of(number: int, *lines: Sequence[Any], **changes: Any) -> Rank:
    ends = [["leaving", 9.0, "closed"], ["left", 9.1, "closed"], ["done", 9.1, {}]]
    return cut_off(number, *lines, *ends, **changes)


def cut_off(number: int, *lines: Sequence[Any], killed_s: float = FOREVER, **changes: Any) -> Rank:
    """Return a rank whose record shows that it has joined, and these lines."""
    joined = ["joined", 0.1, True, 100 + number]
    plan = JobPlan(number, **{"lease_s": LEASE_S, "leaves_at_s": 9.0, **changes})
    rank = read_rank(plan, 0, [["lease", 0.1, LEASE_S], joined, *lines])
    rank.killed_s = killed_s
    return rank


def forgave(at_s: float, turn: int, since_s: float, lease_s: float = LEASE_S) -> list[Any]:
    """Return the line of a rank that has lost patience with job 0."""
    return ["forgave", at_s, 100, turn, since_s, lease_s]


def turn(
    number: int, wanted_s: float, begins_s: float, ends_s: float, done_s: float = 0.0
) -> list[Any]:
    return [["begin", begins_s, number, wanted_s, 77], ["end", ends_s, number, done_s]]


def judge(ranks: Sequence[Rank], leftovers: Leftovers | None = None) -> list[str]:
    plan = Schedule(1, 1, tuple(rank.job for rank in ranks), (), 9.0, ())
    found = {(rank.job.number, rank.rank): rank for rank in ranks}
    return violations(Story(plan, found, {}, leftovers or Leftovers(), tolerance_s=0.2))


def first(ends_s: float, *lines: Sequence[Any]) -> Rank:
    return rank_of(0, *turn(1, 1.0, 1.0, ends_s), *lines)


def second(begins_s: float, *lines: Sequence[Any]) -> Rank:
    return rank_of(1, *turn(2, 1.0, begins_s, 3.0), *lines)


HELD, SHORT, LATE = first(4.0), first(2.0), second(2.5)
FORGAVE = forgave(2.5, 1, 1.5)
AGAIN = rank_of(1, FORGAVE, forgave(4.0, 3, 3.0))
TWO_RANKS = rank_of(0, *turn(1, 1.0, 1.0, 2.0), devices=(0, 0))
WITH_IT = read_rank(TWO_RANKS.job, 1, [*turn(2, 1.0, 1.0, 2.0), ["done", 9.0, {}]])
GIVING_UP = cut_off(0, ["leaving", 1.0, "OSError: x"], ["done", 2.0, {}])
DEAD = cut_off(0, ["begin", 1.0, 1, 1.0, 77], killed_s=2.0)


def stopped(rank: Rank, begin_s: float, end_s: float) -> Rank:
    return dataclasses.replace(rank, stops=[(begin_s, end_s)])


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
        # Patience lost too early, or too late.
        ([HELD, rank_of(1, forgave(2.5, 1, 2.0))], "after 0.500 s of a lease of 1.0 s"),
        ([HELD, rank_of(1, forgave(3.5, 1, 1.5))], "only after 2.000 s"),
        (
            [HELD, rank_of(1, forgave(2.5, 1, 2.0, 0.5))],
            "after a lease of 0.5 s: published were [1.0]",
        ),
        # A second lease of a job that has not moved.
        ([first(7.0), AGAIN], "although none of its ranks had moved"),
        ([first(2.6, *turn(3, 2.7, 2.8, 7.0)), AGAIN], ""),
        # A death frees the turn, and not before.
        ([DEAD, second(2.001)], ""),
        ([DEAD, second(1.9)], "two holders"),
        ([DEAD, second(2.9)], "after it could"),
        # Bad ends, a device that begins too early.
        ([GIVING_UP], "job 0 rank 0 gave up turns: OSError: x"),
        ([cut_off(0)], "did not end by itself"),
        (
            [rank_of(0, *turn(1, 1.0, 1.0, 2.0, 2.3)), second(2.001)],
            "turn 2 of job 1 rank 0 on device 0 began 0.2990 s before the device had finished turn",
        ),
        ([TWO_RANKS, WITH_IT], "had different turns: [1] and [2]"),
    ],
)
def test_each_broken_promise_is_a_violation_and_nothing_else_is(
    ranks: Sequence[Rank], violation: str
) -> None:
    found = judge(ranks)
    assert any(violation in each for each in found) if violation else found == []


def test_leftovers_are_violations_unless_the_last_rank_was_killed_or_the_file_was_refused() -> None:
    path = "/dev/shm/crossover_ddp-0/campaign-1-0@.turns"
    left, leaves, killed = Leftovers([path]), rank_of(0), cut_off(1, killed_s=9.5)
    assert judge([leaves, killed], left) == []
    assert (
        judge([leaves, killed], Leftovers([path], [path], [f"got another at {path}; remove it"]))
        == []
    )
    assert "left behind" in judge([leaves, killed], Leftovers([path], [path]))[0]
    assert "left behind" in judge([leaves, rank_of(1)], left)[0]


# Jobs of any layout that take turns without faults. The oracles of random schedules judge them.
LONG_LEASE_S = 30.0  # longer than a story, so that no lease excuses turns that overlap
AT_ONCE_S = 2.0  # generous: the machine may be busy
BOTH = (0, 1)


def plan(number: int, group: int, devices: tuple[int, ...] = BOTH, **options: Any) -> JobPlan:
    """Return a job. Every second one requests its next turn early."""
    style = ("plain", "early")[number % 2]
    return JobPlan(number, group, devices, **{"lease_s": LONG_LEASE_S, "style": style, **options})


def together(story: Story, job: int) -> list[Claim]:
    """Return the turns of a job's first rank while all jobs of its group took turns."""
    group = story.ranks[job, 0].job.group
    turns = [
        [claim.turn for claim in rank.claims if claim.turn]
        for (_, number), rank in story.ranks.items()
        if rank.job.group == group and number == 0
    ]
    first, last = max(each[0] for each in turns), min(each[-1] for each in turns)
    return [claim for claim in story.ranks[job, 0].claims if first <= claim.turn <= last]


def inequality(story: Story, *jobs: int) -> float:
    """Return the largest number of turns of a job, divided by the smallest, while all took turns.

    Turns in a row do not count: on a busy machine a rank may ask late.
    """
    turns = [len(together(story, job)) for job in jobs]
    return max(turns) / max(min(turns), 1)


@pytest.mark.quiet
def test_turns_are_first_come_first_served_even_if_a_job_joins_and_leaves_repeatedly(
    tmp_path: Path,
) -> None:
    """Jobs that always want a turn take equal numbers. No job waits for one that exchanges."""
    always = [
        plan(job, 0, devices, pause_s=0.0)
        for job, devices in enumerate([(0, 0, 1, 1), BOTH, (1, 0)])
    ]
    held = [
        plan(3, 1, (0,), hold_s=0.01, pause_s=0.0),
        plan(4, 1, (0, 0), hold_s=0.03, pause_s=0.0),
    ]
    paused = [
        plan(job, 2, hold_s=0.01, pause_s=s, style="plain") for job, s in ((5, 0.09), (6, 0.01))
    ]
    visits = [
        plan(8 + at, 3, joins_at_s=0.2 + at * 0.2, leaves_at_s=0.5 + at * 0.2) for at in range(6)
    ]
    jobs = [*always, *held, *paused, plan(7, 3, (0, 1, 0, 1)), *visits]
    with Lane("tests.faults.mutex_worker") as lane:
        story = lived(lane, tmp_path, *jobs, ends_at_s=1.7, slack_s=AT_ONCE_S)
    assert violations(story) == []
    assert not any(rank.forgave for rank in story.ranks.values())
    assert inequality(story, 0, 1, 2) < 2.0
    assert inequality(story, 3, 4) < 2.0  # by time it would be 3
    assert len(together(story, 6)) >= 2 * len(together(story, 5))


@pytest.mark.quiet
def test_scripts_that_never_close_their_mutex_leave_nothing(tmp_path: Path) -> None:
    group, path = new_group(), tmp_path / "script.py"
    path.write_text(
        f"from crossover_ddp.gpu_mutex import GPUMutex\nGPUMutex({group!r}, device='d').acquire()\n"
        "import os\nif os.environ['RANK'] == '1': raise ValueError('words')\n"
    )
    # Without a process group, each rank is a job of its own.
    with spawn_script(path, 2) as ranks:
        assert [process.wait(60.0) for process in ranks.processes] == [0, 1]
        assert "ValueError: words" in ranks.output(1)
    assert not files_of(group)
