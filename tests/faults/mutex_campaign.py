"""Hundreds of small worlds of jobs that take turns, each with faults of every kind, each judged by its records.

    python -m tests.faults.mutex_campaign --events 10000 --lanes 4
    python -m tests.faults.mutex_campaign --seed 123 --events 40     # that one again

Each schedule (`tests.faults.schedules`) is a function of its seed. Its ranks take real turns on emulated devices,
are killed, stopped, slowed down, robbed of their files; `tests.faults.oracles` says what their records must show.
A failing schedule prints its seed and the violations, and keeps its records. Without root the faults that need
namespaces of their own are left out: a full /dev/shm, process ids used again, clocks that differ.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import oracles, schedules
from tests.faults.logged_rank import close_forker
from tests.faults.oracles import Key, Leftovers, Rank, Story, longest_wait_s, read_rank, violations
from tests.faults.schedules import Blow, JobPlan, Schedule
from tests.harness.children import Child

ROOT = Path(__file__).resolve().parents[2]
FAULTS_EACH = 40
LEAD_IN_S = 0.05
ENDING_S = 30.0  # longest time that ranks may take to end by themselves
SLACK_S = 0.35
ANSWER_S = 120.0  # then the nursery hangs
_TICK_S = 0.01
_LATE_S = 0.05
SHARED_MEMORY_SIZE = "2m"


def container() -> list[str]:
    """The words that give a process /dev/shm, process ids and clocks of its own; none if this machine has none."""
    mount = f'mount -t tmpfs -o size={SHARED_MEMORY_SIZE},mode=1777 campaign /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", mount, "sh"]
    try:
        tried = subprocess.run(
            [*words, "unshare", "--time", "--monotonic", "10", "true"], capture_output=True
        )
    except FileNotFoundError:
        return []
    return words if tried.returncode == 0 else []


class Lane:
    """A nursery of ranks, told over its stdin."""

    def __init__(self, enter: Sequence[str]) -> None:
        command = [*enter, sys.executable, "-m", "tests.faults.mutex_nursery"]
        pipe = subprocess.PIPE
        self._process = Child(command, os.environ, cwd=ROOT, text=True, stdin=pipe, stdout=pipe)

    def wait_until_up(self) -> None:
        self._process.hear(ANSWER_S)

    def tell(self, what: str, /, **arguments: Any) -> Any:
        self._process.tell({"do": what, **arguments})
        return self._process.hear(ANSWER_S)

    def close(self) -> None:
        close_forker(self._process)


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
    """

    def __init__(self, plan: Schedule, lane: Lane, directory: Path, sabotage: str = "") -> None:
        self._plan = plan
        self._lane = lane
        self._directory = directory
        self._sabotage = sabotage
        self._prefix = f"campaign-{uuid.uuid4().hex[:12]}"
        self.journal = Journal()
        self._base_s = 0.0
        (directory / "events").mkdir()

    def run(self) -> Story:
        """Let everything happen, wait for the end, and return what was written down."""
        self._base_s = time.monotonic() + LEAD_IN_S
        for blow in self._plan.blows:
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
        journal = self.journal
        leftovers = Leftovers(left, left_by_next, refusals, holders)
        return Story(self._plan, ranks, journal.meddled_s, leftovers, journal.late_s, SLACK_S)

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
            self._lane.tell("strike", keys=alive, number=signal.SIGUSR1)  # they write down where they are
            time.sleep(0.5)
            self._lane.tell("strike", keys=alive, number=signal.SIGKILL)

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
            self._lane.tell("strike", keys=keys, number=signal.SIGKILL)
        elif blow.kind in ("stop", "continue"):
            self._stop(keys, blow.kind == "stop")
        else:
            self._meddle(blow)

    def _bear(self, job: JobPlan, victim: Key | None = None) -> None:
        for rank in range(len(job.devices)):
            order = {
                "plan": dataclasses.asdict(job),
                "rank": rank,
                "base_s": self._base_s,
                "directory": str(self._directory),
                "group": self._group(job.group),
                "sabotage": self._sabotage,
            }
            key = (job.number, rank)
            if victim is not None and rank == 0:
                self.journal.killed_s.setdefault(victim, time.monotonic())
                old, new = self._lane.tell("reborn", victim=victim, key=key, order=order)
                self.journal.done["process ids used again"] += old == new
            else:
                self._lane.tell("born", key=key, order=order)
            self.journal.born.append(key)

    def _group(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _stop(self, keys: Sequence[Key], stops: bool) -> None:
        before_s = time.monotonic()
        number = signal.SIGSTOP if stops else signal.SIGCONT
        living = [key for key in keys if key not in self.journal.killed_s]
        self._lane.tell("strike", keys=living, number=number)
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
        path = self._directory / f"job{key[0]}-rank{key[1]}"
        lines = path.read_text().splitlines() if path.exists() else []
        rank = read_rank(self._plan.jobs[key[0]], key[1], map(json.loads, lines))
        rank.killed_s = self.journal.killed_s.get(key, oracles.FOREVER)
        rank.stops = self.journal.stops.get(key, [])
        error = path.with_suffix(".err")
        rank.error = error.read_text(errors="replace") if error.exists() else ""
        return rank


@dataclass
class Findings:
    """Sums over schedules."""

    schedules: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """Faults by kind, as the schedules have them."""
    seen: Counter[str] = field(default_factory=Counter)
    """What was really done, by overseer and ranks."""
    turns: int = 0
    leases_lost: int = 0
    """How often a rank has waited for a whole lease."""
    forgiven: int = 0
    """How often a job has ceased to wait for another job's turn, whichever of its ranks did."""
    jobs: int = 0
    longest_wait_s: float = 0.0
    latest_tick_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, story: Story, done: Counter[str], broken: list[str]) -> None:
        self.schedules += 1
        self.events.update(story.schedule.faults)
        self.seen.update(done)
        for rank in story.ranks.values():
            self.seen.update(f"deed: {kind}" for _, kind in rank.deeds)
            self.turns += len(rank.claims)
            self.leases_lost += len(rank.forgave)
            self.seen["gave up turns"] += rank.gave_up()
            self.seen["refused"] += rank.refused is not None
        self.forgiven += len(
            {(rank.job.number, lost.job, lost.turn) for rank in story.ranks.values() for lost in rank.forgave}
        )
        self.jobs += len(story.schedule.jobs)
        self.longest_wait_s = max(self.longest_wait_s, longest_wait_s(story))
        self.latest_tick_s = max(self.latest_tick_s, story.late_s)
        if broken:
            plan = story.schedule
            self.failures.append({"seed": plan.seed, "events": len(plan.faults), "violations": broken})

    def summary(self) -> dict[str, Any]:
        return {
            "schedules": self.schedules,
            "events": self.events.total(),
            "by_kind": dict(sorted(self.events.items())),
            "seen": dict(sorted(self.seen.items())),
            "jobs": self.jobs,
            "turns": self.turns,
            "leases_lost": self.leases_lost,
            "turns_forgiven": self.forgiven,
            "longest_wait_s": round(self.longest_wait_s, 3),
            "latest_tick_s": round(self.latest_tick_s, 3),
            "violations": sum(len(failure["violations"]) for failure in self.failures),
            "failures": self.failures,
        }


