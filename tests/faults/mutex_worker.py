"""One rank of the mutex's fault campaign: takes turns, does its deeds, and notes what it sees.

Every line of its record is ``[kind, seconds, …]`` on the campaign's clock, which is CLOCK_MONOTONIC of the machine
whatever time namespace the rank is in, and whatever a deed has done to the clocks that the package reads.
"""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
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

NUMBERED_S = 0.2  # within this time a turn that began alone has its number, if grants are not slow
QUEUEING_S = 0.05
_monotonic = time.monotonic


class Book:
    """The rank's record: one write a line, so that a killed rank leaves whole lines."""

    def __init__(self, path: Path, clock_offset_s: float) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._offset_s = clock_offset_s

    def now_s(self) -> float:
        return _monotonic() - self._offset_s

    def note(self, kind: str, *what: Any, at_s: float | None = None) -> None:
        line = [kind, round(self.now_s() if at_s is None else at_s, 6), *what]
        os.write(self._fd, (json.dumps(line) + "\n").encode())


class NotedPatience(Patience):
    """Notes whom the rank has lost patience with, and since when it had waited."""

    def __init__(self, book: Book, limit_s: float) -> None:
        super().__init__(limit_s)
        self._book = book
        self._noted: tuple[object, float] = (None, 0.0)

    def remaining(self, waiting: Any, members: Any, now_s: float) -> float | None:
        before_s = self._book.now_s()
        left_s = super().remaining(waiting, members, now_s)
        if self._noted[0] != self._front:
            self._noted = self._front, before_s
        return left_s

    def _lose(self, lost: Lost, members: Any) -> None:
        front = (lost.job, lost.turn)
        since_s = self._noted[1] if self._noted[0] == front else self._book.now_s()
        self._book.note("forgave", *front, since_s, lost.lease_s)
        super()._lose(lost, members)


class LateDevice(DeviceOrder):
    """An emulated device that ends each turn ``late_s`` after the host; time on it is computed, not waited for."""

    def __init__(self, late_s: float, now_s: Callable[[], float]) -> None:
        super().__init__(torch.device("cpu"))
        self._late_s, self._now_s = late_s, now_s
        self.end_s = 0.0
        """Of its last turn."""

    def check_usable(self) -> None:
        """Allow all."""

    def streams(self) -> Sequence[Any]:
        return ()

    def mark(self, streams: Sequence[Any] = ()) -> Any:
        """Return when the device comes to the end."""
        self.end_s = max(self._now_s(), self.end_s) + self._late_s
        return self.end_s

    def wait(self, end: Any) -> None:
        time.sleep(max(0.0, end - self._now_s()))


# Ways to break the package on purpose, to see that the campaign would notice.
SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    "overlap": (turns, "blockers", lambda *_: []),  # nobody waits for anybody
    "deafness": (turn_segment.TurnSegment, "ring_others", lambda _: None),  # a turn given back wakes nobody
    "leftovers": (turn_segment.TurnSegment, "_remove_if_unused", lambda _: None),  # nobody removes files
    "early_ends": (LateDevice, "wait", lambda *_: None),  # a turn is given back before the device has done it
}


