"""Jobs come, go, are killed and stopped at random beside a steady job, which must not notice more than a lease.

    python -m tests.faults.campaign --events 200 --seed 1

On the emulated cluster (two nodes with a shaped link; without root over loopback). The steady job trains all the
time; guests join, leave, lose a rank, are killed, are stopped and go on, compute slowly, fork inside their turns, load
their data with a DataLoader's workers; the link is slow for a while. Afterwards: no step of the steady job took
longer than its compute and one lease, its turns never failed, its losses are those it has alone, bit for bit,
and so are the losses of every guest as far as it came; nothing is left in shared memory.
"""

import contextlib
import functools
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
from unittest import mock

from tests.faults import lanes
from tests.faults.lanes import Lane, Told
from tests.harness._preloaded import forked_if_script
from tests.harness.groups import files_of, free_port
from tests.harness.waiting import eventually

from lab import Cluster, why_not_shaped  # isort: skip  # `tests.harness` knows where it is

LEASE_S = 5.0  # the default: what a user gets
SLACK_S = 10.0  # the machine may be busy; a stall without lease would be endless
ENDLESS = 1_000_000
EVENTS_EACH = 100
NODES = 2
STEADY_SEED = 0


@dataclass
class Job:
    """A job with one rank in each lane."""

    seed: int
    ranks: list[lanes.Rank]
    stop: Path

    @property
    def count(self) -> int:
        """How many steps it has done."""
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
        """Return its ranks' figures once it has ended by itself, with turns that never failed."""
        found = [rank.stats() for rank in self.ranks]
        assert all(each and each["disabled_because"] is None for each in found), f"{found}: {self.error()}"
        return [each for each in found if each]

    def train(self, steps: int) -> None:
        """Wait until it has done so many steps more."""
        wanted = self.count + steps
        self.wait(lambda: self.count >= wanted, 120.0, "trains")

    def end(self, how: str) -> None:
        """``leave`` by its own will, ``kill-rank`` as torchrun would after a death, ``kill-job`` at once."""
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
    """Where jobs are born: a rank in each lane; those of a cluster know which."""

    lanes: Sequence[Lane]
    directory: Path
    group: str
    cluster: Cluster | None = None
    serial: Iterator[int] = field(default_factory=itertools.count)

    def start(self, seed: int, hook: str = "crossover", steps: int = ENDLESS, **mishaps: Any) -> Job:
        name = self.directory / f"job{next(self.serial)}"
        order = {"seed": seed, "hook": hook, "steps": steps, "group": self.group, "stop": f"{name}-stop"}
        variables, ranks = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(len(self.lanes))}, []
        at = {"MASTER_PORT": str(self.cluster.port() if self.cluster else free_port())}
        for number, lane in enumerate(self.lanes):
            variables |= {"RANK": str(number), "CROSSOVER_DEVICE": f"dev{number}"}
            own = self.cluster.environment(number) if self.cluster else {}
            told = {"log": f"{name}-rank{number}", "environment": {**variables, **own, **at}}
            ranks.append(lane.bear({**order, **mishaps, **told}))
        return Job(seed, ranks, Path(order["stop"]))

    def losses_alone(self, seed: int, steps: int) -> list[list[float]]:
        """Train for so many steps with plain DDP; return the losses of each rank."""
        job = self.start(seed, hook="none", steps=steps)
        job.wait(lambda: not job.alive(), 600.0, "trains alone")
        return [rank.losses() for rank in job.ranks]


EVENTS = {
    "join": 4,
    "leave": 2,
    "kill-rank": 2,
    "kill-job": 2,
    "stop": 1,
    "nap": 2,
    "slow": 2,
    "slow-link": 2,
}
GUESTS_SEEDS = (1, 2)