class Campaign:
    """Schedules, run in several lanes at once."""

    def __init__(self, keep: Path, sabotage: str = "", *, isolated: bool = True) -> None:
        self._keep = keep
        self._sabotage = sabotage
        self._enter = container() if isolated else []
        self._lock = threading.Lock()
        self.findings = Findings()

    @property
    def isolated(self) -> bool:
        return bool(self._enter)

    def run(self, seed: int, events: int, lanes: int) -> Findings:
        plans = iter(list(schedules.schedules(seed, events, FAULTS_EACH, isolated=self.isolated)))
        with ThreadPoolExecutor(lanes) as pool:
            for future in [pool.submit(self._run_lane, plans) for _ in range(lanes)]:
                future.result()
        return self.findings

    def _run_lane(self, plans: Iterator[Schedule]) -> None:
        lane = Lane(self._enter)
        try:
            lane.wait_until_up()
            while (plan := self._next(plans)) is not None:
                self._run_one(plan, lane)
        finally:
            lane.close()

    def _next(self, plans: Iterator[Schedule]) -> Schedule | None:
        with self._lock:
            return next(plans, None)

    def _run_one(self, plan: Schedule, lane: Lane) -> None:
        with tempfile.TemporaryDirectory(prefix="mutex-campaign-") as temporary:
            directory = Path(temporary)
            overseer = Overseer(plan, lane, directory, self._sabotage)
            story = overseer.run()
            broken = violations(story)
            with self._lock:
                self.findings.add(story, overseer.journal.done, broken)
            if broken:
                self._tell(plan, broken)
                self._save(plan, directory, broken, overseer.journal)

    @staticmethod
    def _tell(plan: Schedule, broken: Sequence[str]) -> None:
        again = f"python -m tests.faults.mutex_campaign --seed {plan.seed} --events {len(plan.faults)}"
        lines = [f"seed {plan.seed}: {len(broken)} violations; again: {again}", *broken[:12]]
        print("\n  ".join(lines), file=sys.stderr, flush=True)

    def _save(self, plan: Schedule, directory: Path, broken: Sequence[str], journal: Journal) -> None:
        """Keep the schedule and all records of a failure."""
        where = self._keep / f"seed{plan.seed}"
        where.mkdir(parents=True, exist_ok=True)
        (where / "schedule.json").write_text(json.dumps(dataclasses.asdict(plan), indent=1))
        (where / "violations").write_text("\n".join(broken))
        (where / "journal").write_text(str(journal))
        for path in directory.glob("job*"):
            (where / path.name).write_bytes(path.read_bytes())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1000, help=f"faults in all, {FAULTS_EACH} a schedule")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--lanes", type=int, default=3, help="schedules at once")
    parser.add_argument("--keep", type=Path, default=Path("runs/faults"), help="for records of failures")
    parser.add_argument("--sabotage", default="", help="break the package so, to see that it is noticed")
    parser.add_argument("--not-isolated", action="store_true", help="as without root")
    args = parser.parse_args(argv)
    campaign = Campaign(args.keep, args.sabotage, isolated=not args.not_isolated)
    begin_s = time.monotonic()
    findings = campaign.run(args.seed, args.events, args.lanes)
    found = {
        "seed": args.seed,
        "isolated": campaign.isolated,
        "wall_s": round(time.monotonic() - begin_s, 1),
        **findings.summary(),
    }
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    sys.exit(1 if main()["violations"] else 0)
