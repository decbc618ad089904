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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import lanes, oracles, schedules
from tests.faults.lanes import Figures, Lane, Log, Told, why_no_container
from tests.faults.oracles import Key, Leftovers, Rank, Story, longest_wait_s, read_rank, violations
from tests.faults.schedules import Blow, JobPlan, Schedule
from tests.harness.waiting import eventually

FAULTS_EACH = 40
LEAD_IN_S = 0.05
ENDING_S = 30.0  # longest time that ranks may take to end by themselves
SLACK_S = 0.35
_TICK_S = 0.01
_LATE_S = 0.05


@dataclass
class Journal:
    """What the overseer itself has done, and when."""

    born: list[Key] = field(default_factory=list)
    killed_s: dict[Key, float] = field(default_factory=dict)
    stops: dict[Key, list[tuple[float, float]]] = field(default_factory=dict)
    meddled_s: dict[int, list[float]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0


class Overseer:
    """Runs one schedule in a lane.

    Args:
        plan: what shall happen.
        lane: where.
        directory: for the ranks' records.
        sabotage: name of a `mutex_worker.Sabotage`, or nothing.
        slack_s: how late a turn may begin.
        meets: whether the clock begins when the first jobs have joined.
    """

    def __init__(
        self,
        plan: Schedule,
        lane: Lane,
        directory: Path,
        sabotage: str = "",
        slack_s: float = SLACK_S,
        meets: bool = False,
    ) -> None:
        self._plan = plan
        self._lane = lane
        self._directory = directory
        self._sabotage = sabotage
        self._slack_s, self._meets = slack_s, meets
        self._prefix = f"campaign-{uuid.uuid4().hex[:12]}"
        self.journal = Journal()
        self._base_s = 0.0

    def run(self) -> Story:
        """Let everything happen, wait for the end, and return what was written down."""
        self._base_s = time.monotonic() + LEAD_IN_S
        blows = list(self._plan.blows)
        if self._meets:
            self._meet([blows.pop(0) for _ in range(sum(blow.at_s == 0.0 for blow in blows))])
        for blow in blows:
            self._wait_until(self._base_s + blow.at_s)
            self._strike(blow)
        self._wait_until(self._base_s + self._plan.ends_at_s)
        self._wait_for_ends()
        left = self._lane.tell("left", group=self._prefix)
        groups = [self._group(number) for number in range(self._plan.groups)]
        devices = [f"dev{number}" for number in range(self._plan.devices)]
        refusals = self._lane.tell("come_and_go", groups=groups, devices=devices)
        left_by_next = self._lane.tell("left", group=self._prefix)
        holders = self._lane.tell("holders", paths=left_by_next) if left_by_next else []
        self._lane.tell("sweep", group=self._prefix)
        self._lane.tell("forget")
        ranks = {key: self._read(key) for key in self.journal.born}
        leftovers = Leftovers(left, left_by_next, refusals, holders)
        return Story(self._plan, ranks, self.journal.meddled_s, leftovers, self.journal.late_s, self._slack_s)

    def _meet(self, joins: Sequence[Blow]) -> None:
        """Let the clock begin when these jobs have joined, which takes seconds now and then."""
        self._base_s = oracles.FOREVER
        for blow in joins:
            self._strike(blow)
        logs = [Log(self._log(key)) for key in self.journal.born]
        eventually(lambda: all(any(line[0] == "joined" for line in log.records()) for log in logs), ENDING_S)
        self._base_s = time.monotonic()
        (self._directory / "begins.new").write_text(str(self._base_s))
        (self._directory / "begins.new").rename(self._directory / "begins")

    def _wait_until(self, at_s: float) -> None:
        """Wait, and note how late a short sleep ends on this machine at this time."""
        while (left_s := at_s - time.monotonic()) > 0:
            wanted_s = min(left_s, _TICK_S)
            before_s = time.monotonic()
            time.sleep(wanted_s)
            self.journal.late_s = max(self.journal.late_s, time.monotonic() - before_s - wanted_s)

    def _wait_for_ends(self) -> None:
        deadline_s = time.monotonic() + ENDING_S
        while (alive := self._lane.tell("alive")) and time.monotonic() < deadline_s:
            self._wait_until(time.monotonic() + _LATE_S)
        if alive:
            self._lane.tell("strike", logs=alive, number=signal.SIGUSR1)  # they write down where they are
            time.sleep(0.5)
            self._lane.tell("strike", logs=alive, number=signal.SIGKILL)

    # --- blows ----------------------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> None:
        self.journal.done[blow.kind] += 1
        keys = [(blow.job, rank) for rank in blow.ranks]
        if blow.kind == "join":
            self._bear(self._plan.jobs[blow.job])
        elif blow.kind == "reuse-pid":
            self._bear(self._plan.jobs[blow.job], victim=(blow.victim, 0))
        elif blow.kind == "kill":
            for key in keys:
                self.journal.killed_s.setdefault(key, time.monotonic())
            self._strike_ranks(keys, signal.SIGKILL)
        elif blow.kind in ("stop", "continue"):
            self._stop(keys, blow.kind == "stop")
        else:
            self._meddle(blow)

    def _strike_ranks(self, keys: Sequence[Key], number: signal.Signals) -> None:
        self._lane.tell("strike", logs=[str(self._log(key)) for key in keys], number=number)

    def _bear(self, job: JobPlan, victim: Key | None = None) -> None:
        for rank in range(len(job.devices)):
            key = (job.number, rank)
            order = {
                "plan": dataclasses.asdict(job),
                "rank": rank,
                "base_s": self._base_s,
                "log": str(self._log(key)),
                "clock_offset_s": job.clock_offset_s,
                "group": self._group(job.group),
                "sabotage": self._sabotage,
            }
            if victim is not None and rank == 0:
                self.journal.killed_s.setdefault(victim, time.monotonic())
                old, new = self._lane.tell("reborn", victim=str(self._log(victim)), order=order)
                self.journal.done["process ids used again"] += old == new
            else:
                self._lane.bear(order)
            self.journal.born.append(key)

    def _log(self, key: Key) -> Path:
        return self._directory / f"job{key[0]}-rank{key[1]}"

    def _group(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _stop(self, keys: Sequence[Key], stops: bool) -> None:
        before_s = time.monotonic()
        living = [key for key in keys if key not in self.journal.killed_s]
        self._strike_ranks(living, signal.SIGSTOP if stops else signal.SIGCONT)
        for key in living:
            stopped = self.journal.stops.setdefault(key, [])
            if stops:
                stopped.append((before_s, oracles.FOREVER))
            elif stopped:
                stopped[-1] = (stopped[-1][0], time.monotonic())

    def _meddle(self, blow: Blow) -> None:
        before_s = time.monotonic()
        if blow.kind in ("full", "free"):
            self._lane.tell(blow.kind)
            groups = range(self._plan.groups)
        else:
            found = self._lane.tell(
                "meddle",
                kind=blow.kind,
                group=self._group(blow.group),
                device=f"dev{blow.device}",
                seed=blow.seed,
            )
            self.journal.done["meddled with files"] += found
            groups = range(blow.group, blow.group + 1)
        for group in groups:
            self.journal.meddled_s.setdefault(group, []).append(before_s)

    # --- records --------------------------------------------------------------------------------------------

    def _read(self, key: Key) -> Rank:
        log = Log(self._log(key))
        rank = read_rank(self._plan.jobs[key[0]], key[1], log.records())
        rank.killed_s = min(rank.killed_s, self.journal.killed_s.get(key, oracles.FOREVER))
        rank.stops += self.journal.stops.get(key, [])
        rank.error = log.error()
        return rank


def figures_of(story: Story, done: Counter[str]) -> Figures:
    """Say what the ranks of a story have done and suffered."""
    seen, ranks = Counter(done), story.ranks.values()
    for rank in ranks:
        seen.update(f"deed: {kind}" for _, kind in rank.deeds)
        seen["gave up turns"] += rank.gave_up()
        seen["refused"] += rank.refused is not None
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
    (directory / "journal").write_text(str(overseer.journal))
    return Told(figures_of(story, overseer.journal.done), violations(story))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = lanes.arguments(__doc__, events=1000, lanes=3, keep="runs/faults")
    parser.add_argument("--sabotage", default="", help="break the package so, to see that it is noticed")
    parser.add_argument("--not-isolated", action="store_true", help="as without root")
    args = parser.parse_args(argv)
    isolated = not args.not_isolated and not why_no_container("memory")
    return lanes.Campaign(
        "tests.faults.mutex_campaign",
        FAULTS_EACH,
        functools.partial(Lane, "tests.faults.mutex_worker", "memory" if isolated else ""),
        functools.partial(live, isolated=isolated, sabotage=args.sabotage),
    ).run(args, isolated=isolated)


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
