"""Watch the first job alone for a while: how much memory it takes, and so how many jobs like it fit."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from crossover_ddp._system.children import marked
from crossover_ddp._system.environment import RUN_JOB
from crossover_ddp.cli.doctor import machine_facts

_ASK_DRIVER_S = 2.0  # nvidia-smi takes a while
START_UP_S = 120.0  # a job that has taken no turn by then is looked at as it is
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


class FreeMemory(NamedTuple):
    """Free memory that jobs share: of one GPU, or of the machine."""

    name: str
    free_bytes: int


def format_size(size_bytes: float) -> str:
    """Return a size for people."""
    unit = next((unit for unit in "TGM" if size_bytes >= 2 ** _UNITS[unit]), "K")
    return f"{size_bytes / 2 ** _UNITS[unit]:.4g} {unit}iB"


def fitting(memories: Sequence[FreeMemory], needs_bytes: Mapping[str, int]) -> int | None:
    """Return how many jobs like the one measured fit at once; None where nothing was measured.

    Args:
        memories: what was free before it.
        needs_bytes: what it needed at most, by the memory's name.
    """
    counts = [
        memory.free_bytes // need for memory in memories if (need := needs_bytes.get(memory.name, 0)) > 0
    ]
    return min(counts) if counts else None


class FirstLook:
    """Measure the memory of the first job repeatedly.

    Args:
        seconds: how long, from the moment when it takes turns.
        memories: what was free before it: of each GPU, or of the machine.
        on_gpus: the memories are GPUs.

    On a GPU its need is what the GPU's free memory fell by, on a machine without GPUs the memory of its processes.
    """

    def __init__(self, seconds: float, memories: Sequence[FreeMemory], *, on_gpus: bool) -> None:
        self._seconds = seconds
        self._free_memories = memories
        self._on_gpus = on_gpus
        self._latest_end_s = time.monotonic() + START_UP_S + seconds
        self._end_s: float | None = None
        self._next_s = 0.0
        self.peak_bytes: dict[str, int] = {}

    def look(self, marks: Mapping[str, str], *, takes_turns: bool) -> None:
        """Look once; ``marks`` are those of the run's processes."""
        if takes_turns and self._end_s is None:
            self._end_s = time.monotonic() + self._seconds
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _ASK_DRIVER_S * self._on_gpus
        for name, used in self._used(marks):
            self.peak_bytes[name] = max(used, self.peak_bytes.get(name, 0))

    def _used(self, marks: Mapping[str, str]) -> Iterator[tuple[str, int]]:
        if self._on_gpus:
            free = machine_facts.gpu_free_bytes()
            for memory in self._free_memories:
                if memory.name in free:
                    yield memory.name, memory.free_bytes - free[memory.name]
        else:
            used = sum(machine_facts.memory_bytes(pid) for pid, mark in marked(RUN_JOB) if mark in marks)
            yield from ((memory.name, used) for memory in self._free_memories)

    def is_over(self, *, running: bool) -> bool:
        """Return whether enough was measured, or the job has ended."""
        now_s = time.monotonic()
        return not running or now_s >= min(self._latest_end_s, self._end_s or self._latest_end_s)

    def fitting(self) -> int | None:
        """Return how many jobs like it fit at once; None if no memory of it was measured."""
        return fitting(self._free_memories, self.peak_bytes)

    def report(self, at_once: int) -> list[str]:
        """Return what was measured, for people."""
        lines = [
            f"memory of the first job: {format_size(used)} of {format_size(memory.free_bytes)} on {memory.name}"
            for memory in self._free_memories
            if (used := self.peak_bytes.get(memory.name, 0)) > 0
        ]
        count = self.fitting()
        if count is None:
            return [
                *lines,
                "memory of the first job: none was measured, so nothing is known about the others",
            ]
        if count < at_once:
            lines.append(
                f"only {max(1, count)} at once instead of {at_once}: so many fit if all jobs take as much"
            )
        return lines
