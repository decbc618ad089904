"""Jobs come, go, are killed and stopped at random beside a steady job, which must not notice more than a lease.

    python -m tests.faults.campaign --events 200 --seed 1

On the emulated cluster (two nodes with a shaped link; without root over loopback). The steady job trains all the
time; guests join, leave, lose a rank, are killed, are stopped and go on, compute slowly, fork inside their turns, load
their data with a DataLoader's workers; the link is slow for a while. Afterwards: no step of the steady job took
longer than its compute and one lease, its turns never failed, its losses are those it has alone, bit for bit,
and so are the losses of every guest as far as it came; nothing is left in shared memory.
"""

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

from lab import Cluster, why_not_shaped
from tests.faults.logged_rank import LoggedRank
from tests.harness.children import Child
from tests.harness.groups import files_of

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 5.0  # the default: what a user gets
SLACK_S = 10.0  # the machine may be busy; a stall without lease would be endless
ENDLESS = 1_000_000
NODES = 2
STEADY_SEED = 0
ANSWER_S = 120.0  # then the nursery hangs


class Rank(LoggedRank):
    """A rank of a job that trains."""

    def steps(self) -> list[list[float]]:
        return [record for record in self.records() if isinstance(record, list)]

    def losses(self) -> list[float]:
        return [record[3] for record in self.steps()]

    def stats(self) -> dict[str, Any] | None:
        return next((record["stats"] for record in self.records() if isinstance(record, dict)), None)

    def error(self) -> str:
        path = Path(f"{self.log}.err")
        return path.read_text()[-1500:] if path.exists() else ""


@dataclass
class Job:
    seed: int
    ranks: list[Rank]
    stop: Path

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def alive(self) -> bool:
        return any(rank.alive() for rank in self.ranks)


@dataclass
class Campaign:
    """The nurseries of one cluster, and the jobs they have borne."""

    cluster: Cluster
    directory: Path
    group: str
    nurseries: list[Child] = field(default_factory=list)
    serial: Iterator[int] = field(default_factory=itertools.count)

    def open(self) -> None:
        for node in range(NODES):
            nursery = self.cluster.popen(
                node,
                ["python", "-m", "tests.faults.nursery"],
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self.nurseries.append(nursery)
        for nursery in self.nurseries:
            nursery.hear(ANSWER_S)

    def start(self, seed: int, hook: str = "crossover", steps: int = ENDLESS, **mishaps: Any) -> Job:
        number = next(self.serial)
        stop = self.directory / f"stop{number}"
        order = {
            "seed": seed,
            "hook": hook,
            "steps": steps,
            "group": self.group,
            "stop": str(stop),
            **mishaps,
        }
        order["slow"] = f"{stop}.slow"
        order |= {"port": self.cluster.port(), "address": self.cluster.environment(0)["MASTER_ADDR"]}
        ranks = []
        for node, nursery in enumerate(self.nurseries):
            log = self.directory / f"job{number}-rank{node}"
            nursery.tell(order | {"log": str(log)})
            ranks.append(Rank(nursery.hear(ANSWER_S)["pid"], log))
        return Job(seed, ranks, stop)


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"expected {what} within {timeout_s} s")
        time.sleep(0.02)


def end(job: Job, how: str) -> None:
    """End a job: ``leave`` by its own will, ``kill-rank`` as torchrun would after a death, ``kill-job`` at once."""
    if how == "leave":
        job.stop.touch()
        wait_until(lambda: not job.alive(), 30, f"job with seed {job.seed} to leave")
    elif how == "kill-rank":
        random.choice(job.ranks).signal(signal.SIGKILL)
        time.sleep(random.uniform(0.0, 1.0))
    job.signal(signal.SIGKILL)
    wait_until(lambda: not job.alive(), 10, "killed ranks to be gone")


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


def possible_events(campaign: Campaign, guests: Sequence[Job]) -> list[str]:
    possible = ["join"] if not guests else [each for each in EVENTS if each != "join" or len(guests) < 2]
    return [each for each in possible if each != "slow-link" or campaign.cluster.rate_mbit]


