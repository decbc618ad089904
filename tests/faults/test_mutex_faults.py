"""Jobs that take turns in ways thought out by hand, and whose ranks are killed and stopped wherever it hurts most.

Every turn has a barrier inside, as DDP's broadcast of buffers is. What is judged of random schedules is judged here,
too: no two jobs at a time on a device, one order on all, a turn soon after it could begin, nothing left behind.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lanes import Lane
from tests.faults.mutex_campaign import lived
from tests.faults.oracles import Claim, Rank, Story, violations
from tests.faults.schedules import Deed, JobPlan
from tests.harness import spawn_script
from tests.harness.groups import files_of, new_group

LONG_LEASE_S = 30.0  # longer than a story: a turn that overlaps another one was not forgiven
AT_ONCE_S = 2.0  # generous: the machine may be busy
LEASE_S = 0.6
STOP_S = 2.5
BOTH = (0, 1)
pytestmark = pytest.mark.quiet


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with Lane("tests.faults.mutex_worker") as lane:
        yield lane


# The devices of each job's ranks, group by group.
LAYOUTS = [
    [(0, 0, 1, 1)] * 2,
    [(0, 0)] * 2,
    [(0, 1), (0, 1, 0, 1)],
    [(1, 0), (0, 1)],  # the lead device is not rank 0's
    [(0,), (0, 0)],
    [BOTH] * 3,
]


def test_jobs_of_any_layout_take_turns_in_one_order(lane: Lane, tmp_path: Path) -> None:
    """Every second job asks for its next turn early."""
    plans = [(group, devices) for group, jobs in enumerate(LAYOUTS) for devices in jobs]
    jobs = [
        plan(number, group, devices, hold_s=0.01, pause_s=0.01, style=("plain", "early")[number % 2])
        for number, (group, devices) in enumerate(plans)
    ]
    story = lived(lane, tmp_path, *jobs, ends_at_s=1.5, slack_s=AT_ONCE_S)
    assert violations(story) == []
    assert not any(rank.forgave for rank in story.ranks.values())
    assert all(len(together(story, job.number)) > 3 for job in jobs)


def plan(number: int, group: int, devices: tuple[int, ...] = BOTH, **options: Any) -> JobPlan:
    return JobPlan(number, group, devices, **{"lease_s": LONG_LEASE_S, **options})


def together(story: Story, job: int) -> list[Claim]:
    """Return the turns of a job's first rank while all jobs of its group were there."""
    group = story.ranks[job, 0].job.group
    turns = [
        [claim.turn for claim in rank.claims if claim.turn]
        for (_, number), rank in story.ranks.items()
        if rank.job.group == group and number == 0
    ]
    first, last = max(each[0] for each in turns), min(each[-1] for each in turns)
    return [claim for claim in story.ranks[job, 0].claims if first <= claim.turn <= last]


def longest_run(story: Story, *jobs: int) -> int:
    """Return how many turns in a row one job had while all were there."""
    order = sorted((claim.turn, job) for job in jobs for claim in together(story, job))
    return max(len([*run]) for _, run in itertools.groupby(job for _, job in order))


def test_first_come_first_served_also_where_a_job_joins_and_leaves_again_and_again(
    lane: Lane, tmp_path: Path
) -> None:
    """Jobs that always want a turn take equal numbers; one that is in its exchange is not waited for."""
    always = [plan(job, 0, pause_s=0.0) for job in range(3)]
    held = [plan(job, 1, hold_s=hold_s, pause_s=0.0) for job, hold_s in ((3, 0.01), (4, 0.03))]
    paused = [plan(job, 2, hold_s=0.01, pause_s=pause_s) for job, pause_s in ((5, 0.09), (6, 0.01))]
    visits = [
        plan(8 + visit, 3, joins_at_s=0.2 + visit * 0.2, leaves_at_s=0.5 + visit * 0.2) for visit in range(6)
    ]
    jobs = [*always, *held, *paused, plan(7, 3), *visits]
    story = lived(lane, tmp_path, *jobs, ends_at_s=1.7, slack_s=AT_ONCE_S)
    assert violations(story) == []
    assert not any(rank.forgave for rank in story.ranks.values())
    assert longest_run(story, 0, 1, 2) <= 2
    assert longest_run(story, 3, 4) <= 2
    assert len(together(story, 6)) >= 2 * len(together(story, 5))