@dataclass
class Story:
    """One steady job and what befalls its guests; random with a seed of its own."""

    site: Site
    long_stop_s: float
    guests: list[Job] = field(default_factory=list)
    everyone: list[Job] = field(default_factory=list)

    def happen(self) -> str:
        """Let one random event happen to the guests; return what it was."""
        guests, rate_mbit = self.guests, self.site.cluster and self.site.cluster.rate_mbit
        possible = [
            each
            for each in EVENTS
            if (len(guests) < 2 if each == "join" else guests) and (each != "slow-link" or rate_mbit)
        ]
        event = random.choices(possible, [EVENTS[each] for each in possible])[0]
        if event == "join":
            workers, forks = random.choice([0, 0, 1]), random.sample(range(1, 12), 2)
            guests.append(self.site.start(random.choice(GUESTS_SEEDS), workers=workers, forks=forks))
            self.everyone.append(guests[-1])
            return "join with a DataLoader's worker" if workers else event
        if event == "slow":
            slow = Path(f"{random.choice(guests).stop}.slow")
            slow.touch()
            time.sleep(random.uniform(0.1, 1.0))
            slow.unlink()
        elif event == "slow-link":
            assert self.site.cluster is not None and rate_mbit is not None
            self.site.cluster.set_rate(rate_mbit / 5)
            time.sleep(random.uniform(0.1, 1.0))
            self.site.cluster.set_rate(rate_mbit)
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

    def live(self, events: int, pace_s: float) -> Told:
        """Let everything happen, and judge it."""
        steady, happened = self.site.start(STEADY_SEED), Counter[str]()
        self.everyone.append(steady)
        steady.train(4)
        for number in range(events):
            happened[self.happen()] += 1
            time.sleep(random.uniform(0.0, pace_s))
            if not steady.alive():
                return Told({"by_kind": happened}, [f"the steady job ended at {number}: {steady.error()}"])
        for job in [*self.guests, steady]:
            job.end("leave")
        stats = [rank.stats() or {} for rank in steady.ranks]
        longest_s = max(rank.longest_s() for rank in steady.ranks)
        broken = [*self._other_losses(), *map(str, files_of(self.site.group))]
        if longest_s >= LEASE_S + SLACK_S:
            broken.append(f"the steady job stalled for {longest_s:.2f} s")
        if any(each.get("disabled_because", "") is not None for each in stats):
            broken.append(f"turns of the steady job failed: {stats}, {steady.error()}")
        expired = float(max(each.get("leases_expired", 0) for each in stats))
        figures = {"steps": steady.count, "guests": len(self.everyone) - 1, "leases_expired": expired}
        return Told({"by_kind": happened, **figures, "longest_step_s": longest_s}, broken)

    def _other_losses(self) -> Iterator[str]:
        """Compare all jobs with a copy that trains alone, for as many steps as any of them came."""
        for seed in {job.seed for job in self.everyone}:
            alike = [job for job in self.everyone if job.seed == seed]
            steps = max(len(rank.steps()) for job in alike for rank in job.ranks)
            alone = self.site.losses_alone(seed, max(1, steps))
            for job in alike:
                for rank, expected in zip(job.ranks, alone, strict=True):
                    if rank.losses() != expected[: len(rank.losses())]:
                        yield f"job with seed {seed} computed other losses: {rank.path.name}"


@contextlib.contextmanager
def open_cluster(rate_mbit: float) -> Iterator[tuple[Cluster, list[Lane]]]:
    """Two nodes with a nursery each."""
    shaped = why_not_shaped() is None
    with (
        mock.patch("lab.nodes.Child", forked_if_script),
        Cluster(nodes=NODES, rate_mbit=rate_mbit, shaped=shaped) as cluster,
    ):
        starts = [functools.partial(cluster.popen, node) for node in range(NODES)]
        yield cluster, [Lane("tests.faults.trainee", start=start) for start in starts]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = lanes.arguments(__doc__, events=200, lanes=1, keep="runs/training-faults")
    parser.add_argument("--long-stop", type=float, default=20.0, help="seconds of the long SIGSTOP")
    parser.add_argument(
        "--pace", type=float, default=1.5, help="longest pause between two events, in seconds"
    )
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s")
    args = parser.parse_args(argv)

    def live(seed: int, events: int, lane: tuple[Cluster, list[Lane]], directory: Path) -> Told:
        random.seed(seed)
        cluster, nurseries = lane
        site = Site(nurseries, directory, f"campaign-{uuid.uuid4().hex[:12]}", cluster)
        return Story(site, args.long_stop).live(events, args.pace)

    cluster = functools.partial(open_cluster, args.rate)
    return lanes.campaign(args, "tests.faults.campaign", EVENTS_EACH, cluster, live)


if __name__ == "__main__":
    sys.exit(1 if main()["failures"] else 0)
