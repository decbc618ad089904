"""When the buckets of the last steps were ready, by the host's clock."""

import statistics
from collections import deque
from typing import Final, NamedTuple

_STEPS_KEPT: Final = 16


class StepRecord(NamedTuple):
    """One step that backward waited for; seconds since the exchange before it was done.

    ``buckets``: bytes, and when the bucket's hook was called.
    """

    buckets: tuple[tuple[int, float], ...]


class StepRecords:
    """The last steps, which all had the same buckets. Filled on the thread that ends a step."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)

    def add(self, buckets: list[tuple[int, float]], begin_s: float | None) -> None:
        """Note a step of ``buckets`` (bytes, moment of the hook); ``begin_s`` None: unknown, it does not count."""
        if begin_s is None or not buckets:
            return
        record = StepRecord(tuple([(size_bytes, ready_s - begin_s) for size_bytes, ready_s in buckets]))
        if self._steps and sizes_of(self._steps[-1]) != sizes_of(record):
            self._steps.clear()
        self._steps.append(record)

    def last(self) -> list[StepRecord]:
        """Return the recorded steps."""
        return [*self._steps]

    def compute_s(self) -> float | None:
        """Return the median seconds from an exchange's end to the next step's last bucket; None without a record."""
        return statistics.median(each.buckets[-1][1] for each in self._steps) if self._steps else None


def sizes_of(record: StepRecord) -> list[int]:
    """Return the bytes of a step's buckets."""
    return [size_bytes for size_bytes, _ in record.buckets]
