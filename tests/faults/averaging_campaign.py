"""Jobs of averaged replicas with kills, stops and infinities, restarted with 2 or with 4 ranks.

    python -m tests.faults.averaging_campaign --events 1000 --lanes 2
    python -m tests.faults.averaging_campaign --seed 123 --events 8     # repeat one story

A story is one job with one kind of averaging, a function of its seed. It has several lives of some
steps each. A life begins from the last checkpoint and has one fault:

- After a kill, and after a stop longer than the process group's timeout, every other rank raises an
  ``ExchangeError`` in bounded time, and again if it continues (while DDP rebuilds its buckets, in
  the second forward, torch raises its own error). Ranks at their own pace first finish their steps
  beside a stopped one.
- With inf on one rank every rank raises, and no other rank has taken the inf over.
- Otherwise the life ends well.

Every step of every rank has the bits of copies in one process without faults. For "sync" and
"async" they are compared at the end of lives that end well, replayed from the rounds' log; "wild"
has no order, so only the mean is compared. A life that has not ended after its bound is a
violation, with the stacks of its threads.
"""

import functools
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossover_ddp import ExchangeError, UnsupportedConfigurationError
from crossover_ddp._averaging.centre import ElasticRound
from tests.faults import lanes
from tests.faults.averaging_worker import ELASTIC, LOCAL, REBUILD
from tests.faults.lanes import Lane, Outcome, Rank, hung
from tests.harness.waiting import eventually
from tests.multiprocess.averaging_oracle import DelayedWalk, Replay, copies_of, flat
from tests.multiprocess.compressed_training import digest

KINDS = (*LOCAL, *ELASTIC)
OWN_PACE = ("async", "wild")
FAULTS = {"kill": 3, "stop": 1, "nap": 2, "inf": 2, "restart": 3}
RAISED = {"kill": ExchangeError, "stop": ExchangeError, "inf": UnsupportedConfigurationError}
EVENTS_EACH = 8
STEPS = 24  # of a life
PACE_S = 0.008
TIMEOUT_S = 5.0  # of the process group
BOUND_S = STEPS * PACE_S + TIMEOUT_S + 30.0  # of a life once it has begun; the machine may be busy
START_S = 60.0
# Copies in one process are initialized with torch's global generator, which the lanes share.
_JUDGING = threading.Lock()


def steps_of(rank: Rank) -> dict[int, str]:
    return {each["step"]: each["digest"] for each in rank.records() if "step" in each}


def record_of(rank: Rank, key: str) -> dict[str, Any] | None:
    return next((each for each in rank.records() if key in each), None)


class LifePlan(NamedTuple):
    """The fault of one life."""

    fault: str
    world_size: int
    victim: int  # the rank
    at: int  # the steps of this life that the victim has done before the fault
    late_s: float  # seconds between the last of them and the fault
    nap_s: float  # how long a nap lasts


def plan_lives(rng: random.Random, events: int) -> list[LifePlan]:
    """Return a life for each event. A restart changes the job from 2 ranks to 4, or back."""
    lives = []
    world_size = 2
    for fault in rng.choices(list(FAULTS), list(FAULTS.values()), k=events):
        victim, at = rng.randrange(world_size), rng.randrange(1, STEPS - 3)
        late_s, nap_s = rng.uniform(0.0, 2 * PACE_S), rng.uniform(0.02, 0.6)
        lives.append(LifePlan(fault, world_size, victim, at, late_s, nap_s))
        if fault == "restart":
            world_size = 6 - world_size
    return lives


