"""One rank of the mutex's fault campaign: takes turns, does its deeds, records its observations.

Every line of its record is ``[kind, seconds, …]`` on the machine's own clock, even after the
package's clock was made to jump.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crossover_ddp import gpu_mutex
from crossover_ddp._turns import joining, turns
from crossover_ddp._turns import segment as turn_segment
from crossover_ddp._turns.device_order import DeviceOrder, order_on
from crossover_ddp._turns.joining import Membership
from crossover_ddp._turns.rules import Lost, Patience
from crossover_ddp.errors import CrossoverError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.faults.schedules import LATE_S, Deed, JobPlan
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import membership_of

NUMBERED_S = 0.2  # within this time a turn that began alone receives its number
QUEUEING_S = 0.05


class Book:
    """The rank's record. Each line is one write, so that a killed rank leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, *what: Any, at_s: float | None = None) -> None:
        line = [kind, round(time.monotonic() if at_s is None else at_s, 6), *what]
        os.write(self._fd, (json.dumps(line) + "\n").encode())


class NotedPatience(Patience):
    """Records the jobs that the rank loses patience with, and since when it has waited for each."""

    def __init__(self, book: Book, limit_s: float) -> None:
        super().__init__(limit_s)
        self._book = book
        self._noted: tuple[object, float] = (None, 0.0)

    def remaining(self, waiting: Any, members: Any, now_s: float) -> float | None:
        before_s = time.monotonic()
        left_s = super().remaining(waiting, members, now_s)
        if self._noted[0] != self._front:
            self._noted = self._front, before_s
        return left_s

    def _lose(self, lost: Lost, members: Any) -> None:
        front = (lost.job, lost.turn)
        since_s = self._noted[1] if self._noted[0] == front else time.monotonic()
        self._book.note("forgave", *front, since_s, lost.lease_s)
        super()._lose(lost, members)


class LateDevice(DeviceOrder):
    """An emulated device that ends each turn ``late_s`` after the host."""

    def __init__(self, late_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self._late_s = late_s
        self.end_s = 0.0  # when its last turn ends

    def check_usable(self) -> None:
        """Allow turns everywhere."""

    def streams(self) -> Sequence[Any]:
        return ()

    def mark(self, streams: Sequence[Any] = ()) -> Any:
        """Return the time at which the device comes to the end."""
        self.end_s = max(time.monotonic(), self.end_s) + self._late_s
        return self.end_s

    def wait(self, end: Any) -> None:
        time.sleep(max(0.0, end - time.monotonic()))


# Ways to break the package on purpose, to check that the campaign notices them.
SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    # No rank waits.
    "overlap": (turns, "blockers", lambda *_: []),
    # A turn that is given back wakes no sibling.
    "deafness": (turn_segment.TurnSegment, "ring_others", lambda _: None),
    # No process removes files.
    "leftovers": (turn_segment, "remove_if_unused", lambda *_: None),
    # A turn is given back before the device has finished it.
    "early_ends": (LateDevice, "wait", lambda *_: None),
}


