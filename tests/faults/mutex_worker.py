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
from collections.abc import Callable
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
from tests.faults.late_device import LateDevice
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


class Sabotage:
    """Break the package on purpose, to see that the campaign would notice."""

    @staticmethod
    def overlap() -> None:
        """Nobody waits for anybody."""
        turns.blockers = lambda *_: []  # type: ignore[assignment]

    @staticmethod
    def deafness() -> None:
        """A turn given back wakes nobody."""
        turn_segment.TurnSegment.ring_others = lambda self: None  # type: ignore[method-assign]

    @staticmethod
    def leftovers() -> None:
        """The last one to leave removes nothing."""
        turn_segment.TurnSegment._remove_if_unused = lambda self: None  # type: ignore[method-assign]

    @staticmethod
    def early_ends() -> None:
        """A turn is given back before the device has done it."""
        LateDevice.wait = lambda *_: None  # type: ignore[method-assign]


class Rank:
    """One rank of one job.

    Args:
        plan: the job.
        rank: which of its ranks.
        base_s: when the schedule begins, on the campaign's clock; infinite: the file "begins" will tell.
        log: where it writes; ranks of this schedule meet beside it.
        group: name of the group of siblings.
    """

    def __init__(self, plan: JobPlan, rank: int, base_s: float, log: Path, group: str) -> None:
        self.plan = plan
        self.rank = rank
        self.size = len(plan.devices)
        self._base_s = base_s
        self._directory = log.parent
        self._group = group
        self._book = Book(log, plan.clock_offset_s)
        self._chance = random.Random(f"{plan.number} {rank} {base_s}")
        self._deeds = [deed for deed in plan.deeds if rank in deed.ranks]
        self._slow: dict[str, tuple[float, float]] = {}
        self._fork_s = self._evaluate_s = 0.0
        self._fate: Deed | None = None
        self._order: LateDevice | None = None
        self._told_device = 0

    def live(self) -> None:
        """Join, take turns until the time to leave has come, leave."""
        mutex = None
        try:
            if self.size > 1:
                store = f"file://{self._directory}/store{self.plan.number}"
                dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
            mutex = self._join()
            while self._goes_on():
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

    # --- joining and leaving --------------------------------------------------------------------------------

    def _join(self) -> GPUMutex | None:
        joining.order_on = self._make_order  # type: ignore[assignment]
        gpu_mutex.Patience = partial(NotedPatience, self._book)  # type: ignore[assignment,misc]
        self._book.note("joins")
        try:
            device = f"dev{self.plan.devices[self.rank]}"
            mutex = GPUMutex(self._group, device=device, lease=self.plan.lease_s)
        except CrossoverError as error:
            self._book.note("refused", type(error).__name__, str(error))
            return None
        membership = membership_of(mutex)
        self._book.note("lease", mutex.stats()["lease_s"])
        self._book.note("joined", membership.segment.slot, membership.is_lead, mutex.job)
        self._watch(mutex)
        return mutex

    def _make_order(self, device: torch.device) -> DeviceOrder | None:
        late_s = self._chance.uniform(0.0, LATE_S)
        if self.plan.late_device:
            self._order = LateDevice(late_s, self._book.now_s)
            return self._order
        return order_on(device)

    def _watch(self, mutex: GPUMutex) -> None:
        """Note when turns end for good, and every lease."""
        membership = membership_of(mutex)
        leave, publish = membership.segment.leave, membership.segment.publish
        channel = membership.channel

        def leaving() -> None:
            self._note_log(membership)
            self._book.note("leaving", mutex.disabled_because)
            leave()
            self._book.note("left", mutex.disabled_because)

        def publishing(**values: Any) -> None:
            if "lease_s" in values:  # noted before siblings can see it
                self._book.note("lease", values["lease_s"])
            publish(**values)

        membership.segment.leave = leaving  # type: ignore[method-assign]
        membership.segment.publish = publishing  # type: ignore[method-assign]
        if channel.size == 1:
            return
        send = channel.send

        def send_late(grant: Any) -> None:
            time.sleep(self._value("slow-grant"))
            send(grant)

        channel.send = send_late

    def _note_log(self, membership: Membership) -> None:
        """Keep what the order log says, as far as this rank has it open."""
        log_fd = membership.segment.log_file.fd
        if log_fd >= 0:
            inode = os.fstat(log_fd).st_ino
            self._book.note("log", inode, os.pread(log_fd, 1 << 20, 0).hex())

    # --- turns ----------------------------------------------------------------------------------------------

    def _take_turn(self, mutex: GPUMutex | None) -> None:
        self._do_deeds()
        if mutex is not None:
            self._meet_fate(mutex, inside=False)
            self._acquire(mutex)
            self._meet_fate(mutex, inside=True)
        if self.size > 1:
            dist.barrier()  # a collective inside the turn, as DDP's broadcast of buffers
        self._compute(mutex)
        if mutex is not None:
            self._give_back(mutex, mutex.release)
        self._exchange(mutex)

    def _acquire(self, mutex: GPUMutex) -> None:
        wanted_s = self._book.now_s()
        if mutex.disabled_because is not None:
            return
        mutex.acquire()
        self._note_begin(mutex, wanted_s)

    def _note_begin(self, mutex: GPUMutex, wanted_s: float) -> None:
        """Note the turn; 0 where it has begun alone on its device, without its number."""
        if mutex.holding:
            inode = 0
            with contextlib.suppress(OSError):  # the turn thread closes it where turns have failed
                inode = os.fstat(_log_fd(mutex)).st_ino
            self._book.note("begin", mutex._counters.turn if mutex.shared else 0, wanted_s, inode)

    def _compute(self, mutex: GPUMutex | None) -> None:
        time.sleep(max(self.plan.hold_s, self._value("slow-compute"), self._value("too-slow-compute")))
        if self._fork_s and os.fork() == 0:  # as a DataLoader does: it lives beside the rank, perhaps longer
            time.sleep(self._fork_s)
            os._exit(0)
        self._fork_s = 0.0
        if self._evaluate_s and mutex is not None:
            self._evaluate(mutex, self._evaluate_s)
            self._evaluate_s = 0.0
        self._slow.pop("too-slow-compute", None)

    def _evaluate(self, mutex: GPUMutex, lasts_s: float) -> None:
        with contextlib.ExitStack() as stack:
            self._give_back(mutex, lambda: stack.enter_context(mutex.paused()))
            time.sleep(lasts_s)
            wanted_s = self._book.now_s()
        self._note_begin(mutex, wanted_s)

    def _give_back(self, mutex: GPUMutex, act: Callable[[], object]) -> None:
        ended_s, held, turn = self._book.now_s(), mutex.holding, mutex._turns and mutex._turns._current
        if held:
            self._book.note("ending", at_s=ended_s)
        act()
        if held and mutex.disabled_because is None:
            self._book.note("end", self._number(turn), at_s=ended_s)
            self._note_device(turn)

    @staticmethod
    def _number(turn: Any) -> int:
        """Return the number of a turn that was given back; 0 where it began alone and has none yet."""
        eventually(lambda: turn.number is not None, NUMBERED_S)
        return turn.number or 0

    def _note_device(self, turn: Any) -> None:
        if self._order is not None:
            for end_s in self._order.ends_s[self._told_device :]:
                self._book.note("device", self._number(turn), end_s)
            self._told_device = len(self._order.ends_s)

    def _exchange(self, mutex: GPUMutex | None) -> None:
        pause_s = max(self.plan.pause_s, self._value("slow-link"))
        time.sleep(pause_s / 2)
        if self.plan.style == "early" and mutex is not None:
            mutex.request()
        time.sleep(pause_s / 2)

    # --- deeds ----------------------------------------------------------------------------------------------

    def _do_deeds(self) -> None:
        now_s = self._now_s()
        while self._deeds and self._deeds[0].at_s <= now_s:
            deed = self._deeds.pop(0)
            if deed.kind not in ("suspend", "die", "halt"):  # noted when they happen
                self._book.note("deed", deed.kind)
            self._do(deed)

    def _do(self, deed: Deed) -> None:
        if deed.kind == "wall-clock":
            jump_wall_clock(deed.value)
        elif deed.kind == "suspend":
            threading.Timer(self._chance.uniform(0.0, 0.02), self._suspend, [deed.value]).start()
        elif deed.kind in ("die", "halt"):
            self._fate = deed
        elif deed.kind == "fork":
            self._fork_s = deed.duration_s
        elif deed.kind == "evaluate":
            self._evaluate_s = deed.duration_s
        else:
            self._slow[deed.kind] = self._book.now_s() + deed.duration_s, deed.value

    def _meet_fate(self, mutex: GPUMutex, *, inside: bool) -> None:
        """Die or halt where that was planned, once there is a sibling."""
        fate = self._fate
        if fate is None or (fate.place == "inside") != inside or not mutex.shared:
            return
        self._fate = None
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
        """From another thread, so that it may happen in the middle of a wait."""
        self._book.note("deed", "suspend")
        jump_monotonic_clock(jump_s)

    def _value(self, kind: str) -> float:
        until_s, value = self._slow.get(kind, (0.0, 0.0))
        return value if self._book.now_s() < until_s else 0.0


