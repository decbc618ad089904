"""Jobs come, go, are killed and stopped at random beside a steady job, which loses at most a lease.

    python -m tests.faults.campaign --events 200 --seed 1

Guests join, leave, lose a rank, are killed, are stopped and continued, compute slowly, fork inside
their turns, and load their data with a DataLoader's workers. No step of the steady job takes longer
than its compute and one lease, its turns never fail, all losses are those of jobs alone, bit for
bit, and no file is left in shared memory.
"""

import contextlib
import itertools
import random
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import lanes
from tests.faults.lanes import Lane, Outcome
from tests.harness.groups import files_of, free_port
from tests.harness.waiting import eventually

LEASE_S = 5.0  # the default
SLACK_S = 10.0  # for a busy machine; without a lease a stall would not end
ENDLESS = 1_000_000
EVENTS_EACH = 100
RANKS = 2
STEADY_SEED = 0


@dataclass
class Job:
    """A job with one rank in each lane."""

    seed: int
    ranks: list[lanes.Rank]
    stop: Path

    @property
    def count(self) -> int:  # of steps
        return len(self.ranks[0].steps())

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def alive(self) -> bool:
        return any(rank.alive() for rank in self.ranks)

    def error(self) -> str:
        return "\n".join(rank.error() for rank in self.ranks)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        assert eventually(condition, timeout_s), f"job {self.seed} {what} too long: {self.error()}"

    def stats(self) -> list[dict[str, Any]]:
        """Return its ranks' figures after it has ended by itself. Turns must not have failed."""
        found = [rank.stats() for rank in self.ranks]
        assert all(each and each["disabled_because"] is None for each in found), (
            f"{found}: {self.error()}"
        )
        return [each for each in found if each]

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Make its steps slower during the block."""
        slow = Path(f"{self.stop}.slow")
        slow.touch()
        yield
        slow.unlink()

    def train(self, steps: int) -> None:
        """Wait until it has done ``steps`` further steps."""
        wanted = self.count + steps
        self.wait(lambda: self.count >= wanted, 120.0, "trains")

    def end(self, how: str) -> None:
        """End the job.

        Args:
            how: "leave" lets it end by itself, "kill-rank" kills one rank and later the others, as
                torchrun does after a death, and "kill-job" kills all at once.
        """
        if how == "leave":
            self.stop.touch()
            self.wait(lambda: not self.alive(), 30.0, "leaves")
        elif how == "kill-rank":
            random.choice(self.ranks).signal(signal.SIGKILL)
            time.sleep(random.uniform(0.0, 1.0))
        self.signal(signal.SIGKILL)
        self.wait(lambda: not self.alive(), 10.0, "is killed")


@dataclass
class Site:
    """Starts jobs, with a rank in each lane."""

    lanes: Sequence[Lane]
    directory: Path
    group: str
    serial: Iterator[int] = field(default_factory=itertools.count)

    def start(
        self, seed: int, hook: str = "crossover", steps: int = ENDLESS, **mishaps: Any
    ) -> Job:
        name = self.directory / f"job{next(self.serial)}"
        order = {
            "seed": seed,
            "hook": hook,
            "steps": steps,
            "group": self.group,
            "stop": f"{name}-stop",
        }
        size = str(len(self.lanes))
        ranks = []
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": size}
        for number, lane in enumerate(self.lanes):
            own = {"RANK": str(number), "CROSSOVER_DEVICE": f"dev{number}"}
            of_rank = {"log": f"{name}-rank{number}", "environment": {**at, **own}}
            ranks.append(lane.bear({**order, **mishaps, **of_rank}))
        return Job(seed, ranks, Path(order["stop"]))

    def losses_alone(self, seed: int, steps: int) -> list[list[float]]:
        """Train for ``steps`` steps with plain DDP. Return the losses of each rank."""
        job = self.start(seed, hook="none", steps=steps)
        job.wait(lambda: not job.alive(), 600.0, "trains alone")
        return [rank.losses() for rank in job.ranks]


EVENTS = {"join": 4, "leave": 2, "kill-rank": 2, "kill-job": 2, "stop": 1, "nap": 2, "slow": 2}
GUESTS_SEEDS = (1, 2)


@dataclass
class Story:
    """One steady job, and random events of its guests, from the seed of `random`."""

    site: Site
    long_stop_s: float
    guests: list[Job] = field(default_factory=list)
    everyone: list[Job] = field(default_factory=list)

    def happen(self) -> str:
        """Let one random event happen to the guests, and return its kind."""
        guests = self.guests
        possible = [each for each in EVENTS if (len(guests) < 2 if each == "join" else guests)]
        event = random.choices(possible, [EVENTS[each] for each in possible])[0]
        if event == "join":
            workers, forks = random.choice([0, 0, 1]), random.sample(range(1, 12), 2)
            guests.append(
                self.site.start(random.choice(GUESTS_SEEDS), workers=workers, forks=forks)
            )
            self.everyone.append(guests[-1])
        elif event == "slow":
            with random.choice(guests).slowed():
                time.sleep(random.uniform(0.1, 1.0))
        elif event in ("stop", "nap"):
            job = random.choice(guests)
            stopped = random.choice([job.ranks, job.ranks[:1], job.ranks[1:]])
            for rank in stopped:
                rank.signal(signal.SIGSTOP)
            time.sleep(self.long_stop_s if event == "stop" else random.uniform(0.01, 0.5))
            for rank in stopped:
                rank.signal(signal.SIGCONT)
        else:
            guests.pop(random.randrange(len(guests))).end(event)
        return event

    def live(self, events: int, pace_s: float) -> Outcome:
        """Let all events happen, and judge the records."""
        steady, happened = self.site.start(STEADY_SEED), Counter[str]()
        self.everyone.append(steady)
        steady.train(4)
        for number in range(events):
            happened[self.happen()] += 1
            time.sleep(random.uniform(0.0, pace_s))
            if not steady.alive():
                return {"by_kind": happened}, [
                    f"the steady job ended at {number}: {steady.error()}"
                ]
        for job in [*self.guests, steady]:
            job.end("leave")
        broken = [*self._other_losses(), *map(str, files_of(self.site.group))]
        longest_s = max(rank.longest_s() for rank in steady.ranks)
        if longest_s >= LEASE_S + SLACK_S:
            broken.append(f"the steady job stalled for {longest_s:.2f} s")
        if any(
            (stats := rank.stats() or {}).get("disabled_because", "") is not None
            for rank in steady.ranks
        ):
            broken.append(f"turns of the steady job failed: {stats}, {steady.error()}")
        figures = {
            "steps": steady.count,
            "guests": len(self.everyone) - 1,
            "longest_step_s": longest_s,
        }
        return {"by_kind": happened, **figures}, broken

    def _other_losses(self) -> Iterator[str]:
        """Compare all jobs with a copy that trains alone, for as many steps as the longest did."""
        for seed in {job.seed for job in self.everyone}:
            alike = [job for job in self.everyone if job.seed == seed]
            steps = max(len(rank.steps()) for job in alike for rank in job.ranks)
            alone = self.site.losses_alone(seed, max(1, steps))
            for job in alike:
                for rank, expected in zip(job.ranks, alone, strict=True):
                    if rank.losses() != expected[: len(rank.losses())]:
                        yield f"job with seed {seed} computed other losses: {rank.path.name}"


@contextlib.contextmanager
def open_lanes() -> Iterator[list[Lane]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Lane("tests.faults.trainee")) for _ in range(RANKS)]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = lanes.arguments(__doc__, events=200, lanes=1, keep="runs/training-faults")
    parser.add_argument("--long-stop", type=float, default=20.0, help="seconds of the long SIGSTOP")
    parser.add_argument(
        "--pace", type=float, default=1.5, help="seconds between two events at most"
    )
    args = parser.parse_args(argv)

    def live(seed: int, events: int, nurseries: list[Lane], directory: Path) -> Outcome:
        random.seed(seed)
        site = Site(nurseries, directory, f"campaign-{uuid.uuid4().hex[:12]}")
        return Story(site, args.long_stop).live(events, args.pace)

    return lanes.campaign(args, "tests.faults.campaign", EVENTS_EACH, open_lanes, live)


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