class Rank:
    """One rank of one job.

    The job's ranks meet in the directory of their records. ``order["base_s"]`` is the time at which
    the schedule begins.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        plan = order["plan"]
        self.plan = plan = JobPlan(
            **{**plan, "deeds": tuple(Deed(**deed) for deed in plan["deeds"])}
        )
        self.rank = order["rank"]
        self.size = len(plan.devices)
        self._base_s = order["base_s"]
        self._directory = Path(order["log"]).parent
        self._group = order["group"]
        self._book = Book(Path(order["log"]))
        self._chance = random.Random(f"{plan.number} {self.rank} {self._base_s}")
        self._deeds = [deed for deed in plan.deeds if self.rank in deed.ranks]
        self._due: dict[str, Deed] = {}
        self._order: LateDevice | None = None

    def live(self) -> None:
        """Join, take turns until it is time to leave, and leave."""
        with contextlib.ExitStack() as ending:
            try:
                if self.size > 1:
                    store = f"file://{self._directory}/store{self.plan.number}"
                    dist.init_process_group(
                        "gloo", init_method=store, rank=self.rank, world_size=self.size
                    )
                mutex = ending.enter_context(contextlib.closing(self._join()))
                while self._goes_on():
                    self._do_deeds()
                    self._take_turn(mutex)
            except CrossoverError as error:
                self._book.note("refused", type(error).__name__, str(error))
            except RuntimeError as error:  # another rank of the job has died
                self._book.note("broken", str(error)[:200])
        self._book.note("done")

    def _goes_on(self) -> bool:
        going = torch.tensor(float(self._now_s() < self.plan.leaves_at_s))
        if self.size > 1:
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
        return bool(going)

    def _now_s(self) -> float:
        """Return the seconds since the schedule began."""
        return time.monotonic() - self._base_s

    def _join(self) -> GPUMutex:
        joining.order_on = self._make_order  # type: ignore[assignment]
        gpu_mutex.Patience = partial(NotedPatience, self._book)  # type: ignore[assignment,misc]
        device = f"dev{self.plan.devices[self.rank]}"
        mutex = GPUMutex(self._group, device=device, lease=self.plan.lease_s)
        membership = membership_of(mutex)
        self._book.note("lease", mutex.stats()["lease_s"])
        self._book.note("joined", membership.is_lead, mutex.job)
        self._watch(mutex, membership)
        return mutex

    def _make_order(self, device: torch.device) -> DeviceOrder | None:
        if not self.plan.late_device:
            return order_on(device)
        self._order = LateDevice(self._chance.uniform(0.0, LATE_S))
        return self._order

    def _watch(self, mutex: GPUMutex, membership: Membership) -> None:
        """Record every lease, and when and why the rank leaves, with the inode of its log."""
        segment = membership.segment
        leave, publish = segment.leave, segment.publish

        def leaving() -> None:
            log_fd = segment.log_file.fd
            if log_fd >= 0:
                self._book.note("log", os.fstat(log_fd).st_ino)
            self._book.note("leaving", mutex.disabled_because)
            leave()
            self._book.note("left", mutex.disabled_because)

        def publishing(**values: Any) -> None:
            if "lease_s" in values:  # recorded before siblings can see it
                self._book.note("lease", values["lease_s"])
            publish(**values)

        segment.leave, segment.publish = leaving, publishing  # type: ignore[method-assign]

    def _take_turn(self, mutex: GPUMutex) -> None:
        self._meet_fate(mutex, inside=False)
        self._acquire(mutex)
        self._meet_fate(mutex, inside=True)
        if self.size > 1:
            dist.barrier()  # a collective inside the turn, like DDP's broadcast of buffers
        self._compute()
        self._give_back(mutex)
        pause_s = max(self.plan.pause_s, self._value("slow-link"))
        time.sleep(pause_s / 2)
        if self.plan.style == "early":
            mutex.request()
        time.sleep(pause_s / 2)

    def _acquire(self, mutex: GPUMutex) -> None:
        """Take a turn and record its number: 0 if it began alone on its device, without one."""
        wanted_s = time.monotonic()
        if mutex.disabled_because is None:
            mutex.acquire()
        if mutex.holding:
            inode = 0
            turns = mutex._turns
            # Only lead ranks have a log, and only while turns have not failed.
            with contextlib.suppress(OSError):
                inode = os.fstat(turns.membership.segment.log_file.fd if turns else -1).st_ino
            self._book.note("begin", mutex._counters.turn if mutex.shared else 0, wanted_s, inode)

    def _compute(self) -> None:
        time.sleep(
            max(self.plan.hold_s, self._value("slow-compute"), self._value("too-slow-compute"))
        )
        fork = self._due.pop("fork", None)
        if fork and os.fork() == 0:
            # Like a DataLoader's worker: it lives beside the rank, perhaps longer.
            time.sleep(fork.duration_s)
            os._exit(0)
        self._due.pop("too-slow-compute", None)

    def _give_back(self, mutex: GPUMutex) -> None:
        ended_s = time.monotonic()
        held = mutex.holding
        turn: Any = mutex._turns and mutex._turns._current
        if held:
            self._book.note("ending", at_s=ended_s)
        mutex.release()
        if held and mutex.disabled_because is None:
            # A turn that began alone receives its number later.
            eventually(lambda: turn.number is not None, NUMBERED_S)
            done_s = self._order.end_s if self._order is not None else 0.0
            self._book.note("end", turn.number or 0, done_s, at_s=ended_s)

    def _do_deeds(self) -> None:
        now_s = self._now_s()
        while self._deeds and self._deeds[0].at_s <= now_s:
            deed = replace(self._deeds.pop(0), at_s=now_s)
            if deed.kind == "suspend":  # at a random moment, perhaps in the middle of a wait
                threading.Timer(
                    self._chance.uniform(0.0, 0.02), self._suspend, [deed.value]
                ).start()
            else:
                self._due[deed.kind] = deed

    def _meet_fate(self, mutex: GPUMutex, *, inside: bool) -> None:
        """Die or halt where that was planned, once there is a sibling."""
        fate = self._due.get("die") or self._due.get("halt")
        if fate is None or (fate.place == "inside") != inside or not mutex.shared:
            return
        del self._due[fate.kind]
        if fate.place == "drawn":
            mutex.request()
            eventually(lambda: mutex._turns is None or mutex._turns._requested, NUMBERED_S)
        elif fate.place == "queueing":
            threading.Timer(QUEUEING_S, self._end, [fate]).start()
            while True:  # the rank queues most of the time
                self._acquire(mutex)
                self._give_back(mutex)
        self._end(fate)

    def _end(self, fate: Deed) -> None:
        self._book.note(fate.kind, fate.duration_s)
        if fate.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sh", "-c", f"sleep {fate.duration_s}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def _suspend(self, jump_s: float) -> None:
        """Let the package's clock jump by ``jump_s``, as after a virtual machine's sleep."""
        self._book.note("suspend")
        monotonic, monotonic_ns = turns.time.monotonic, turns.time.monotonic_ns
        turns.time = turn_segment.time = types.SimpleNamespace(  # type: ignore[assignment]
            monotonic=lambda: monotonic() + jump_s,
            monotonic_ns=lambda: monotonic_ns() + round(jump_s * 1e9),
            sleep=time.sleep,
        )

    def _value(self, kind: str) -> float:
        deed = self._due.get(kind)
        return deed.value if deed and self._now_s() < deed.at_s + deed.duration_s else 0.0


def live(order: dict[str, Any]) -> None:
    """Run one rank, in the process that the nursery has forked."""
    sys.setswitchinterval(1e-3)
    if order["sabotage"]:
        owner, name, broken = SABOTAGES[order["sabotage"]]
        assert hasattr(owner, name)
        setattr(owner, name, broken)
    Rank(order).live()
