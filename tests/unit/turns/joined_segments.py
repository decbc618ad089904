"""Segments and processes that have joined them, for the tests of what goes on between them."""

import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp._turns.rules import Member
from crossover_ddp._turns.segment import TurnSegment
from tests.harness._preloaded import context

DEVICE = "dev0"

Join = Callable[..., TurnSegment]


def join_at(
    base: object, *, job: int = 1, group: str = "jobs", device: str = DEVICE, lease_s: float = 1.0
) -> TurnSegment:
    segment = TurnSegment(group, device, base=str(base))
    segment.join(Member(job=job, lead=5, world_size=1, lease_s=lease_s))
    return segment


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Join segments below the test's directory; all leave at the end."""
    joined: list[TurnSegment] = []

    def joining(**arguments: Any) -> TurnSegment:
        joined.append(join_at(tmp_path, **arguments))
        return joined[-1]

    yield joining
    for segment in joined:
        segment.leave()


def member(segment: TurnSegment, job: int) -> Member:
    return next(found for found in segment.members() if found.job == job)


def jobs(segment: TurnSegment) -> list[int]:
    return sorted(found.job for found in segment.members())


def files(base: Path) -> list[str]:
    return sorted(path.name for path in base.rglob("*") if not path.is_dir())


def home(base: Path) -> Path:
    return base / f"crossover_ddp-{os.geteuid()}"


# --- other processes --------------------------------------------------------------------------------------------


def _live(orders: "Connection[Any, Any]", base: str, job: int) -> None:
    """Another process on the device, that does what it is told."""
    segment = join_at(base, job=job)
    orders.send(segment.slot)
    while (order := orders.recv()) is not None:
        name, arguments, options = order
        orders.send(getattr(segment, name)(*arguments, **options))
    segment.leave()
    orders.send(None)


class Process:
    """A process that has joined; it is killed at the end of the block at the latest."""

    def __init__(self, base: Path, job: int) -> None:
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs, str(base), job))
        self.process.start()
        theirs.close()
        self.slot: int = self.orders.recv()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def call(self, name: str, *arguments: object, **options: object) -> Any:
        self.orders.send((name, arguments, options))
        return self.orders.recv()

    def leave(self) -> None:
        self.orders.send(None)
        self.orders.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
