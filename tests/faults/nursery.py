"""A process that forks ranks for a lane of a campaign, sends them signals, and damages their files.

It reads one JSON object a line from stdin, and answers each with one. It is forked from a process
that has imported torch, so a rank costs milliseconds. Its second argument names a *container* that
it enters first: "memory" has its own process ids, mounts and a small /dev/shm; "users" has its own
users, process ids and mounts, and believes that it is root.
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
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_MEMORY = b"size=2m,mode=1777"
_BULK = Path(SHARED_MEMORY) / "bulk"
_REAPED_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


def _enter(container: str) -> None:
    """Continue in a container, as a child of this process, which waits for it and then ends."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | (_CLONE_NEWUSER if container == "users" else 0))
    if container == "users":
        for name, words in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(words)
    if child := os.fork():  # the container's first process: the kernel ends all others with it
        os.waitpid(child, 0)
        os._exit(0)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    if container == "memory":
        _call("mount", b"campaign", SHARED_MEMORY.encode(), b"tmpfs", 0, _MEMORY)


class Nursery:
    """The orders of an overseer: every public method is one. A rank is named by its log."""

    def __init__(self, live: Callable[[dict[str, Any]], object]) -> None:
        self._live = live
        # Process id and descriptor of each rank. Only the descriptor always means the same process.
        self._born: dict[str, tuple[int, int]] = {}

    def born(self, order: dict[str, Any], after: str | None) -> int:
        """Fork a rank.

        Args:
            order: passed to the rank.
            after: a rank to kill first. The new one gets its process id, unless another process on
                the machine is faster.
        """
        if after is not None:
            self.strike(after, signal.SIGKILL)
            old, descriptor = self._born[after]
            _has_ended(descriptor, _REAPED_S)
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(old - 1))
        if (pid := os.fork()) == 0:
            self._be(order)
        self._born[order["log"]] = pid, os.pidfd_open(pid)
        return pid

    def _be(self, order: dict[str, Any]) -> NoReturn:
        """Run a rank in its own process group, with standard error in a file; end the process."""
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

    def end(self, prefix: str, groups: list[str], devices: list[str]) -> tuple[list[str], ...]:
        """Forget all ranks.

        Return the files left in shared memory, those left after each group's next job, and the
        errors that this job raised.
        """
        for _, descriptor in self._born.values():
            os.close(descriptor)
        self._born.clear()
        left = sorted(map(str, files_of(prefix)))
        refusals = []
        for group, device in itertools.product(groups, devices):
            try:
                TurnSegment(group, device).leave()
            except SegmentError as error:
                refusals.append(str(error))
        left_by_next = sorted(map(str, files_of(prefix)))
        for path in left_by_next:
            Path(path).unlink(missing_ok=True)
        return left, left_by_next, refusals

    def meddle(self, kind: str, group: str, seed: int) -> None:
        """Delete or cut files of a group, or fill shared memory to the last byte."""
        if kind == "full":
            with _BULK.open("wb", buffering=0) as bulk, contextlib.suppress(OSError):
                while True:
                    bulk.write(b"\0" * 4096)
        elif kind == "free":
            _BULK.unlink(missing_ok=True)
        how, _, what = kind.partition("-")
        suffixes = {"slots": [".turns"], "log": [".log"], "bells": [".*.bell"]}
        own = Path(SHARED_MEMORY) / f"crossover_ddp-{os.geteuid()}"
        for suffix in suffixes.get(what, [".turns", ".log", ".*.bell"]):
            for path in own.glob(f"{group}@{suffix}"):
                with contextlib.suppress(FileNotFoundError):
                    if how == "delete":
                        path.unlink()
                    elif how == "truncate":
                        os.truncate(
                            path, random.Random(seed).randrange(max(1, path.stat().st_size))
                        )


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