@dataclass
class Story:
    """One job: its kind, its last checkpoint, and figures of its lives so far."""

    kind: str
    lane: Lane
    directory: Path
    checkpoint: Path | None = None
    first: int = 0
    steps: int = 0
    longest_s: float = 0.0

    def live(self, plans: Sequence[LifePlan]) -> Outcome:
        """Run all lives, one after the other. The first violation ends the story."""
        done = Counter[str]()
        broken: list[str] = []
        for number, plan in enumerate(plans):
            ranks = self._begin(number, plan)
            try:
                broken = self._meet(plan, ranks) + self._wait_for_ends(ranks)
            finally:
                for rank in ranks:
                    rank.signal(signal.SIGKILL)
            done[plan.fault] += 1
            self.steps += sum(len(steps_of(rank)) for rank in ranks)
            with _JUDGING:
                broken = (
                    broken or [*self._wrong_ends(plan, ranks)] or [*self._wrong_bits(plan, ranks)]
                )
            if broken:
                broken = [f"{self.kind}, life {number}, {plan}: {each}" for each in broken]
                broken += [f"rank {number}: {rank.error()}" for number, rank in enumerate(ranks)]
                break
            if all(record_of(rank, "ended") for rank in ranks):
                self.checkpoint = self.directory / f"saved{number}"
                self.first += STEPS
        figures = {"events": done.total(), "by_fault": done, "steps": self.steps}
        return {**figures, "longest_ending_s": round(self.longest_s, 2)}, broken

    def _begin(self, number: int, plan: LifePlan) -> list[Rank]:
        order = {
            "kind": self.kind,
            "world_size": plan.world_size,
            "store": str(self.directory / f"store{number}"),
            "start": None if self.checkpoint is None else str(self.checkpoint),
            "save": str(self.directory / f"saved{number}"),
            "until": self.first + STEPS,
            "timeout_s": TIMEOUT_S,
            "pace_s": PACE_S,
            "poison": [plan.victim, self.first + plan.at] if plan.fault == "inf" else None,
        }
        return [
            self.lane.bear(
                {**order, "rank": rank, "log": str(self.directory / f"life{number}-rank{rank}")}
            )
            for rank in range(plan.world_size)
        ]

    def _meet(self, plan: LifePlan, ranks: Sequence[Rank]) -> list[str]:
        """Let the fault happen. Return the ranks that hang in it, as sentences."""
        victim = ranks[plan.victim]
        wanted = self.first + plan.at
        if plan.fault not in ("kill", "stop", "nap"):
            return []
        eventually(lambda: wanted in steps_of(victim) or not victim.alive(), START_S, every_s=0.005)
        time.sleep(plan.late_s)
        victim.signal(signal.SIGKILL if plan.fault == "kill" else signal.SIGSTOP)
        if plan.fault == "nap":
            time.sleep(plan.nap_s)
        others = [rank for rank in ranks if rank is not victim]
        held_up = self._wait_for_ends(others) if plan.fault == "stop" else []
        victim.signal(signal.SIGCONT)
        return held_up

    def _wait_for_ends(self, ranks: Sequence[Rank]) -> list[str]:
        # Ranks that have not begun yet may take long to begin on a busy machine.
        eventually(lambda: all(steps_of(rank) or not rank.alive() for rank in ranks), START_S)
        begin_s = time.monotonic()
        held_up = [
            f"hang: {rank.path.name}, for more than {BOUND_S:.0f} s"
            for rank in hung(ranks, BOUND_S)
        ]
        self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
        return held_up

    def _wrong_ends(self, plan: LifePlan, ranks: Sequence[Rank]) -> Iterator[str]:
        for number, rank in enumerate(ranks):
            others = number != plan.victim
            if plan.fault not in RAISED:
                if record_of(rank, "ended") is None:
                    yield f"rank {number} did not end well: {record_of(rank, 'raised')}"
            elif others or plan.fault == "inf":
                yield from self._wrong_error(plan, number, rank, RAISED[plan.fault].__name__)
            goes_on = plan.fault == "stop" and others and self.kind in OWN_PACE
            # Before the second step DDP rebuilds its buckets, which needs all ranks.
            if goes_on and plan.at > 1 and self.first + STEPS not in steps_of(rank):
                yield f"rank {number} was held up by a stopped one at {max(steps_of(rank))}"

    def _wrong_error(self, plan: LifePlan, number: int, rank: Rank, wanted: str) -> Iterator[str]:
        raised = record_of(rank, "raised")
        if raised is None:
            if record_of(rank, "averaged") is None or plan.fault == "inf":
                yield f"rank {number} has not raised {wanted}"
        elif raised["raised"] != wanted and not (
            wanted == "ExchangeError" and raised["raised"] == REBUILD
        ):
            yield f"rank {number} has raised {raised['raised']}, not {wanted}: {raised['message']}"
        elif not raised["again"]:
            yield f"rank {number} trained on after its error"
        elif record_of(rank, "closed") is None:
            yield f"rank {number} has not closed"
        elif plan.fault == "inf" and number != plan.victim and not raised["finite"]:
            yield f"rank {number} has taken infinities over"

    def _wrong_bits(self, plan: LifePlan, ranks: Sequence[Rank]) -> Iterator[str]:
        averaged = [record_of(rank, "averaged") for rank in ranks]
        means = {record["averaged"] for record in averaged if record is not None}
        if len(means) > 1:
            yield "ranks differ after average()"
        if self.kind in LOCAL:
            yield from self._wrong_steps(plan, ranks, means)
        elif self.kind != "wild" and all(record_of(rank, "ended") for rank in ranks):
            yield from self._wrong_replay(ranks)

    def _wrong_steps(self, plan: LifePlan, ranks: Sequence[Rank], means: set[str]) -> Iterator[str]:
        copies, kept = copies_from(plan.world_size, self.checkpoint)
        walk = DelayedWalk(
            copies,
            **LOCAL[self.kind],
            outer=(0.7, 0.9) if self.kind == "diloco" else None,
            increments=self.kind == "increments",
        )
        if kept:
            walk.anchor = flat_of(kept["tensors"]["anchor"])
            walk.velocity = flat_of(kept["tensors"]["momentum_buffer"])
        seen = [steps_of(rank) for rank in ranks]
        for step in range(self.first + 1, self.first + STEPS + 1):
            walk.step()
            expected = [digest([values]) for values in walk.copies.snapshots()]
            for number, digests in enumerate(seen):
                poisoned = (
                    plan.fault == "inf" and number == plan.victim and step > self.first + plan.at
                )
                if not poisoned and digests.get(step, expected[number]) != expected[number]:
                    yield f"rank {number} has other bits after step {step}"
                    return
        walk.average()
        if means - {digest(walk.copies.snapshots()[:1])}:
            yield "the mean has other bits"

    def _wrong_replay(self, ranks: Sequence[Rank]) -> Iterator[str]:
        last = self.first + STEPS
        averaged = [record_of(rank, "averaged") or {} for rank in ranks]
        logs = [
            [ElasticRound(at, tuple(off), done) for at, off, done in each["rounds"]]
            for each in averaged
        ]
        replay = Replay("sgd", logs, 0.9 / len(ranks))
        replay.copies, kept = copies_from(len(ranks), self.checkpoint)
        if kept:
            replay.spring.centre = flat_of(kept["centre"])
            replay.done = [self.first] * len(ranks)
        replay.run([last] * len(ranks))
        for number, values in enumerate(replay.trained):
            if digest([values]) != steps_of(ranks[number])[last]:
                yield f"rank {number} has other bits than the replay of its rounds"


def flat_of(named: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the named values of a state dict as a flat vector."""
    model = copies_of(1, "sgd").models[0]
    model.load_state_dict(named, strict=False)
    return flat(model)


def copies_from(world_size: int, checkpoint: Path | None) -> tuple[Any, dict[str, Any]]:
    """Return copies of the job as it begins, and the kept part of its state's checkpoint."""
    if checkpoint is None:
        return copies_of(world_size, "sgd"), {}
    saved = torch.load(checkpoint, weights_only=True)
    copies = copies_of(world_size, "sgd", first=saved["state"]["steps"])
    for model in copies.models:
        model.load_state_dict(saved["model"])
    return copies, saved["state"]["kept"]


def live(seed: int, events: int, lane: Lane, directory: Path) -> Outcome:
    story = Story(KINDS[seed % len(KINDS)], lane, directory)
    return story.live(plan_lives(random.Random(seed), events))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = lanes.arguments(__doc__, events=100, lanes=2, keep="runs/averaging-faults").parse_args(
        argv
    )
    torch.set_num_threads(1)
    lane = functools.partial(Lane, "tests.faults.averaging_worker")
    return lanes.campaign(args, "tests.faults.averaging_campaign", EVENTS_EACH, lane, live)


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
