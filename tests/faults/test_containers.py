"""Siblings in containers: other process ids, users and mounts, one /dev/shm.

Every rank is the only one in namespaces of its own, and each thinks that it is root. Nothing of the protocol may
rest on a process id, on an inherited descriptor, or on a parent.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.alone import losses_alone
from tests.harness.children import Child, end
from tests.harness.groups import files_of, free_port, new_group
from tests.harness.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
ENTER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
RANKS = 2
STEPS = 12
TIMEOUT_S = 120.0


def why_no_containers() -> str:
    """Return why this machine lends no namespaces; empty if it does."""
    try:
        tried = subprocess.run([*ENTER, "true"], capture_output=True, text=True, timeout=30.0)
    except FileNotFoundError:
        return "unshare is not installed"
    return f"unshare is not permitted: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = why_no_containers()
pytestmark = [
    pytest.mark.quiet,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "containers can be made"),
]


class Container:
    """A nursery in namespaces of its own; the rank that it bears is number 2 or so there."""

    def __init__(self, rank: int) -> None:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "CROSSOVER_DEVICE": f"dev{rank}"}
        self.process = Child(
            [*ENTER, sys.executable, "-m", "tests.faults.nursery"],
            os.environ | environment,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def hear(self) -> Any:
        return self.process.hear(TIMEOUT_S)

    def bear(self, order: dict[str, Any]) -> int:
        self.process.tell(order)
        return int(self.hear()["pid"])

    def kill(self) -> None:
        end([self.process], grace_s=0.0)  # and the kernel kills all in it

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


class Job(NamedTuple):
    containers: Sequence[Container]
    logs: Sequence[Path]
    stop: Path

    def records(self, rank: int) -> list[Any]:
        lines = self.logs[rank].read_text().splitlines() if self.logs[rank].exists() else []
        return [json.loads(line) for line in lines if line.endswith(("]", "}"))]

    def steps(self, rank: int) -> list[list[float]]:
        return [record for record in self.records(rank) if isinstance(record, list)]

    def stats(self, rank: int) -> dict[str, Any] | None:
        return next((record["stats"] for record in self.records(rank) if isinstance(record, dict)), None)

    def errors(self) -> str:
        paths = [Path(f"{log}.err") for log in self.logs]
        return "\n".join(path.read_text()[-1500:] for path in paths if path.exists())

    def ends(self) -> list[dict[str, Any]]:
        """Wait until every rank has ended by itself; return their figures."""
        await_that(lambda: all(self.has_ended(rank) for rank in range(RANKS)), self)
        found = [self.stats(rank) for rank in range(RANKS)]
        return [each for each in found if each is not None]

    def has_ended(self, rank: int) -> bool:
        return any(isinstance(record, dict) for record in self.records(rank))


def await_that(condition: Any, job: Job) -> None:
    assert eventually(condition, TIMEOUT_S), job.errors()


class Machine:
    """What starts jobs in containers, and where they write."""

    def __init__(self, directory: Path, containers: Sequence[Sequence[Container]]) -> None:
        self._directory = directory
        self._containers = iter(containers)
        self.group = new_group()

    def start(self, name: str, seed: int, steps: int = STEPS, hook: str = "crossover") -> Job:
        containers = next(self._containers)
        logs = [self._directory / f"{name}-rank{rank}" for rank in range(RANKS)]
        stop = self._directory / f"{name}-stop"
        order = {"seed": seed, "hook": hook, "steps": steps, "group": self.group, "stop": str(stop)}
        order |= {"port": free_port(), "address": "127.0.0.1"}
        pids = [
            container.bear(order | {"log": str(log)}) for container, log in zip(containers, logs, strict=True)
        ]
        assert all(pid < 20 for pid in pids), "process ids are the containers' own"
        return Job(containers, logs, stop)


@pytest.fixture(scope="module")
def containers() -> Iterator[list[list[Container]]]:
    """Two jobs' containers, which import torch at the same time and once for all tests; the last one may kill some."""
    with ExitStack() as stack:
        made = [[stack.enter_context(Container(rank)) for rank in range(RANKS)] for _ in range(2)]
        for container in itertools.chain(*made):
            container.hear()
        yield made


@pytest.fixture
def machine(tmp_path: Path, containers: list[list[Container]]) -> Machine:
    return Machine(tmp_path, containers)


def losses(job: Job) -> list[list[float]]:
    return [[step[3] for step in job.steps(rank)] for rank in range(RANKS)]


def test_siblings_in_containers_take_turns_with_results_as_alone(machine: Machine, tmp_path: Path) -> None:
    jobs = [machine.start(f"job{seed}", seed, steps=100_000) for seed in (1, 2)]
    for job in jobs:
        await_that(lambda job=job: len(job.steps(0)) >= STEPS, job)
    for job in jobs:
        job.stop.touch()
    figures = [job.ends() for job in jobs]
    for ranks in figures:
        for stats in ranks:
            assert stats["disabled_because"] is None
            assert stats["leases_expired"] == 0
            assert stats["handovers"] > 0, "it never waited for its sibling"
            assert stats["turn"] > stats["turns"], "the order of turns is not common to both"
    assert not files_of(machine.group)
    for seed, job in zip((1, 2), jobs, strict=True):
        count = len(job.steps(0))
        assert losses(job) == losses_alone(tmp_path, seed=seed, steps=count, ranks=RANKS, group=machine.group)


def test_a_container_that_is_killed_holds_its_sibling_up_for_no_time(machine: Machine) -> None:
    steady, victim = machine.start("steady", 1, steps=100_000), machine.start("victim", 2, steps=100_000)
    for job in (steady, victim):
        await_that(lambda job=job: len(job.steps(0)) >= STEPS, job)
    for container in victim.containers:
        container.kill()
    count = len(steady.steps(0))
    await_that(lambda: len(steady.steps(0)) >= count + STEPS, steady)
    steady.stop.touch()
    for stats in steady.ends():
        assert stats["disabled_because"] is None
        assert stats["leases_expired"] == 0
        assert stats["siblings"] == 0
    assert not files_of(machine.group)
