"""A while with the first job alone: how much memory it takes, so how many like it fit."""

import time
from collections.abc import Iterator, Mapping, Sequence

from crossover_ddp._system.environment import RUN_JOB
from crossover_ddp._system.marked_processes import memory_bytes, processes_with
from crossover_ddp.cli.doctor import machine_facts

from .summary import Room, fitting, format_size

_ASK_DRIVER_S = 2.0  # nvidia-smi takes a while
START_UP_S = 120.0  # a job that has taken no turn by then is looked at as it is


class FirstLook:
    """Look at the first job now and then.

    Args:
        seconds: to look for, from when it takes turns.
        rooms: what was free before it: of each GPU, or of the machine.
        on_gpus: the rooms are GPUs.

    On a GPU its need is what the GPU's free memory fell by, on a machine without GPUs the memory of its processes.
    """

    def __init__(self, seconds: float, rooms: Sequence[Room], *, on_gpus: bool) -> None:
        self._seconds = seconds
        self._rooms = rooms
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
            for room in self._rooms:
                if room.name in free:
                    yield room.name, room.free_bytes - free[room.name]
        else:
            used = sum(memory_bytes(pid) for pid, mark in processes_with(RUN_JOB) if mark in marks)
            yield from ((room.name, used) for room in self._rooms)

    def is_over(self, *, running: bool) -> bool:
        """Tell whether enough was seen, or there is no more to see."""
        now_s = time.monotonic()
        return not running or now_s >= min(self._latest_end_s, self._end_s or self._latest_end_s)

    def fitting(self) -> int | None:
        """Return how many jobs like it fit at once; None where it took no memory that could be seen."""
        return fitting(self._rooms, self.peak_bytes)

    def report(self, at_once: int) -> list[str]:
        """Say for people what was seen."""
        lines = [
            f"memory of the first job: {format_size(used)} of {format_size(room.free_bytes)} on {room.name}"
            for room in self._rooms
            if (used := self.peak_bytes.get(room.name, 0)) > 0
        ]
        count = self.fitting()
        if count is None:
            return [*lines, "memory of the first job: none was seen, so nothing is known about the others"]
        if count < at_once:
            lines.append(
                f"only {max(1, count)} at once instead of {at_once}: as many as fit if all are like it"
            )
        return lines
