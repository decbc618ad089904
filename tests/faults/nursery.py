"""Forks ranks for a lane of a campaign, strikes them, and meddles with their files.

Told over stdin, one JSON object a line; answers each with one. It is forked from a process that has torch, and forks
ranks, so that one costs milliseconds. Its second argument names a *container* that it enters first: "memory" has
process ids, mounts and a small /dev/shm of its own, "users" has users in place of /dev/shm, and thinks that it is root.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import itertools
import json
import os
import random
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.errors import SegmentError
from tests.harness.groups import files_of

_PR_SET_PDEATHSIG = 1
_MS_REC_PRIVATE = 0x4000 | 0x40000
_CLONE_NEWTIME, _CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x80, 0x20000, 0x10000000, 0x20000000
_MEMORY = b"size=2m,mode=1777"
_BULK = Path(SHARED_MEMORY) / "bulk"
_REAPED_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def _enter(container: str) -> None:
    """Go on in a container, as a child of this process, which waits and ends with it."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | (_CLONE_NEWUSER if container == "users" else 0))
    if container == "users":
        for name, words in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(words)
    if child := os.fork():  # the first one in there: when it ends, the kernel ends all others
        os.waitpid(child, 0)
        os._exit(0)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    if container == "memory":
        _call("mount", b"campaign", SHARED_MEMORY.encode(), b"tmpfs", 0, _MEMORY)


def _in_other_time(offset_s: float, fork: Callable[[], int]) -> int:
    """Fork a child whose CLOCK_MONOTONIC is ``offset_s`` later than ours."""
    if not offset_s:
        return fork()
    own = os.open("/proc/self/ns/time", os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWTIME)
        Path("/proc/self/timens_offsets").write_text(f"monotonic {int(offset_s)} 0\n")
        pid = fork()
        if pid:
            _call("setns", own, _CLONE_NEWTIME)
        return pid
    finally:
        os.close(own)


class Nursery:
    """What an overseer may ask for; every public method is one order. Ranks are known by their logs."""

    def __init__(self, live: Callable[[dict[str, Any]], object]) -> None:
        self._live = live
        self._born: dict[str, tuple[int, int]] = {}
        """Process id and descriptor; only the latter means the same process for ever."""

    def born(self, order: dict[str, Any], after: str | None) -> int:
        """Fork a rank; instead of that one, whose process id it gets unless somebody else is faster."""
        if after is not None:
            self.strike(after, signal.SIGKILL)
            old, descriptor = self._born[after]
            _has_ended(descriptor, _REAPED_S)
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(old - 1))
        pid = _in_other_time(order.get("clock_offset_s", 0.0), os.fork)
        if pid == 0:
            self._be(order)
        self._born[order["log"]] = pid, os.pidfd_open(pid)
        return pid

    def _be(self, order: dict[str, Any]) -> NoReturn:
        """Be a rank in a process group of its own, with standard error in a file, and end the process."""
        status = 1
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(order["log"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            faulthandler.register(signal.SIGUSR1)
            os.environ.update(order.get("environment", {}))
            self._live(order)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def strike(self, log: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._born[log][1], number)

    def alive(self) -> list[str]:
        return [log for log, (_, descriptor) in self._born.items() if not _has_ended(descriptor)]

    def forget(self) -> None:
        for _, descriptor in self._born.values():
            os.close(descriptor)
        self._born.clear()

    def left(self, group: str) -> list[str]:
        """Return what is in shared memory of groups whose name begins so."""
        return sorted(map(str, files_of(group)))

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

    def meddle(self, kind: str, group: str, seed: int) -> bool:
        """Delete or cut files of a group; tell whether there were any."""
        own = Path(SHARED_MEMORY) / f"crossover_ddp-{os.geteuid()}"
        how, what = kind.split("-")
        suffixes = {"slots": [".turns"], "log": [".log"], "bells": [".*.bell"]}
        found_in = suffixes.get(what, [".turns", ".log", ".*.bell"])
        found = [path for suffix in found_in for path in own.glob(f"{group}@{suffix}")]
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                if how == "delete":
                    path.unlink()
                else:
                    os.truncate(path, random.Random(seed).randrange(size) if size else 0)
        return bool(found)


def _has_ended(descriptor: int, timeout_s: float = 0.0) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))


def main(worker: str, container: str) -> None:
    if container:
        _enter(container)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    torch.set_num_threads(1)
    nursery = Nursery(importlib.import_module(worker).live)
    print(json.dumps("up"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(nursery, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
