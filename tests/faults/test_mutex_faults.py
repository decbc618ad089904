"""Jobs of any layout that take turns without faults, first come, first served, and scripts that leave without a word.

What is judged of random schedules is judged here, too: no two jobs at a time on a device, one order on all, a turn soon
after it could begin, nothing left behind.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lanes import Lane
from tests.faults.mutex_campaign import lived
from tests.faults.oracles import Claim, Story, violations
from tests.faults.schedules import JobPlan
from tests.harness import spawn_script
from tests.harness.groups import files_of, new_group

LONG_LEASE_S = 30.0  # longer than a story: a turn that overlaps another one was not forgiven
AT_ONCE_S = 2.0  # generous: the machine may be busy
BOTH = (0, 1)
pytestmark = pytest.mark.quiet


def plan(number: int, group: int, devices: tuple[int, ...] = BOTH, **options: Any) -> JobPlan:
    """Return a job; every second one asks for its next turn early."""
    style = ("plain", "early")[number % 2]
    return JobPlan(number, group, devices, **{"lease_s": LONG_LEASE_S, "style": style, **options})


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


def test_first_come_first_served_also_where_a_job_joins_and_leaves_again_and_again(tmp_path: Path) -> None:
    """Jobs that always want a turn take equal numbers; one that is in its exchange is not waited for."""
    always = [plan(job, 0, devices, pause_s=0.0) for job, devices in enumerate([(0, 0, 1, 1), BOTH, (1, 0)])]
    held = [plan(3, 1, (0,), hold_s=0.01, pause_s=0.0), plan(4, 1, (0, 0), hold_s=0.03, pause_s=0.0)]
    paused = [plan(job, 2, hold_s=0.01, pause_s=s, style="plain") for job, s in ((5, 0.09), (6, 0.01))]
    visits = [plan(8 + at, 3, joins_at_s=0.2 + at * 0.2, leaves_at_s=0.5 + at * 0.2) for at in range(6)]
    jobs = [*always, *held, *paused, plan(7, 3, (0, 1, 0, 1)), *visits]
    with Lane("tests.faults.mutex_worker") as lane:
        story = lived(lane, tmp_path, *jobs, ends_at_s=1.7, slack_s=AT_ONCE_S)
    assert violations(story) == []
    assert not any(rank.forgave for rank in story.ranks.values())
    assert longest_run(story, 0, 1, 2) <= 2
    assert longest_run(story, 3, 4) <= 2
    assert len(together(story, 6)) >= 2 * len(together(story, 5))


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
