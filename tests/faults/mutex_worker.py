"""One rank of the mutex's fault campaign: takes turns, does its deeds, and notes what it sees.

Every line of its record is ``[kind, seconds, …]`` on the machine's clock, whatever the package's has been made to do.
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

NUMBERED_S = 0.2  # within this time a turn that began alone has its number
QUEUEING_S = 0.05


class Book:
    """The rank's record: one write a line, so that a killed rank leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, kind: str, *what: Any, at_s: float | None = None) -> None:
        line = [kind, round(time.monotonic() if at_s is None else at_s, 6), *what]
        os.write(self._fd, (json.dumps(line) + "\n").encode())


class NotedPatience(Patience):
    """Notes whom the rank has lost patience with, and since when it had waited."""

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
    """An emulated device that ends each turn ``late_s`` after the host; time on it is computed, not waited for."""

    def __init__(self, late_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self._late_s = late_s
        self.end_s = 0.0  # of its last turn

    def check_usable(self) -> None:
        """Allow all."""

    def streams(self) -> Sequence[Any]:
        return ()

    def mark(self, streams: Sequence[Any] = ()) -> Any:
        """Return when the device comes to the end."""
        self.end_s = max(time.monotonic(), self.end_s) + self._late_s
        return self.end_s

    def wait(self, end: Any) -> None:
        time.sleep(max(0.0, end - time.monotonic()))


# Ways to break the package on purpose, to see that the campaign would notice.
SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    "overlap": (turns, "blockers", lambda *_: []),  # nobody waits for anybody
    "deafness": (
        turn_segment.TurnSegment,
        "ring_others",
        lambda _: None,
    ),  # a turn given back wakes nobody
    "leftovers": (
        turn_segment,
        "remove_if_unused",
        lambda _: None,
    ),  # nobody removes files
    "early_ends": (
        LateDevice,
        "wait",
        lambda *_: None,
    ),  # a turn is given back before the device has done it
}


class Rank:
    """One rank of one job; its ranks meet beside their logs. ``order["base_s"]`` is when the schedule begins."""

    def __init__(self, order: dict[str, Any]) -> None:
        plan = order["plan"]
        self.plan = plan = JobPlan(
            **{**plan, "deeds": tuple(Deed(**deed) for deed in plan["deeds"])}
        )
        self.rank, self.size, self._base_s = order["rank"], len(plan.devices), order["base_s"]
        self._directory, self._group = Path(order["log"]).parent, order["group"]
        self._book = Book(Path(order["log"]))
        self._chance = random.Random(f"{plan.number} {self.rank} {self._base_s}")
        self._deeds = [deed for deed in plan.deeds if self.rank in deed.ranks]
        self._due: dict[str, Deed] = {}
        self._order: LateDevice | None = None

    def live(self) -> None:
        """Join, take turns until the time to leave has come, leave."""
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
            except RuntimeError as error:  # another rank of the job has ended
                self._book.note("broken", str(error)[:200])
        self._book.note("done")

    def _goes_on(self) -> bool:
        going = torch.tensor(float(self._now_s() < self.plan.leaves_at_s))
        if self.size > 1:
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
        return bool(going)

    def _now_s(self) -> float:
        """Seconds of the schedule."""
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
        """Note when turns end for good, in which order log, and every lease."""
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
            if "lease_s" in values:  # noted before siblings can see it
                self._book.note("lease", values["lease_s"])
            publish(**values)

        segment.leave, segment.publish = leaving, publishing  # type: ignore[method-assign]

    def _take_turn(self, mutex: GPUMutex) -> None:
        self._meet_fate(mutex, inside=False)
        self._acquire(mutex)
        self._meet_fate(mutex, inside=True)
        if self.size > 1:
            dist.barrier()  # a collective inside the turn, as DDP's broadcast of buffers
        self._compute()
        self._give_back(mutex)
        pause_s = max(self.plan.pause_s, self._value("slow-link"))
        time.sleep(pause_s / 2)
        if self.plan.style == "early":
            mutex.request()
        time.sleep(pause_s / 2)

    def _acquire(self, mutex: GPUMutex) -> None:
        """Take a turn and note it; 0 where it has begun alone on its device, without its number."""
        wanted_s = time.monotonic()
        if mutex.disabled_because is None:
            mutex.acquire()
        if mutex.holding:
            inode, turns = 0, mutex._turns
            with contextlib.suppress(
                OSError
            ):  # who does not lead has no log, nor where turns have failed
                inode = os.fstat(turns.membership.segment.log_file.fd if turns else -1).st_ino
            self._book.note("begin", mutex._counters.turn if mutex.shared else 0, wanted_s, inode)

    def _compute(self) -> None:
        time.sleep(
            max(self.plan.hold_s, self._value("slow-compute"), self._value("too-slow-compute"))
        )
        if (fork := self._due.pop("fork", None)) and os.fork() == 0:
            time.sleep(
                fork.duration_s
            )  # as a DataLoader does: it lives beside the rank, perhaps longer
            os._exit(0)
        self._due.pop("too-slow-compute", None)

    def _give_back(self, mutex: GPUMutex) -> None:
        ended_s, held, turn = (
            time.monotonic(),
            mutex.holding,
            mutex._turns and mutex._turns._current,
        )
        if held:
            self._book.note("ending", at_s=ended_s)
        mutex.release()
        if held and mutex.disabled_because is None:
            # A turn that began alone has no number for a while, perhaps not yet.
            eventually(lambda: turn.number is not None, NUMBERED_S)  # type: ignore[union-attr]
            done_s = self._order.end_s if self._order is not None else 0.0
            self._book.note("end", turn.number or 0, done_s, at_s=ended_s)  # type: ignore[union-attr]

    def _do_deeds(self) -> None:
        now_s = self._now_s()
        while self._deeds and self._deeds[0].at_s <= now_s:
            deed = replace(self._deeds.pop(0), at_s=now_s)
            if deed.kind == "suspend":  # in the middle of a wait, perhaps
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
            while True:  # it queues most of the time
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
        """Let the package see the clock go on by ``jump_s`` at once, as after a virtual machine's sleep."""
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
    """Be one rank, as the nursery was told."""
    sys.setswitchinterval(1e-3)
    if order["sabotage"]:
        owner, name, broken = SABOTAGES[order["sabotage"]]
        assert hasattr(owner, name)
        setattr(owner, name, broken)
    Rank(order).live()
