"""What one rank has seen of its turns: their number, and how long it held, waited and took over. Our design."""

import statistics
import time
from collections import deque
from typing import Any

_LATENCIES_KEPT = 10_000


class TurnCounters:
    """Count turns and time; other threads may ask for `summary` meanwhile."""

    def __init__(self) -> None:
        self.turn = 0
        """The number of the last turn begun, as far as it is known; 0 before the first."""
        self._count = 0
        self._began_s = 0.0
        self._held_s = 0.0
        self._waited_s = 0.0
        self._handovers_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    def begin(self, turn: int) -> None:
        """Count a turn that begins now."""
        self.turn = turn
        self._count += 1
        self._began_s = time.monotonic()

    def end(self) -> float:
        """Count the time of the turn that ends now, and return it in seconds."""
        held_s = time.monotonic() - self._began_s
        self._held_s += held_s
        return held_s

    def wait(self, seconds: float) -> None:
        """Count the time before a turn."""
        self._waited_s += seconds

    def hand_over(self, since_s: float, given_back_ns: int) -> None:
        """Count a turn for which this rank has waited ``since_s``, and which a sibling gave back at that moment."""
        now_ns = time.monotonic_ns()
        # A sibling's clock may be another one: containers have time namespaces.
        if since_s * 1e9 < given_back_ns <= now_ns:
            self._handovers_s.append((now_ns - given_back_ns) / 1e9)

    def summary(self) -> dict[str, Any]:
        """Return the figures, as in `GPUMutex.stats`."""
        latencies = sorted(list(self._handovers_s))
        return {
            "turn": self.turn,
            "turns": self._count,
            "held_s": self._held_s,
            "waited_s": self._waited_s,
            "handovers": len(latencies),
            "handover_median_s": statistics.median(latencies) if latencies else None,
            "handover_p99_s": latencies[int(0.99 * (len(latencies) - 1))] if latencies else None,
        }
