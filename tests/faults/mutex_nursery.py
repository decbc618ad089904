"""One lane of the mutex's campaign: forks ranks, strikes them, and meddles with their files.

Told over stdin, one JSON object a line; answers each with one. Where the machine allows it the lane is a container of
its own: process ids, /dev/shm and clocks are nobody else's. Torch is loaded once, so that a rank costs
milliseconds.
"""

import contextlib
import ctypes
import itertools
import json
import os
import random
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.errors import SegmentError
from tests.faults import mutex_worker
from tests.faults.forked import work_and_exit

_CLONE_NEWTIME = 0x80
_BULK = Path(SHARED_MEMORY) / "bulk"
_REAPED_S = 5.0

Key = tuple[int, int]


def _in_other_time(offset_s: float, fork: Callable[[], int]) -> int:
    """Fork a child whose CLOCK_MONOTONIC is ``offset_s`` later than ours."""
    if not offset_s:
        return fork()
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/time", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWTIME):
            raise OSError(ctypes.get_errno(), "unshare of the clock")
        Path("/proc/self/timens_offsets").write_text(f"monotonic {int(offset_s)} 0\n")
        pid = fork()
        if pid and libc.setns(own, _CLONE_NEWTIME):
            raise OSError(ctypes.get_errno(), "setns to the own clock")
        return pid
    finally:
        os.close(own)


class Nursery:
    """What the campaign's overseer may ask for; every public method is one order."""

    def __init__(self) -> None:
        self._born: dict[Key, tuple[int, int]] = {}
        """Process id and descriptor; only the latter means the same process for ever."""

    def born(self, key: list[int], order: dict[str, Any]) -> int:
        job, rank = key
        pid = _in_other_time(order["plan"]["clock_offset_s"], os.fork)
        if pid == 0:
            self._be(order)
        self._born[job, rank] = pid, os.pidfd_open(pid)
        return pid

    @staticmethod
    def _be(order: dict[str, Any]) -> None:
        name = f"job{order['plan']['number']}-rank{order['rank']}.err"
        work_and_exit(Path(order["directory"]) / name, lambda: mutex_worker.live(order))

    def strike(self, keys: list[list[int]], number: int) -> None:
        for job, rank in keys:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._born[job, rank][1], number)

    def alive(self) -> list[Key]:
        return [key for key, (_, descriptor) in self._born.items() if not _has_ended(descriptor)]

    def reborn(self, victim: list[int], key: list[int], order: dict[str, Any]) -> list[int]:
        """Kill one rank and give its process id to another; return both ids, which differ where that failed."""
        self.strike([victim], signal.SIGKILL)
        old, descriptor = self._born[victim[0], victim[1]]
        _has_ended(descriptor, _REAPED_S)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(old - 1))
        return [old, self.born(key, order)]

    def forget(self) -> None:
        for _, descriptor in self._born.values():
            os.close(descriptor)
        self._born.clear()

    # --- files ----------------------------------------------------------------------------------------------

    def left(self, group: str) -> list[str]:
        """Return what is in shared memory of groups whose name begins so."""
        return sorted(str(path) for path in Path(SHARED_MEMORY).glob(f"crossover_ddp-*/{group}*"))

    def holders(self, paths: list[str]) -> list[str]:
        """Return who has any of these files open: process, state, parent."""
        found = []
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).removesuffix(" (deleted)") in paths:
                    stat = (descriptor.parents[1] / "stat").read_text().rpartition(")")[2].split()
                    found.append(f"{descriptor} {stat[0]} child of {stat[1]} -> {os.readlink(descriptor)}")
        return found

    def come_and_go(self, groups: list[str], devices: list[str]) -> list[str]:
        """Do what the next job of each group would; return why it was refused, where it was."""
        refusals = []
        for group, device in itertools.product(groups, devices):
            try:
                TurnSegment(group, device).leave()
            except SegmentError as error:
                refusals.append(str(error))
        return refusals

    def sweep(self, group: str) -> None:
        for path in self.left(group):
            Path(path).unlink(missing_ok=True)

    def full(self) -> int:
        """Leave no byte of shared memory free; return how many were taken."""
        taken = 0
        with _BULK.open("wb", buffering=0) as bulk, contextlib.suppress(OSError):
            while True:
                taken += bulk.write(b"\0" * 4096)
        return taken

    def free(self) -> None:
        _BULK.unlink(missing_ok=True)

    def meddle(self, kind: str, group: str, device: str, seed: int) -> bool:
        """Delete or cut files of one segment; tell whether there were any."""
        stem = Path(SHARED_MEMORY) / f"crossover_ddp-{os.geteuid()}" / f"{group}@"
        chance = random.Random(seed)
        how, what = kind.split("-")
        suffixes = {"slots": [".turns"], "log": [".log"], "bells": [".*.bell"]}
        found_in = suffixes.get(what, [".turns", ".log", ".*.bell"])
        found = [path for suffix in found_in for path in stem.parent.glob(stem.name + suffix)]
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                _hit(path, how, chance)
        return bool(found)


def _hit(path: Path, how: str, chance: random.Random) -> None:
    size = path.stat().st_size
    if how == "delete":
        path.unlink()
    else:
        os.truncate(path, chance.randrange(size) if size else 0)


def _has_ended(descriptor: int, timeout_s: float = 0.0) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    torch.set_num_threads(1)
    nursery = Nursery()
    print(json.dumps(shutil.disk_usage(SHARED_MEMORY).total), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(nursery, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