def with_fates(lane: Lane, directory: Path, *fates: tuple[Deed, float], ends_at_s: float) -> list[list[Rank]]:
    """Let jobs with these leases meet these fates, each beside a survivor; return the survivors' ranks for each."""
    often = {"hold_s": 0.005, "pause_s": 0.005}
    pairs = [
        (
            plan(2 * group, group, **often),
            plan(2 * group + 1, group, lease_s=lease_s, deeds=(fate,), **often),
        )
        for group, (fate, lease_s) in enumerate(fates)
    ]
    story = lived(lane, directory, *itertools.chain(*pairs), ends_at_s=ends_at_s, slack_s=AT_ONCE_S)
    assert violations(story) == []
    for survivor, victim in pairs:
        struck = [story.ranks[victim.number, rank] for rank in victim.deeds[0].ranks]
        since_s = max(min([rank.gone_by_s, *(begin_s for begin_s, _ in rank.stops)]) for rank in struck)
        ends_s = [story.ranks[survivor.number, rank].claims[-1].begins_s for rank in BOTH]
        assert min(ends_s) > since_s, f"the survivor of {victim.deeds} has not seen it"
    return [[story.ranks[survivor.number, rank] for rank in BOTH] for survivor, _ in pairs]


def test_a_death_holds_the_sibling_up_for_no_time(lane: Lane, tmp_path: Path) -> None:
    places = [((0,), "inside"), ((0,), "drawn"), ((0,), "queueing")]
    places += [((1,), "inside"), (BOTH, "drawn"), (BOTH, "between")]
    fates = [(Deed(0.3, "die", ranks, place=place), LONG_LEASE_S) for ranks, place in places]
    for survivors in with_fates(lane, tmp_path, *fates, ends_at_s=2.5):
        assert not any(rank.forgave for rank in survivors)


def test_a_stop_holds_the_sibling_up_for_one_lease(lane: Lane, tmp_path: Path) -> None:
    """Once, not each time, and not at all between turns; who was stopped goes on as if nothing had been."""
    places = [((0,), "inside"), ((1,), "inside"), (BOTH, "inside"), ((0,), "drawn")]
    fates = [(Deed(0.3, "halt", ranks, STOP_S, place=place), LEASE_S) for ranks, place in places]
    between = Deed(0.3, "halt", BOTH, AT_ONCE_S + 1.0, place="between"), LONG_LEASE_S
    *held_up, free = with_fates(lane, tmp_path, *fates, between, ends_at_s=AT_ONCE_S + 3.0)
    assert not any(rank.forgave for rank in free)
    for (stopped, _), survivors in zip(places, held_up, strict=True):
        assert any(rank.forgave for rank in survivors)
        # A rank that begins the turn when the other one goes on is stopped then.
        assert all(len(rank.forgave) <= len(stopped) for rank in survivors)


def test_scripts_that_never_close_their_mutex_leave_nothing(tmp_path: Path) -> None:
    group, path = new_group(), tmp_path / "script.py"
    path.write_text(
        f"from crossover_ddp.gpu_mutex import GPUMutex\nGPUMutex({group!r}, device='d').acquire()\n"
        "import os\nif os.environ['RANK'] == '1': raise ValueError('words')\n"
    )
    # Its ranks are jobs of their own, as they make no process group.
    with spawn_script(path, 2) as ranks:
        assert [process.wait(60.0) for process in ranks.processes] == [0, 1]
        assert "ValueError: words" in ranks.output(1)
    assert not files_of(group)