class Rank:
    """One rank of one job.

    Args:
        order: of the overseer: the job's plan and which of its ranks; ``base_s``: when the schedule begins, on the
            campaign's clock (infinite: the file "begins" will tell); ``log``: where it writes; ranks of this schedule
            meet beside it; ``group``: name of the group of siblings.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        plan = order["plan"]
        self.plan = plan = JobPlan(**{**plan, "deeds": tuple(Deed(**deed) for deed in plan["deeds"])})
        self.rank, self.size, self._base_s = order["rank"], len(plan.devices), order["base_s"]
        self._directory, self._group = Path(order["log"]).parent, order["group"]
        self._book = Book(Path(order["log"]), plan.clock_offset_s)
        self._chance = random.Random(f"{plan.number} {self.rank} {self._base_s}")
        self._deeds = [deed for deed in plan.deeds if self.rank in deed.ranks]
        self._due: dict[str, Deed] = {}
        self._order: LateDevice | None = None

    def live(self) -> None:
        """Join, take turns until the time to leave has come, leave."""
        mutex = None
        try:
            if self.size > 1:
                store = f"file://{self._directory}/store{self.plan.number}"
                dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
            mutex = self._join()
            while self._goes_on():
                self._do_deeds()
                self._take_turn(mutex)
        except RuntimeError as error:  # another rank of the job has ended
            self._book.note("broken", str(error)[:200])
        if mutex is not None:
            mutex.close()
        self._book.note("done", mutex.stats() if mutex is not None else None)

    def _goes_on(self) -> bool:
        going = torch.tensor(float(self._now_s() < self.plan.leaves_at_s))
        if self.size > 1:
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
        return bool(going)

    def _now_s(self) -> float:
        """Seconds of the schedule; minus infinity before it begins."""
        if math.isinf(self._base_s):
            with contextlib.suppress(FileNotFoundError):
                self._base_s = float((self._directory / "begins").read_text())
        return self._book.now_s() - self._base_s

    def _join(self) -> GPUMutex | None:
        joining.order_on = self._make_order  # type: ignore[assignment]
        gpu_mutex.Patience = partial(NotedPatience, self._book)  # type: ignore[assignment,misc]
        try:
            device = f"dev{self.plan.devices[self.rank]}"
            mutex = GPUMutex(self._group, device=device, lease=self.plan.lease_s)
        except CrossoverError as error:
            self._book.note("refused", type(error).__name__, str(error))
            return None
        membership = membership_of(mutex)
        self._book.note("lease", mutex.stats()["lease_s"])
        self._book.note("joined", membership.segment.slot, membership.is_lead, mutex.job)
        self._watch(mutex, membership)
        return mutex

    def _make_order(self, device: torch.device) -> DeviceOrder | None:
        if not self.plan.late_device:
            return order_on(device)
        self._order = LateDevice(self._chance.uniform(0.0, LATE_S), self._book.now_s)
        return self._order

    def _watch(self, mutex: GPUMutex, membership: Membership) -> None:
        """Note when turns end for good, with what the order log says then, and every lease; be late with grants."""
        segment, channel = membership.segment, membership.channel
        leave, publish = segment.leave, segment.publish

        def leaving() -> None:
            log_fd = segment.log_file.fd
            if log_fd >= 0:
                self._book.note("log", os.fstat(log_fd).st_ino, os.pread(log_fd, 1 << 20, 0).hex())
            self._book.note("leaving", mutex.disabled_because)
            leave()
            self._book.note("left", mutex.disabled_because)

        def publishing(**values: Any) -> None:
            if "lease_s" in values:  # noted before siblings can see it
                self._book.note("lease", values["lease_s"])
            publish(**values)

        segment.leave, segment.publish = leaving, publishing  # type: ignore[method-assign]
        if channel.size > 1:
            send = channel.send

            def send_late(grant: Any) -> None:
                time.sleep(self._value("slow-grant"))
                send(grant)

            channel.send = send_late

    def _take_turn(self, mutex: GPUMutex | None) -> None:
        if mutex is not None:
            self._meet_fate(mutex, inside=False)
            self._acquire(mutex)
            self._meet_fate(mutex, inside=True)
        if self.size > 1:
            dist.barrier()  # a collective inside the turn, as DDP's broadcast of buffers
        self._compute(mutex)
        if mutex is not None:
            self._give_back(mutex, mutex.release)
        pause_s = max(self.plan.pause_s, self._value("slow-link"))
        time.sleep(pause_s / 2)
        if self.plan.style == "early" and mutex is not None:
            mutex.request()
        time.sleep(pause_s / 2)

    def _acquire(self, mutex: GPUMutex) -> None:
        wanted_s = self._book.now_s()
        if mutex.disabled_because is None:
            mutex.acquire()
            self._note_begin(mutex, wanted_s)

    def _note_begin(self, mutex: GPUMutex, wanted_s: float) -> None:
        """Note the turn; 0 where it has begun alone on its device, without its number."""
        if mutex.holding:
            inode, turns = 0, mutex._turns
            with contextlib.suppress(OSError):  # who does not lead has no log, nor where turns have failed
                inode = os.fstat(turns.membership.segment.log_file.fd if turns else -1).st_ino
            self._book.note("begin", mutex._counters.turn if mutex.shared else 0, wanted_s, inode)

    def _compute(self, mutex: GPUMutex | None) -> None:
        time.sleep(max(self.plan.hold_s, self._value("slow-compute"), self._value("too-slow-compute")))
        if (fork := self._due.pop("fork", None)) and os.fork() == 0:
            time.sleep(fork.duration_s)  # as a DataLoader does: it lives beside the rank, perhaps longer
            os._exit(0)
        if mutex is not None and (evaluate := self._due.pop("evaluate", None)):
            with contextlib.ExitStack() as stack:
                self._give_back(mutex, lambda: stack.enter_context(mutex.paused()))
                time.sleep(evaluate.duration_s)
                wanted_s = self._book.now_s()
            self._note_begin(mutex, wanted_s)
        self._due.pop("too-slow-compute", None)

    def _give_back(self, mutex: GPUMutex, act: Callable[[], object]) -> None:
        ended_s, held, turn = self._book.now_s(), mutex.holding, mutex._turns and mutex._turns._current
        if held:
            self._book.note("ending", at_s=ended_s)
        act()
        if held and mutex.disabled_because is None:
            # A turn that began alone has no number for a while, perhaps not yet.
            eventually(lambda: turn.number is not None, NUMBERED_S)  # type: ignore[union-attr]
            done_s = self._order.end_s if self._order is not None else 0.0
            self._book.note("end", turn.number or 0, done_s, at_s=ended_s)  # type: ignore[union-attr]

    def _do_deeds(self) -> None:
        now_s = self._now_s()
        while self._deeds and self._deeds[0].at_s <= now_s:
            deed = replace(self._deeds.pop(0), at_s=now_s)
            if deed.kind not in ("die", "halt", "suspend"):  # noted when they happen
                self._book.note("deed", deed.kind)
            if deed.kind == "wall-clock":
                time.time = ahead(time.time, deed.value)
            elif deed.kind == "suspend":  # in the middle of a wait, perhaps
                threading.Timer(self._chance.uniform(0.0, 0.02), self._suspend, [deed.value]).start()
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
                self._give_back(mutex, mutex.release)
        self._end(fate)

    def _end(self, fate: Deed) -> None:
        self._book.note(fate.kind, fate.duration_s)
        if fate.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sh", "-c", f"sleep {fate.duration_s}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def _suspend(self, jump_s: float) -> None:
        self._book.note("deed", "suspend")
        jump_monotonic_clock(jump_s)

    def _value(self, kind: str) -> float:
        deed = self._due.get(kind)
        return deed.value if deed and self._now_s() < deed.at_s + deed.duration_s else 0.0


def ahead(clock: Callable[[], float], jump_s: float) -> Callable[[], float]:
    return lambda: clock() + jump_s


def jump_monotonic_clock(jump_s: float) -> None:
    """Let the package see the monotonic clock go on by ``jump_s`` at once, as after a virtual machine's sleep."""
    jumped = types.SimpleNamespace(
        monotonic=ahead(turns.time.monotonic, jump_s),
        monotonic_ns=ahead(turns.time.monotonic_ns, round(jump_s * 1e9)),
        sleep=time.sleep,
    )
    for module in (turns, turn_segment):
        module.time = jumped  # type: ignore[attr-defined]


def live(order: dict[str, Any]) -> None:
    """Be one rank, as the nursery was told."""
    sys.setswitchinterval(1e-3)
    if order["sabotage"]:
        owner, name, broken = SABOTAGES[order["sabotage"]]
        assert hasattr(owner, name)
        setattr(owner, name, broken)
    Rank(order).live()
