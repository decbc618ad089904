"""Ranks are killed and stopped wherever it hurts most; the sibling job goes on, at once or after a lease.

Both jobs have one rank on each of two emulated devices and meet in a barrier inside every turn.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, run_jobs, spawn_script
from tests.harness.groups import files_of, new_group
from tests.harness.waiting import eventually

LONG_LEASE_S = 20.0  # whoever waits for this one has not seen a death
AT_ONCE_S = 5.0  # generous: the machine may be busy
LEASE_S = 0.6
STOP_S = 1.5
TIMEOUT_S = 60.0
TURNS_AFTER = 30
pytestmark = pytest.mark.quiet


class Wait(NamedTuple):
    begin_s: float
    wait_s: float


class Outcome(NamedTuple):
    waits: list[Wait]
    turns: list[int]
    leases_expired: int
    disabled_because: str | None
    broken: str = ""
    """What the job's own collective said when another rank of it was gone."""


def step(mutex: GPUMutex) -> Wait:
    """Take a turn with a collective inside, as DDP's broadcast of buffers is."""
    begin_s = time.monotonic()
    mutex.acquire()
    wait_s = time.monotonic() - begin_s
    dist.barrier()
    time.sleep(0.002)
    mutex.release()
    time.sleep(0.002)
    return Wait(begin_s, wait_s)


def _decided_by_rank_0(value: bool) -> bool:
    said: list[Any] = [value]
    dist.broadcast_object_list(said, src=0)
    return bool(said[0])


def survive(rank: int, world_size: int, group: str, events: Sequence[str]) -> Outcome:
    """Train until every event has come, and a little longer."""
    mutex = GPUMutex(group, device=f"dev{rank}", lease=LONG_LEASE_S)
    waits, turns, after = [], list[int](), 0
    while after < TURNS_AFTER:
        waits.append(step(mutex))
        # Of a turn that has begun alone on its device the number comes later.
        assert eventually(lambda: mutex.stats()["turn"] > [0, *turns][-1])
        turns.append(int(mutex.stats()["turn"]))
        after += _decided_by_rank_0(all(os.path.exists(event) for event in events))
    stats = mutex.stats()
    mutex.close()
    return Outcome(waits, turns, stats["leases_expired"], stats["disabled_because"])


def suffer(rank: int, world_size: int, group: str, lease_s: float, fate: "Fate", event: str) -> Outcome:
    """Train for a few turns, then meet the fate; what follows is as in a script that fails."""
    mutex = GPUMutex(group, device=f"dev{rank}", lease=lease_s)
    waits, broken = [], ""
    try:
        for number in range(fate.after_turns + TURNS_AFTER):
            if number == fate.after_turns:
                fate.strike(rank, mutex, event)
            waits.append(step(mutex))
    except RuntimeError as error:
        broken = str(error)
    stats = mutex.stats()
    mutex.close()
    return Outcome(waits, [], stats["leases_expired"], stats["disabled_because"], broken)


class Fate(NamedTuple):
    """What happens to which ranks, and where."""

    ranks: Sequence[int]
    place: str
    stop_s: float = 0.0
    """Stopped for so long; killed if 0."""
    after_turns: int = 10

    def strike(self, rank: int, mutex: GPUMutex, event: str) -> None:
        if self.place == "drawn":
            mutex.request()
        elif self.place == "inside":
            mutex.acquire()
        elif self.place == "queueing" and rank in self.ranks:
            killer = threading.Timer(0.003, self._end, [event])
            killer.daemon = True
            killer.start()
            for _ in range(1000):  # it queues most of the time
                mutex.acquire()
                mutex.release()
        if rank in self.ranks:
            self._end(event)
        if self.place == "inside":
            dist.barrier()
            mutex.release()

    def _end(self, event: str) -> None:
        Path(event).touch()
        if self.stop_s:
            stop_self(self.stop_s)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def stop_self(stop_s: float) -> None:
    waker = subprocess.Popen(["sh", "-c", f"sleep {stop_s}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def run_with_fate(group: str, fate: Fate, event: Path, lease_s: float) -> tuple[list[Outcome], list[Outcome]]:
    deaths = {} if fate.stop_s else dict.fromkeys(fate.ranks, signal.SIGKILL)
    survivors, victims = run_jobs(
        [
            Job(survive, 2, (group, [str(event)]), name="survivor"),
            Job(suffer, 2, (group, lease_s, fate, str(event)), deaths=deaths, name="victim"),
        ],
        timeout_s=TIMEOUT_S,
    )
    return survivors, victims


def longest(outcomes: Sequence[Outcome]) -> float:
    return max(wait.wait_s for outcome in outcomes for wait in outcome.waits)


# --- deaths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ((0,), "inside"),
        ((0,), "drawn"),
        ((0,), "queueing"),
        ((1,), "inside"),
        ((0, 1), "drawn"),
        ((0, 1), "between"),
    ],
)
def test_a_death_holds_the_sibling_up_for_no_time(ranks: tuple[int, ...], place: str, tmp_path: Path) -> None:
    group = new_group()
    survivors, victims = run_with_fate(group, Fate(ranks, place), tmp_path / "event", LONG_LEASE_S)
    assert longest(survivors) < AT_ONCE_S
    assert all(each.disabled_because is None and each.leases_expired == 0 for each in survivors)
    assert survivors[0].turns == survivors[1].turns
    assert all(victim is None or victim.broken for victim in victims), "the death was noticed"
    assert not files_of(group)


# --- stops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "place"), [((0,), "inside"), ((1,), "inside"), ((0, 1), "inside"), ((0,), "drawn")]
)
def test_a_stop_holds_the_sibling_up_for_one_lease(
    ranks: tuple[int, ...], place: str, tmp_path: Path
) -> None:
    group = new_group()
    survivors, victims = run_with_fate(group, Fate(ranks, place, STOP_S), tmp_path / "event", LEASE_S)
    assert LEASE_S * 0.9 < longest(survivors) < LEASE_S + AT_ONCE_S
    for each in survivors:
        assert each.disabled_because is None
        assert each.leases_expired <= 1
        assert sum(wait.wait_s > LEASE_S / 2 for wait in each.waits) <= 1, "once, not each time"
    for each in victims:
        assert each.disabled_because is None
        assert each.broken == ""
        assert each.leases_expired == 0
        assert len(each.waits) == 10 + TURNS_AFTER, "it goes on as if nothing had been"
    assert not files_of(group)


def test_a_stop_between_turns_holds_nobody_up(tmp_path: Path) -> None:
    group = new_group()
    fate = Fate((0, 1), "between", AT_ONCE_S + 1.5)
    survivors, _ = run_with_fate(group, fate, tmp_path / "event", LONG_LEASE_S)
    assert longest(survivors) < AT_ONCE_S
    assert not files_of(group)


# --- scripts ------------------------------------------------------------------------------------------------------


def test_scripts_that_never_close_their_mutex_leave_nothing(tmp_path: Path) -> None:
    group, path = new_group(), tmp_path / "script.py"
    path.write_text(
        f"from crossover_ddp.gpu_mutex import GPUMutex\nGPUMutex({group!r}, device='d').acquire()\n"
        "import os\nif os.environ['RANK'] == '1': raise ValueError('words')\n"
    )
    # Its ranks are jobs of their own, as they make no process group.
    with spawn_script(path, 2) as ranks:
        assert [process.wait(TIMEOUT_S) for process in ranks.processes] == [0, 1]
        assert "ValueError: words" in ranks.output(1)
    assert not files_of(group)
