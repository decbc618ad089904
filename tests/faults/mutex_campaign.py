"""Hundreds of small worlds of jobs that take turns, with faults of every kind, judged by records.

    python -m tests.faults.mutex_campaign --events 10000 --lanes 4
    python -m tests.faults.mutex_campaign --seed 123 --events 40     # repeat one schedule

Each schedule (`tests.faults.schedules`) is a function of its seed. `tests.faults.oracles` judges
the records of its ranks. Without root, /dev/shm is never full, and no process id is reused.
"""

import dataclasses
import functools
import signal
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import lanes, schedules
from tests.faults.lanes import Lane, Outcome, hung, why_no_container
from tests.faults.oracles import (
    FOREVER,
    Key,
    Leftovers,
    Rank,
    Story,
    longest_wait_s,
    read_rank,
    violations,
)
from tests.faults.schedules import Blow, JobPlan, Schedule

FAULTS_EACH = 40
LEAD_IN_S = 0.05
JOINING_S = 3.0  # for jobs that are written by hand: joining sometimes takes seconds
ENDING_S = 30.0  # longest time that ranks may take to end by themselves
SLACK_S = 0.35
_TICK_S = 0.01
_LATE_S = 0.05


@dataclass
class Overseer:
    """Runs one schedule in a lane, and records its own actions with their times."""

    plan: Schedule
    lane: Lane
    directory: Path
    sabotage: str = ""  # one of `mutex_worker.SABOTAGES`
    slack_s: float = SLACK_S  # how late a turn may begin
    prefix: str = field(default_factory=lambda: f"campaign-{uuid.uuid4().hex[:12]}")
    born: dict[Key, lanes.Rank] = field(default_factory=dict)
    killed_s: dict[Key, float] = field(default_factory=dict)
    stops: dict[Key, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    meddled_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    late_s: float = 0.0  # the latest end of a short sleep: how busy the machine is
    base_s: float = 0.0

    def run(self) -> Story:
        """Run the schedule, wait for its end, and return the records."""
        first_s = min(blow.at_s for blow in self.plan.blows)
        self.base_s = time.monotonic() + LEAD_IN_S - first_s
        for blow in self.plan.blows:
            self._wait_until(self.base_s + blow.at_s)
            self._strike(blow)
        self._wait_until(self.base_s + self.plan.ends_at_s)
        deadline_s = time.monotonic() + ENDING_S
        while self.lane.call("alive") and time.monotonic() < deadline_s:
            self._wait_until(time.monotonic() + _LATE_S)
        hung([*self.born.values()], 0.0)
        groups = [self._group(number) for number in range(self.plan.groups)]
        devices = [f"dev{number}" for number in range(self.plan.devices)]
        leftovers = Leftovers(
            *self.lane.call("end", prefix=self.prefix, groups=groups, devices=devices)
        )
        ranks = {key: self._read(key, rank) for key, rank in self.born.items()}
        return Story(self.plan, ranks, self.meddled_s, leftovers, self.slack_s + 2 * self.late_s)

    def _wait_until(self, at_s: float) -> None:
        while (left_s := at_s - time.monotonic()) > 0:
            wanted_s = min(left_s, _TICK_S)
            before_s = time.monotonic()
            time.sleep(wanted_s)
            self.late_s = max(self.late_s, time.monotonic() - before_s - wanted_s)

    def _strike(self, blow: Blow) -> None:
        keys = [(blow.job, rank) for rank in blow.ranks]
        match blow.kind:
            case "join" | "reuse-pid":
                self._bear(self.plan.jobs[blow.job], blow.victim)
            case "kill":
                for key in keys:
                    self.killed_s.setdefault(key, time.monotonic())
                    self.born[key].signal(signal.SIGKILL)
            case "stop":
                for key in keys:
                    self.stops[key].append((time.monotonic(), FOREVER))
                    self.born[key].signal(signal.SIGSTOP)
            case "continue":
                for key in keys:
                    self.born[key].signal(signal.SIGCONT)
                    self.stops[key][-1] = (self.stops[key][-1][0], time.monotonic())
            case _:  # files are removed or cut
                groups = [blow.group] if blow.group >= 0 else range(self.plan.groups)
                for number in groups:
                    self.meddled_s[number].append(time.monotonic())
                self.lane.call(
                    "meddle", kind=blow.kind, group=self._group(blow.group), seed=blow.seed
                )

    def _bear(self, job: JobPlan, victim: int) -> None:
        for rank in range(len(job.devices)):
            order = {
                "plan": dataclasses.asdict(job),
                "rank": rank,
                "base_s": self.base_s,
                "log": str(self.directory / f"job{job.number}-rank{rank}"),
                "group": self._group(job.group),
                "sabotage": self.sabotage,
            }
            replaced = self.born[victim, 0] if victim >= 0 and rank == 0 else None
            self.born[job.number, rank] = self.lane.bear(order, replaced)

    def _group(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def _read(self, key: Key, log: lanes.Rank) -> Rank:
        rank = read_rank(self.plan.jobs[key[0]], key[1], log.records())
        rank.killed_s = min(rank.killed_s, self.killed_s.get(key, FOREVER))
        rank.stops += self.stops[key]
        rank.error = log.error()
        return rank


def lived(
    lane: Lane, directory: Path, *jobs: JobPlan, ends_at_s: float, slack_s: float = SLACK_S
) -> Story:
    """Run jobs that are written by hand, without faults other than their own deeds."""
    plans = tuple(
        dataclasses.replace(job, leaves_at_s=min(job.leaves_at_s, ends_at_s)) for job in jobs
    )
    blows = tuple(Blow(job.joins_at_s or -JOINING_S, "join", job.number) for job in plans)
    devices = 1 + max(device for job in plans for device in job.devices)
    plan = Schedule(devices, 1 + max(job.group for job in plans), plans, blows, ends_at_s, ())
    return Overseer(plan, lane, directory, slack_s=slack_s).run()


def live(
    seed: int, events: int, lane: Lane, directory: Path, *, isolated: bool, sabotage: str
) -> Outcome:
    """Run the schedule of a seed, and judge it."""
    plan = schedules.schedule(seed, events, isolated=isolated)
    story = Overseer(plan, lane, directory, sabotage).run()
    ranks = story.ranks.values()
    figures = {
        "events": len(plan.faults),
        "by_kind": Counter(plan.faults),
        "jobs": len(plan.jobs),
        "turns": sum(len(rank.claims) for rank in ranks),
        "leases_lost": sum(len(rank.forgave) for rank in ranks),
        "longest_wait_s": round(longest_wait_s(story), 3),
    }
    return figures, violations(story)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = lanes.arguments(__doc__, events=1000, lanes=3, keep="runs/faults")
    parser.add_argument(
        "--sabotage", default="", help="a way to break the package, which must be noticed"
    )
    args = parser.parse_args(argv)
    isolated = not why_no_container("memory")
    lane = functools.partial(Lane, "tests.faults.mutex_worker", "memory" if isolated else "")
    story = functools.partial(live, isolated=isolated, sabotage=args.sabotage)
    return lanes.campaign(
        args, "tests.faults.mutex_campaign", FAULTS_EACH, lane, story, isolated=isolated
    )


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
