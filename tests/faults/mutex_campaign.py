"""Hundreds of small worlds of jobs that take turns, each with faults of every kind, each judged by its records.

    python -m tests.faults.mutex_campaign --events 10000 --lanes 4
    python -m tests.faults.mutex_campaign --seed 123 --events 40     # that one again

Each schedule (`tests.faults.schedules`) is a function of its seed. Its ranks take real turns on emulated devices,
are killed, stopped, slowed down, robbed of their files; `tests.faults.oracles` says what their records must show.
A failing schedule prints its seed and the violations, and keeps its records. Without root the faults that need
namespaces of their own are left out: a full /dev/shm, process ids used again, clocks that differ.
"""

import dataclasses
import functools
import json
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
from tests.faults.lanes import Figures, Lane, Told, hung, why_no_container
from tests.faults.oracles import FOREVER, Key, Leftovers, Rank, Story, longest_wait_s, read_rank, violations
from tests.faults.schedules import Blow, JobPlan, Schedule
from tests.harness.waiting import eventually

FAULTS_EACH = 40
LEAD_IN_S = 0.05
ENDING_S = 30.0  # longest time that ranks may take to end by themselves
SLACK_S = 0.35
_TICK_S = 0.01
_LATE_S = 0.05


@dataclass
class Overseer:
    """Runs one schedule in a lane, and keeps what it has done itself, and when.

    Args:
        plan: what shall happen.
        lane: where.
        directory: for the ranks' records.
        sabotage: one of `mutex_worker.SABOTAGES`, or nothing.
        slack_s: how late a turn may begin.
        meets: whether the clock begins when the first jobs have joined.
    """

    plan: Schedule
    lane: Lane
    directory: Path
    sabotage: str = ""
    slack_s: float = SLACK_S
    meets: bool = False
    prefix: str = field(default_factory=lambda: f"campaign-{uuid.uuid4().hex[:12]}")
    born: dict[Key, lanes.Rank] = field(default_factory=dict)
    killed_s: dict[Key, float] = field(default_factory=dict)
    stops: dict[Key, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    meddled_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    done: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0
    base_s: float = 0.0

    def run(self) -> Story:
        """Let everything happen, wait for the end, and return what was written down."""
        self.base_s = time.monotonic() + LEAD_IN_S
        blows, tell = list(self.plan.blows), self.lane.tell
        if self.meets:
            self._meet([blows.pop(0) for _ in range(sum(blow.at_s == 0.0 for blow in blows))])
        for blow in blows:
            self._wait_until(self.base_s + blow.at_s)
            self._strike(blow)
        self._wait_until(self.base_s + self.plan.ends_at_s)
        deadline_s = time.monotonic() + ENDING_S
        while tell("alive") and time.monotonic() < deadline_s:
            self._wait_until(time.monotonic() + _LATE_S)
        hung([*self.born.values()], 0.0)
        left = tell("left", group=self.prefix)
        groups = [self._group(number) for number in range(self.plan.groups)]
        devices = [f"dev{number}" for number in range(self.plan.devices)]
        refusals = tell("come_and_go", groups=groups, devices=devices)
        leftovers = Leftovers(left, tell("left", group=self.prefix), refusals)
        tell("sweep", group=self.prefix)
        tell("forget")
        ranks = {key: self._read(key, rank) for key, rank in self.born.items()}
        return Story(self.plan, ranks, self.meddled_s, leftovers, self.late_s, self.slack_s)

    def _meet(self, joins: Sequence[Blow]) -> None:
        """Let the clock begin when these jobs have joined, which takes seconds now and then."""
        self.base_s = FOREVER
        for blow in joins:
            self._strike(blow)
        logs = self.born.values()
        eventually(lambda: all(any(line[0] == "joined" for line in log.records()) for log in logs), ENDING_S)
        self.base_s = time.monotonic()
        (self.directory / "begins.new").write_text(str(self.base_s))
        (self.directory / "begins.new").rename(self.directory / "begins")

    def _wait_until(self, at_s: float) -> None:
        """Wait, and note how late a short sleep ends on this machine at this time."""
        while (left_s := at_s - time.monotonic()) > 0:
            wanted_s = min(left_s, _TICK_S)
            before_s = time.monotonic()
            time.sleep(wanted_s)
            self.late_s = max(self.late_s, time.monotonic() - before_s - wanted_s)

    def _strike(self, blow: Blow) -> None:
        self.done[blow.kind] += 1
        keys = [(blow.job, rank) for rank in blow.ranks]
        match blow.kind:
            case "join" | "reuse-pid":
                self._bear(self.plan.jobs[blow.job], blow.victim)
            case "kill":
                for key in keys:
                    self.killed_s.setdefault(key, time.monotonic())
                    self.born[key].signal(signal.SIGKILL)
            case "stop" | "continue":
                for key in keys:
                    if key not in self.killed_s:
                        self._stop(key, blow.kind == "stop")
            case _:
                self._meddle(blow)

    def _bear(self, job: JobPlan, victim: int) -> None:
        for rank in range(len(job.devices)):
            order = {
                "plan": dataclasses.asdict(job),
                "rank": rank,
                "base_s": self.base_s,
                "log": str(self.directory / f"job{job.number}-rank{rank}"),
                "clock_offset_s": job.clock_offset_s,
                "group": self._group(job.group),
                "sabotage": self.sabotage,
            }
            replaced = self.born[victim, 0] if victim >= 0 and rank == 0 else None
            self.born[job.number, rank] = new = self.lane.bear(order, replaced)
            self.done["process ids used again"] += replaced is not None and new.pid == replaced.pid

    def _group(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def _stop(self, key: Key, stops: bool) -> None:
        before_s, stopped = time.monotonic(), self.stops[key]
        self.born[key].signal(signal.SIGSTOP if stops else signal.SIGCONT)
        if stops:
            stopped.append((before_s, FOREVER))
        elif stopped:
            stopped[-1] = (stopped[-1][0], time.monotonic())

    def _meddle(self, blow: Blow) -> None:
        before_s, groups = time.monotonic(), [blow.group]
        if blow.kind in ("full", "free"):
            self.lane.tell(blow.kind)
            groups = [*range(self.plan.groups)]
        else:
            files = {"group": self._group(blow.group), "seed": blow.seed}
            self.done["meddled with files"] += self.lane.tell("meddle", kind=blow.kind, **files)
        for group in groups:
            self.meddled_s[group].append(before_s)

    def _read(self, key: Key, log: lanes.Rank) -> Rank:
        rank = read_rank(self.plan.jobs[key[0]], key[1], log.records())
        rank.killed_s = min(rank.killed_s, self.killed_s.get(key, FOREVER))
        rank.stops += self.stops[key]
        rank.error = log.error()
        return rank


def figures_of(story: Story, done: Counter[str]) -> Figures:
    """Say what the ranks of a story have done and suffered."""
    seen, ranks = Counter(done), story.ranks.values()
    for rank in ranks:
        seen.update(f"deed: {kind}" for _, kind in rank.deeds)
        seen["gave up turns"] += rank.gave_up()
        seen["refused"] += bool(rank.refused)
    forgiven = {(rank.job.number, lost.job, lost.turn) for rank in ranks for lost in rank.forgave}
    return {
        "events": len(story.schedule.faults),
        "by_kind": Counter(story.schedule.faults),
        "seen": seen,
        "jobs": len(story.schedule.jobs),
        "turns": sum(len(rank.claims) for rank in ranks),
        "leases_lost": sum(len(rank.forgave) for rank in ranks),
        "turns_forgiven": len(forgiven),  # by whichever of a job's ranks
        "longest_wait_s": round(longest_wait_s(story), 3),
        "latest_tick_s": round(story.late_s, 3),
    }


def lived(lane: Lane, directory: Path, *jobs: JobPlan, ends_at_s: float, slack_s: float = SLACK_S) -> Story:
    """Let jobs live that were thought out by hand, with no faults but their own deeds."""
    plans = tuple(dataclasses.replace(job, leaves_at_s=min(job.leaves_at_s, ends_at_s)) for job in jobs)
    blows = tuple(Blow(job.joins_at_s, "join", job.number) for job in plans)
    devices = 1 + max(device for job in plans for device in job.devices)
    plan = Schedule(0, devices, 1 + max(job.group for job in plans), plans, blows, ends_at_s, ())
    return Overseer(plan, lane, directory, slack_s=slack_s, meets=True).run()


def live(seed: int, events: int, lane: Lane, directory: Path, *, isolated: bool, sabotage: str) -> Told:
    """Live the schedule of a seed, and judge it."""
    plan = schedules.schedule(seed, events, isolated=isolated)
    (directory / "schedule.json").write_text(json.dumps(dataclasses.asdict(plan), indent=1))
    overseer = Overseer(plan, lane, directory, sabotage)
    story = overseer.run()
    (directory / "journal").write_text(str(overseer))
    return Told(figures_of(story, overseer.done), violations(story))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = lanes.arguments(__doc__, events=1000, lanes=3, keep="runs/faults")
    parser.add_argument("--sabotage", default="", help="break the package so, to see that it is noticed")
    parser.add_argument("--not-isolated", action="store_true", help="as without root")
    args = parser.parse_args(argv)
    isolated = not args.not_isolated and not why_no_container("memory")
    lane = functools.partial(Lane, "tests.faults.mutex_worker", "memory" if isolated else "")
    story = functools.partial(live, isolated=isolated, sabotage=args.sabotage)
    return lanes.campaign(args, "tests.faults.mutex_campaign", FAULTS_EACH, lane, story, isolated=isolated)


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