def _log_fd(mutex: GPUMutex) -> int:
    """Return the log that a lead rank has open; -1 on other ranks, and after leaving."""
    return mutex._turns.membership.segment.log_file.fd if mutex._turns is not None else -1


def jump_wall_clock(jump_s: float) -> None:
    """Let everything in this process see another date."""
    real = time.time
    time.time = lambda: real() + jump_s


def jump_monotonic_clock(jump_s: float) -> None:
    """Let the package see the monotonic clock go on by ``jump_s`` at once, as after a virtual machine's sleep."""
    clock = turns.time
    jumped = types.SimpleNamespace(
        monotonic=lambda: clock.monotonic() + jump_s,
        monotonic_ns=lambda: clock.monotonic_ns() + round(jump_s * 1e9),
        sleep=time.sleep,
    )
    for module in (turns, turn_segment):
        module.time = jumped  # type: ignore[attr-defined]


def live(order: dict[str, Any]) -> None:
    """Be one rank, as the nursery was told."""
    plan = order["plan"]
    plan = JobPlan(**{**plan, "deeds": tuple(Deed(**deed) for deed in plan["deeds"])})
    sys.setswitchinterval(1e-3)
    if order["sabotage"]:
        getattr(Sabotage, order["sabotage"])()
    Rank(plan, order["rank"], order["base_s"], Path(order["log"]), order["group"]).live()
