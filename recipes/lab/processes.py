"""Rank processes: started pinned and on their node, watched without polling, ended for sure.

[Note: ranks die with the lab]
Three nets, one below the other. A rank's own process gets ``PR_SET_PDEATHSIG``, so it dies
even with a lab that was killed. Each rank leads a session, so that what it started goes with
it. And every process inherits ``CROSSOVER_LAB``, by which whatever slipped through is found:
by the lab as it closes, by the next lab as it starts, and by ``python recipes/lab clean``.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from crossover_ddp._system.marked_processes import processes_with

from .network import LabId

LAB_VARIABLE: Final = "CROSSOVER_LAB"
_CHILD: Final = Path(__file__).resolve().with_name("child.py")
_GRACE_S: Final = 2.0


def start(
    command: Sequence[str],
    *,
    enter: Sequence[str],
    core: int | None,
    environment: Mapping[str, str],
    **options: Any,
) -> "subprocess.Popen[Any]":
    """Start a command on a node, pinned to a core, as the leader of its own session.

    Args:
        command: its words.
        enter: the words that put it on the node (``Network.enter``); may be empty.
        core: the only core it may run on; None leaves it free.
        environment: its whole environment.
        options: further ones of ``subprocess.Popen``.
    """
    words = [sys.executable, "-I", "-S", str(_CHILD)]
    words += [str(os.getpid()), "-" if core is None else str(core)]
    return subprocess.Popen(
        [*enter, *words, *command], env=dict(environment), start_new_session=True, **options
    )


def wait_any(processes: Iterable["subprocess.Popen[Any]"], timeout_s: float) -> None:
    """Block until one of the processes has ended, or the time is over."""
    poll = select.poll()
    descriptors = []
    try:
        for process in processes:
            if process.poll() is not None:
                return
            descriptors.append(os.pidfd_open(process.pid))
            poll.register(descriptors[-1], select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def end(processes: Iterable["subprocess.Popen[Any]"], *, grace_s: float = _GRACE_S) -> None:
    """End the processes and their sessions: politely first, then for sure."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        # A stopped process hears nothing before it goes on.
        signal_session(process, signal.SIGTERM)
        signal_session(process, signal.SIGCONT)
    deadline_s = time.monotonic() + grace_s
    while any(p.poll() is None for p in running) and time.monotonic() < deadline_s:
        wait_any([p for p in running if p.poll() is None], deadline_s - time.monotonic())
    for process in running:
        signal_session(process, signal.SIGKILL)
        process.wait()


def signal_session(process: "subprocess.Popen[Any]", number: int) -> None:
    """Send a signal to a process started here and to all it has started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def kill_all_of(lab: LabId) -> list[int]:
    """Kill whatever process still carries the lab's mark; return their numbers."""
    killed: list[int] = []
    # Again until none is found: one may fork between the look and the kill.
    for _ in range(10):
        found = [pid for owner, pid in marked_processes() if owner == lab]
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += found
        _await_end(found, timeout_s=5.0)
    return sorted(set(killed))


def _await_end(pids: Iterable[int], *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
            finally:
                os.close(descriptor)


def marked_processes() -> Iterator[tuple[LabId, int]]:
    """Every other process of this user that carries some lab's mark, with the lab."""
    for pid, mark in processes_with(LAB_VARIABLE):
        lab = LabId.parse(mark)
        if lab is not None:
            yield lab, pid
