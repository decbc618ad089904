"""Jobs of averaged replicas whose ranks are killed, stopped and blown up, and which restart with 2 and 4 ranks in turn.

    python -m tests.faults.averaging_campaign --events 1000 --lanes 2
    python -m tests.faults.averaging_campaign --seed 123 --events 8     # that story again

A story is one job of one kind of averaging, a function of its seed: lives of some steps each, which begin from the
last checkpoint and have one fault each. What is asked of every life:

* kill, and a stop longer than the process group's timeout: every other rank raises an ``ExchangeError`` in bounded
  time, and again if it is asked to go on. (While DDP rebuilds its buckets, in the second forward, it is torch's own
  error.) Ranks at their own pace finish their steps beside a stopped one first.
* inf on one rank: every rank raises, and none of the others has taken it over.
* nap (a short stop), restart: the life ends well, and its checkpoint is that of the same life without ranks.
* Every step of every rank has the bits that copies in one process have, which know of no fault (for "async" at the end
  of lives that end well, replayed from the rounds' log; "wild" has no order, so there only the mean is compared).

Nothing may hang: what has not ended after its bound is a violation, with the stacks of its threads.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from crossover_ddp import ExchangeError, UnsupportedConfigurationError
from crossover_ddp._averaging.centre import ElasticRound
from tests.faults.averaging_worker import ELASTIC, EVERY, LOCAL, REBUILD, digest
from tests.faults.logged_rank import LoggedRank, close_forker
from tests.harness.children import Child
from tests.multiprocess.averaging_oracle import copies_of
from tests.multiprocess.elastic_oracle import Replay, first_centre
from tests.multiprocess.replicas import DelayedWalk, Spring, TogetherWalk

ROOT = Path(__file__).resolve().parents[2]
KINDS = (*LOCAL, *ELASTIC)
OWN_PACE = ("async", "wild")
FAULTS = {"kill": 3, "stop": 1, "nap": 2, "inf": 2, "restart": 3}
EVENTS_EACH = 8
STEPS = 24
"""Of a life."""
PACE_S = 0.008
TIMEOUT_S = 5.0
"""Of the process group."""
SLACK_S = 30.0
"""The machine may be busy."""
START_S = 60.0
ANSWER_S = 120.0
_TICK_S = 0.005
# Copies in one process begin with torch's own generator, which the lanes share.
_JUDGING = threading.Lock()


class Witness(LoggedRank):
    """One rank of one life, and what it has written."""

    def steps(self) -> dict[int, str]:
        return {each["step"]: each["digest"] for each in self.records() if "step" in each}

    def said(self, what: str) -> dict[str, Any] | None:
        return next((each for each in self.records() if what in each), None)

    def error(self) -> str:
        path = Path(f"{self.log}.err")
        return path.read_text()[-1500:] if path.exists() else ""


class Lane:
    """Forks ranks."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "recipes")])
        self._process = Child(
            [sys.executable, "-m", "tests.faults.averaging_worker"],
            {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._process.hear(ANSWER_S)

    def bear(self, order: dict[str, Any]) -> Witness:
        self._process.tell(order)
        return Witness(self._process.hear(ANSWER_S)["pid"], Path(order["log"]))

    def close(self) -> None:
        close_forker(self._process)


@dataclass
class LifePlan:
    """What shall happen to one life.

    ``victim``: the rank; ``at``: it has done so many steps of this life then; ``late_s``: and then so long.
    """

    fault: str
    world_size: int
    victim: int
    at: int
    late_s: float
    nap_s: float


def plan_lives(rng: random.Random, events: int) -> list[LifePlan]:
    """Return a life for each event; after a restart the job has 4 ranks instead of 2, or 2 instead of 4."""
    lives, world_size = [], 2
    for _ in range(events):
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        life = LifePlan(
            fault,
            world_size,
            victim=rng.randrange(world_size),
            at=rng.randrange(1, STEPS - 3),
            late_s=rng.uniform(0.0, 2 * PACE_S),
            nap_s=rng.uniform(0.02, 0.6),
        )
        lives.append(life)
        if fault == "restart":
            world_size = 6 - world_size
    return lives


@dataclass
class Story:
    """One job: its kind, its lives so far, and what was wrong with them."""

    seed: int
    events: int
    directory: Path
    lane: Lane
    checkpoint: Path | None = None
    first: int = 0
    done: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    steps: int = 0
    compared: int = 0
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        self.kind = KINDS[self.seed % len(KINDS)]

    def run(self) -> None:
        """Live all lives, one after the other; the first violation ends the story."""
        for number, plan in enumerate(plan_lives(random.Random(self.seed), self.events)):
            ranks = self._begin(number, plan)
            try:
                self._meet(plan, ranks)
                self._wait_for_ends(ranks, STEPS * PACE_S + TIMEOUT_S + SLACK_S)
            finally:
                for rank in ranks:
                    rank.signal(signal.SIGKILL)
            self.done[plan.fault] += 1
            self.steps += sum(len(rank.steps()) for rank in ranks)
            with _JUDGING:
                self._judge(plan, ranks)
            saved = self.directory / f"saved{number}"
            if not self.broken and all(rank.said("ended") for rank in ranks):
                self.checkpoint, self.first = saved, self.first + STEPS
            if self.broken:
                self.broken = [f"life {number}, {plan}: {each}" for each in self.broken]
                self.broken += [f"rank {number}: {rank.error()}" for number, rank in enumerate(ranks)]
                return

    def _begin(self, number: int, plan: LifePlan) -> list[Witness]:
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
            self.lane.bear({**order, "rank": rank, "log": str(self.directory / f"life{number}-rank{rank}")})
            for rank in range(plan.world_size)
        ]

    # --- faults ----------------------------------------------------------------------------------------------

    def _meet(self, plan: LifePlan, ranks: Sequence[Witness]) -> None:
        """Let the fault happen."""
        victim = ranks[plan.victim]
        if plan.fault not in ("kill", "stop", "nap"):
            return
        wanted = self.first + plan.at
        until_s = time.monotonic() + START_S
        while wanted not in victim.steps() and victim.alive() and time.monotonic() < until_s:
            time.sleep(_TICK_S)
        time.sleep(plan.late_s)
        if plan.fault == "kill":
            victim.signal(signal.SIGKILL)
            return
        victim.signal(signal.SIGSTOP)
        if plan.fault == "nap":
            time.sleep(plan.nap_s)
        else:
            others = [rank for rank in ranks if rank is not victim]
            self._wait_for_ends(others, STEPS * PACE_S + TIMEOUT_S + SLACK_S)
        victim.signal(signal.SIGCONT)

    def _wait_for_ends(self, ranks: Sequence[Witness], bound_s: float) -> None:
        begin_s = time.monotonic()
        # Those that have not begun yet do so on a machine that may be busy.
        while not all(rank.steps() or not rank.alive() for rank in ranks):
            if time.monotonic() - begin_s > START_S:
                break
            time.sleep(_TICK_S)
        begin_s = time.monotonic()
        while any(rank.alive() for rank in ranks):
            if time.monotonic() - begin_s > bound_s:
                self._note_hang(ranks, bound_s)
                return
            time.sleep(_TICK_S)
        self.longest_s = max(self.longest_s, time.monotonic() - begin_s)

    def _note_hang(self, ranks: Sequence[Witness], bound_s: float) -> None:
        for place, rank in enumerate(ranks):
            if rank.alive():
                rank.signal(signal.SIGUSR1)  # it writes down where it is
                self.broken.append(f"hang: rank {place} has not ended within {bound_s:.1f} s")
        time.sleep(0.5)
        for rank in ranks:
            rank.signal(signal.SIGKILL)

    # --- what must be true -----------------------------------------------------------------------------------

    def _judge(self, plan: LifePlan, ranks: Sequence[Witness]) -> None:
        if self.broken:
            return
        expected = {"kill": ExchangeError, "stop": ExchangeError, "inf": UnsupportedConfigurationError}
        if plan.fault in expected:
            for number, rank in enumerate(ranks):
                if plan.fault == "inf" or number != plan.victim:
                    self._judge_error(plan, number, rank, expected[plan.fault].__name__)
        else:
            for number, rank in enumerate(ranks):
                if rank.said("ended") is None:
                    self.broken.append(f"rank {number} has not ended well: {rank.said('raised')}")
        if plan.fault == "stop" and self.kind in OWN_PACE and plan.at > 1:  # before, DDP rebuilds its buckets
            for number, rank in enumerate(ranks):
                if number != plan.victim and self.first + STEPS not in rank.steps():
                    self.broken.append(f"rank {number} was held up by a stopped one at {max(rank.steps())}")
        if not self.broken:
            self._judge_bits(plan, ranks)

    def _judge_error(self, plan: LifePlan, number: int, rank: Witness, wanted: str) -> None:
        raised = rank.said("raised")
        if raised is None:
            if rank.said("averaged") is None or plan.fault == "inf":
                self.broken.append(f"rank {number} has not raised {wanted}")
        elif raised["raised"] != wanted and not (wanted == "ExchangeError" and raised["raised"] == REBUILD):
            self.broken.append(
                f"rank {number} has raised {raised['raised']}, not {wanted}: {raised['message']}"
            )
        elif not raised["again"]:
            self.broken.append(f"rank {number} went on after its error")
        elif rank.said("closed") is None:
            self.broken.append(f"rank {number} has not closed")
        elif plan.fault == "inf" and number != plan.victim and not raised["finite"]:
            self.broken.append(f"rank {number} has taken infinities over")

    def _judge_bits(self, plan: LifePlan, ranks: Sequence[Witness]) -> None:
        means = {said["averaged"] for rank in ranks if (said := rank.said("averaged")) is not None}
        if len(means) > 1:
            self.broken.append("ranks differ after average()")
        if self.kind not in OWN_PACE:
            self._compare_steps(plan, ranks, means)
        elif self.kind == "async" and all(rank.said("ended") for rank in ranks):
            self._compare_replay(ranks)

    def _compare_steps(self, plan: LifePlan, ranks: Sequence[Witness], means: set[str]) -> None:
        walk = walk_of(self.kind, plan.world_size, self.checkpoint)
        seen = [rank.steps() for rank in ranks]
        for step in range(self.first + 1, self.first + STEPS + 1):
            walk.step()
            expected = [digest(values) for values in walk.copies.snapshots()]
            for number, digests in enumerate(seen):
                poisoned = plan.fault == "inf" and number == plan.victim and step > self.first + plan.at
                if step in digests and not poisoned:
                    self.compared += 1
                    if digests[step] != expected[number]:
                        self.broken.append(f"rank {number} has other bits after step {step}")
                        return
        walk.average()
        if means - {digest(walk.copies.snapshots()[0])}:
            self.broken.append("the mean has other bits")

    def _compare_replay(self, ranks: Sequence[Witness]) -> None:
        last = self.first + STEPS
        logs = [
            [
                ElasticRound(number, tuple(offered), collected)
                for number, offered, collected in (rank.said("averaged") or {})["rounds"]
            ]
            for rank in ranks
        ]
        replay = Replay("sgd", logs, 0.9 / len(ranks))
        if self.checkpoint is not None:
            state = torch.load(self.checkpoint, weights_only=True)
            replay.copies = copies_from(len(ranks), self.checkpoint)
            replay.spring.centre = flat_of(state["state"]["kept"]["centre"])
            replay.done = [self.first] * len(ranks)
        replay.run([last] * len(ranks))
        for number, values in enumerate(replay.trained):
            self.compared += 1
            if digest(values) != ranks[number].steps()[last]:
                self.broken.append(f"rank {number} has other bits than its rounds say")


def flat_of(named: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what a state dict says by names in the order of the flat vector."""
    model = copies_of(1, "sgd").models[0]
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    return torch.cat([named[name].flatten() for name in names])


def copies_from(world_size: int, checkpoint: Path | None) -> Any:
    """Return copies of the job as it begins."""
    if checkpoint is None:
        return copies_of(world_size, "sgd")
    saved = torch.load(checkpoint, weights_only=True)
    copies = copies_of(world_size, "sgd", first=saved["state"]["steps"])
    for model in copies.models:
        model.load_state_dict(saved["model"])
    return copies


def walk_of(kind: str, world_size: int, checkpoint: Path | None) -> DelayedWalk | TogetherWalk:
    """Return the same life in one process, without faults."""
    copies = copies_from(world_size, checkpoint)
    kept = {} if checkpoint is None else torch.load(checkpoint, weights_only=True)["state"]["kept"]
    if kind == "sync":
        start = flat_of(kept["centre"]) if kept else first_centre(world_size)
        return TogetherWalk(copies, Spring(start, 0.9 / world_size), EVERY)
    walk = DelayedWalk(copies, **LOCAL[kind], outer=(0.7, 0.9) if kind == "diloco" else None)
    if kept:
        walk.anchor = flat_of(kept["anchor"])
        walk.velocity = flat_of(kept["state"]["momentum_buffer"])
    return walk


class Campaign:
    """Stories, several at once."""

    def __init__(self, keep: Path) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.steps = self.compared = 0
        self.longest_s = 0.0

    def run(self, seed: int, events: int, lanes: int) -> None:
        """Live stories of `EVENTS_EACH` events, with seeds in a row, until there were enough of them."""
        counts = [EVENTS_EACH] * (events // EVENTS_EACH)
        counts += [events % EVENTS_EACH] if events % EVENTS_EACH else []
        stories = iter(list(enumerate(counts, start=seed)))
        with ThreadPoolExecutor(lanes) as pool:
            for future in [pool.submit(self._run_lane, stories) for _ in range(lanes)]:
                future.result()

    def _run_lane(self, stories: Iterator[tuple[int, int]]) -> None:
        lane = Lane()
        try:
            while (planned := self._next(stories)) is not None:
                self._run_one(*planned, lane)
        finally:
            lane.close()

    def _next(self, stories: Iterator[tuple[int, int]]) -> tuple[int, int] | None:
        with self._lock:
            return next(stories, None)

    def _run_one(self, seed: int, events: int, lane: Lane) -> None:
        with tempfile.TemporaryDirectory(prefix="averaging-campaign-") as temporary:
            story = Story(seed, events, Path(temporary), lane)
            story.run()
            with self._lock:
                self._add(story)
            if story.broken:
                again = f"python -m tests.faults.averaging_campaign --seed {seed} --events {events}"
                print(
                    f"seed {seed}, {story.kind}; again: {again}", *story.broken, sep="\n  ", file=sys.stderr
                )
                shutil.copytree(temporary, self._keep / f"seed{seed}", dirs_exist_ok=True)

    def _add(self, story: Story) -> None:
        self.done.update(story.done)
        self.kinds[story.kind] += story.done.total()
        self.steps += story.steps
        self.compared += story.compared
        self.longest_s = max(self.longest_s, story.longest_s)
        if story.broken:
            self.failures.append({"seed": story.seed, "kind": story.kind, "violations": story.broken})

    def summary(self) -> dict[str, Any]:
        return {
            "events": self.done.total(),
            "by_fault": dict(self.done),
            "by_kind": dict(self.kinds),
            "steps": self.steps,
            "compared": self.compared,
            "longest_ending_s": round(self.longest_s, 2),
            "failures": self.failures,
        }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=100, help=f"faults in all, {EVENTS_EACH} a story")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--lanes", type=int, default=2, help="stories at once")
    parser.add_argument("--keep", type=Path, default=Path("runs/averaging-faults"), help="for failures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    campaign = Campaign(args.keep)
    begin_s = time.monotonic()
    campaign.run(args.seed, args.events, args.lanes)
    found = {"seed": args.seed, "wall_s": round(time.monotonic() - begin_s, 1), **campaign.summary()}
    print(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