def happen(campaign: Campaign, guests: list[Job], everyone: list[Job], long_stop_s: float) -> str:
    """Let one random event happen to the guests; return what it was."""
    possible = possible_events(campaign, guests)
    event = random.choices(possible, [EVENTS[each] for each in possible])[0]
    if event == "join":
        workers = random.choice([0, 0, 1])
        forks = random.sample(range(1, 12), 2)
        guests.append(campaign.start(random.choice(GUESTS_SEEDS), workers=workers, forks=forks))
        everyone.append(guests[-1])
        return "join with a DataLoader's worker" if workers else event
    if event == "slow":
        slow = Path(f"{random.choice(guests).stop}.slow")
        slow.touch()
        time.sleep(random.uniform(0.1, 1.0))
        slow.unlink()
    elif event == "slow-link":
        rate_mbit = campaign.cluster.rate_mbit
        assert rate_mbit is not None
        campaign.cluster.set_rate(rate_mbit / 5)
        time.sleep(random.uniform(0.1, 1.0))
        campaign.cluster.set_rate(rate_mbit)
    elif event in ("stop", "nap"):
        job = random.choice(guests)
        stopped = random.choice([job.ranks, job.ranks[:1], job.ranks[1:]])
        for rank in stopped:
            rank.signal(signal.SIGSTOP)
        time.sleep(long_stop_s if event == "stop" else random.uniform(0.01, 0.5))
        for rank in stopped:
            rank.signal(signal.SIGCONT)
    else:
        end(guests.pop(random.randrange(len(guests))), event)
    return event


def run(cluster: Cluster, events: int, seed: int, long_stop_s: float, pace_s: float) -> dict[str, Any]:
    """Run the campaign and check it; raise AssertionError with the seed on a broken promise."""
    random.seed(seed)
    with tempfile.TemporaryDirectory(prefix="campaign-") as directory:
        campaign = Campaign(cluster, Path(directory), f"campaign-{uuid.uuid4().hex[:12]}")
        campaign.open()
        steady = campaign.start(STEADY_SEED)
        wait_until(lambda: len(steady.ranks[0].steps()) > 3, 60, "the steady job to train")
        guests: list[Job] = []
        everyone: list[Job] = []
        happened: Counter[str] = Counter()
        for number in range(events):
            happened[happen(campaign, guests, everyone, long_stop_s)] += 1
            time.sleep(random.uniform(0.0, pace_s))
            assert steady.alive(), (
                f"seed {seed}, event {number}: the steady job ended: {steady.ranks[0].error()}"
            )
        for guest in guests:
            end(guest, "leave")
        end(steady, "leave")
        found = check(campaign, steady, everyone, seed)
        return {"seed": seed, "events": dict(happened), **found}


def check(campaign: Campaign, steady: Job, guests: Sequence[Job], seed: int) -> dict[str, Any]:
    longest_s = max(end_s - begin_s for rank in steady.ranks for _, begin_s, end_s, _ in rank.steps())
    assert longest_s < LEASE_S + SLACK_S, f"seed {seed}: the steady job stalled for {longest_s:.2f} s"
    expired = []
    for rank in steady.ranks:
        stats = rank.stats()
        assert stats is not None, f"seed {seed}: the steady job failed: {rank.error()}"
        assert stats["disabled_because"] is None, f"seed {seed}: turns failed: {rank.error()}"
        expired.append(stats["leases_expired"])
    seeds = {job.seed for job in [steady, *guests]}
    references = {each: start_alone(campaign, each, [steady, *guests]) for each in seeds}
    wait_until(lambda: not any(job.alive() for job in references.values()), 600, "the reference runs to end")
    alone = {each: [rank.losses() for rank in job.ranks] for each, job in references.items()}
    for job in [steady, *guests]:
        for rank, expected in zip(job.ranks, alone[job.seed], strict=True):
            found = rank.losses()
            assert found == expected[: len(found)], (
                f"seed {seed}: job with seed {job.seed} computed other losses"
            )
    left = files_of(campaign.group)
    assert not left, f"seed {seed}: left in shared memory: {left}"
    steps = len(steady.ranks[0].steps())
    return {
        "steps": steps,
        "guests": len(guests),
        "longest_step_s": longest_s,
        "leases_expired": expired,
        "turns_forgiven": max(expired),
    }


def start_alone(campaign: Campaign, seed: int, jobs: Sequence[Job]) -> Job:
    """Start a job with plain DDP, for as many steps as any copy of it came."""
    steps = max(len(rank.steps()) for job in jobs if job.seed == seed for rank in job.ranks)
    return campaign.start(seed, hook="none", steps=max(1, steps))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--long-stop", type=float, default=20.0, help="seconds of the long SIGSTOP")
    parser.add_argument(
        "--pace", type=float, default=1.5, help="longest pause between two events, in seconds"
    )
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s")
    args = parser.parse_args(argv)
    with Cluster(nodes=NODES, rate_mbit=args.rate, shaped=why_not_shaped() is None) as cluster:
        result = run(cluster, args.events, args.seed, args.long_stop, args.pace)
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
