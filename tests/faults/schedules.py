"""The faults of a campaign and their times: a pure function of a seed, so that failures repeat.

A schedule is a small world: one or two groups on one to four devices, up to four jobs at once, and
their faults. Nothing here starts, reads or waits for anything.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossover_ddp._turns.rules import DEFAULT_LEASE_S

MAX_JOBS = 4
DEVICE_COUNTS = {1: 5, 2: 5, 3: 1, 4: 1}
GAP_S = 0.09  # between two faults, on average
FIRST_S = 0.5  # the first jobs have joined by then
LATE_S = 0.02  # longest time that a late device runs behind the host
STYLES = ("plain", "early")
# Where a rank dies or halts: inside a turn, with a turn drawn, between two turns, while it queues.
PLACES = ("inside", "drawn", "between", "queueing")

MEDDLINGS = (
    *(f"delete-{what}" for what in ("slots", "log", "bells", "all")),
    *("truncate-slots", "truncate-log", "full"),
)


@dataclass(frozen=True)
class Deed:
    """A fault that a rank does by itself, at a time."""

    at_s: float
    kind: str
    ranks: tuple[int, ...]
    duration_s: float = 0.0
    value: float = 0.0
    place: str = ""  # one of `PLACES`, where it dies or halts


@dataclass(frozen=True)
class JobPlan:
    """One job from its start to its end, unless a blow ends it earlier."""

    number: int
    group: int = 0
    devices: tuple[int, ...] = (0,)  # the device of each rank
    joins_at_s: float = 0.0
    leaves_at_s: float = float("inf")
    lease_s: float | None = None  # if None, the default, which follows the job's turns
    hold_s: float = 0.002
    pause_s: float = 0.002
    late_device: bool = False  # whether its device ends each turn after the host
    style: str = "plain"
    deeds: tuple[Deed, ...] = ()


@dataclass(frozen=True)
class Blow:
    """A fault that is done to ranks, or to their files, from outside."""

    at_s: float
    kind: str
    job: int = -1
    ranks: tuple[int, ...] = ()
    group: int = 0
    seed: int = 0  # for random bytes
    victim: int = -1  # the job whose process id is taken over


@dataclass(frozen=True)
class Schedule:
    """One run of the campaign."""

    devices: int
    groups: int
    jobs: tuple[JobPlan, ...]
    blows: tuple[Blow, ...]
    ends_at_s: float
    faults: tuple[str, ...]  # the kinds of the faults, in order of time; a stop and its end are one


class _Writer:
    """Writes one schedule, in order of time, and tracks the jobs that are alive."""

    def __init__(self, seed: int, faults: int, isolated: bool) -> None:
        self._chance = chance = random.Random(seed)
        self._wanted = faults
        self._isolated = isolated
        self._devices = self._pick(DEVICE_COUNTS)
        self._groups = 2 if chance.random() < 0.3 else 1
        self._late_device = chance.random() < 0.5
        self._most_jobs = chance.randint(2, MAX_JOBS)
        self._meddles = chance.random() < 0.35
        self._now_s = 0.0
        self._jobs: list[JobPlan] = []
        self._blows: list[Blow] = []
        self._busy_until_s: dict[int, float] = {}

    def _pick(self, weights: Mapping[Any, float]) -> Any:
        return self._chance.choices(list(weights), list(weights.values()))[0]

    def write(self) -> Schedule:
        for _ in range(2):
            self._join(self._chance.randrange(self._groups))
        self._now_s, happened = FIRST_S, list[str]()
        while len(happened) < self._wanted:
            self._now_s += self._chance.expovariate(1 / GAP_S)
            happened += filter(None, [self._happen()])
        self._now_s += 0.2
        for group in range(self._groups):  # the last one of a group removes its files
            if not self._alive(group):
                self._join(group)
        ends_at_s = max([self._now_s + 0.3, *self._busy_until_s.values()])
        jobs = tuple(
            replace(job, leaves_at_s=min(job.leaves_at_s, ends_at_s)) for job in self._jobs
        )
        blows = tuple(sorted(self._blows, key=lambda blow: blow.at_s))
        return Schedule(self._devices, self._groups, jobs, blows, ends_at_s, tuple(happened))

    def _alive(self, group: int | None = None) -> list[JobPlan]:
        return [
            job
            for job in self._jobs
            if job.leaves_at_s > self._now_s and group in (None, job.group)
        ]

    def _someone(self) -> JobPlan:
        return self._chance.choice(self._alive())

    def _some_ranks(self, job: JobPlan) -> tuple[int, ...]:
        everyone = range(len(job.devices))
        return tuple(everyone) if self._chance.random() < 0.4 else (self._chance.choice(everyone),)

    def _put(self, job: JobPlan, **changes: Any) -> None:
        self._jobs[job.number] = replace(self._jobs[job.number], **changes)

    def _blow(self, kind: str, job: JobPlan, ranks: tuple[int, ...], after_s: float = 0.0) -> None:
        self._blows.append(Blow(self._now_s + after_s, kind, job.number, ranks, job.group))

    def _do(
        self, job: JobPlan, kind: str, ranks: tuple[int, ...], lasts_s: float, *more: Any
    ) -> None:
        deed = Deed(self._now_s, kind, ranks, lasts_s, *more)
        self._put(job, deeds=(*self._jobs[job.number].deeds, deed))

    def _happen(self) -> str:
        """Let one fault happen and return its name."""
        alive, possible = self._alive(), {kind: weight for kind, (weight, _) in FAULTS.items()}
        if not alive:
            possible = {"join": 1.0}
        if len(alive) >= self._most_jobs:
            del possible["join"]
        if not self._isolated:
            possible.pop("reuse-pid", None)
        if not self._meddles or self._now_s < FIRST_S + 0.5:
            possible.pop("meddle", None)
        kind: str = self._pick(possible)
        happened = FAULTS[kind][1](self, kind)
        return kind if happened is None else happened

    # Each of these methods may return a more precise name of the fault.

    def _joins(self, kind: str) -> None:
        self._join(self._chance.randrange(self._groups))

    def _join(self, group: int) -> JobPlan:
        chance, devices = self._chance, [*range(self._devices)]
        if self._devices <= 2 and chance.random() < 0.25:  # two ranks of the job on one device
            devices.append(self._devices - 1)
        elif (
            self._devices > 1 and self._now_s and chance.random() < 0.3
        ):  # shares only some of the devices
            devices = chance.sample(devices, chance.randrange(1, self._devices))
        job = JobPlan(
            number=len(self._jobs),
            group=group,
            devices=tuple(chance.sample(devices, len(devices))),
            joins_at_s=self._now_s,
            hold_s=chance.uniform(0.0005, 0.008),
            pause_s=chance.uniform(0.0005, 0.008),
            late_device=self._late_device,
            style=chance.choice(STYLES),
        )
        self._jobs.append(job)
        self._blow("join", job, ())
        return job

    def _leaves(self, kind: str) -> None:
        self._put(self._someone(), leaves_at_s=self._now_s)

    def _kills(self, kind: str) -> None:
        job = self._someone()
        ranks = tuple(range(len(job.devices)))
        ranks = ranks if kind == "kill-job" else (self._chance.choice(ranks),)
        if self._chance.random() < 0.5:
            return self._kill(job, ranks)
        self._do(job, "die", ranks, 0.0, 0.0, self._chance.choice(PLACES))
        self._now_s += 0.2  # perhaps there is no such place by then
        return self._kill(job, ranks)

    def _kill(self, job: JobPlan, ranks: tuple[int, ...]) -> None:
        self._blow("kill", job, ranks)
        others = tuple(rank for rank in range(len(job.devices)) if rank not in ranks)
        if others:  # as torchrun does, or a scheduler that takes its time
            self._blow("kill", job, others, after_s=self._chance.uniform(0.0, 0.5))
        self._put(job, leaves_at_s=self._now_s)

    def _stops(self, kind: str) -> str | None:
        job, uniform = self._someone(), self._chance.uniform
        if self._busy_until_s.get(job.number, 0.0) > self._now_s:
            return ""
        ranks = self._some_ranks(job)
        stop_s = DEFAULT_LEASE_S + uniform(0.2, 0.8) if kind == "long-stop" else uniform(0.005, 0.3)
        self._busy_until_s[job.number] = self._now_s + stop_s
        if self._chance.random() < 0.5:
            self._do(job, "halt", ranks, stop_s, 0.0, self._chance.choice(PLACES[:3]))
            return None
        self._blow("stop", job, ranks)
        self._blow("continue", job, ranks, after_s=stop_s)
        return None

    def _deeds(self, kind: str) -> None:
        job, uniform = self._someone(), self._chance.uniform
        value = {
            "slow-compute": uniform(0.01, 0.15),
            "too-slow-compute": DEFAULT_LEASE_S + uniform(0.2, 0.6),
            "slow-link": uniform(0.01, 0.15),
            "suspend": uniform(1.0, 3.0) * DEFAULT_LEASE_S,
        }.get(kind, 0.0)
        self._do(job, kind, self._some_ranks(job), uniform(0.05, 0.5), value)

    def _orphans(self, kind: str) -> None:
        """A rank forks inside its turn, as a DataLoader does, and is killed; its child lives on."""
        job = self._someone()
        rank = self._chance.randrange(len(job.devices))
        self._do(job, "fork", (rank,), self._chance.uniform(0.5, 1.0))
        self._now_s += 0.05
        self._kill(job, (rank,))

    def _reuses(self, kind: str) -> None:
        """A rank is killed, and the first rank of a new job has its process id at once."""
        victim = self._someone()
        self._kill(victim, (0,))
        self._join(victim.group)
        self._blows[-1] = replace(self._blows[-1], kind=kind, victim=victim.number)

    def _meddle(self, kind: str) -> str:
        """Files are damaged. The jobs of the group leave soon, and other jobs join."""
        chance = self._chance
        what = chance.choice([each for each in MEDDLINGS if self._isolated or each != "full"])
        group = -1 if what == "full" else self._someone().group
        lasts_s = chance.uniform(0.2, 3.0)
        self._blows.append(Blow(self._now_s, what, group=group, seed=chance.randrange(1 << 30)))
        if what == "full":
            self._blows.append(Blow(self._now_s + lasts_s, "free", group=group))
        for job in self._alive(None if what == "full" else group):
            self._put(job, leaves_at_s=self._now_s + lasts_s)
        return what


# The weight of each fault, and the method that writes it.
FAULTS: dict[str, tuple[float, Callable[[_Writer, str], str | None]]] = {
    "join": (4.0, _Writer._joins),
    "leave": (1.0, _Writer._leaves),
    "kill-rank": (1.5, _Writer._kills),
    "kill-job": (1.0, _Writer._kills),
    "stop": (3.0, _Writer._stops),
    "long-stop": (0.7, _Writer._stops),
    "slow-compute": (3.0, _Writer._deeds),
    "too-slow-compute": (0.5, _Writer._deeds),
    "slow-link": (3.0, _Writer._deeds),
    "fork": (3.0, _Writer._deeds),
    "orphan": (1.0, _Writer._orphans),
    "suspend": (0.7, _Writer._deeds),
    "reuse-pid": (1.0, _Writer._reuses),
    "meddle": (2.0, _Writer._meddle),
}


def schedule(seed: int, faults: int, *, isolated: bool) -> Schedule:
    """Return a seed's schedule with this number of faults.

    Only if ``isolated`` may /dev/shm be full, and process ids be chosen.
    """
    return _Writer(seed, faults, isolated).write()
