"""An emulated device that runs behind the host's back, for ranks of the fault campaign: it ends each turn later."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossover_ddp._turns.device_order import DeviceOrder


class LateDevice(DeviceOrder):
    """A device that is not CUDA's; time on it is computed, not waited for.

    Args:
        late_s: how long after the host each turn ends.
        now_s: the campaign's clock.
    """

    def __init__(self, late_s: float, now_s: Callable[[], float]) -> None:
        super().__init__(torch.device("cpu"))
        self._late_s, self._now_s = late_s, now_s
        self.ends_s: list[float] = []
        """When it has ended each turn."""

    def check_usable(self) -> None:
        """Allow all."""

    def streams(self) -> Sequence[Any]:
        """Return none."""
        return ()

    def mark(self, streams: Sequence[Any] = ()) -> Any:
        """Return when the device comes to the end."""
        self.ends_s.append(max([self._now_s(), *self.ends_s[-1:]]) + self._late_s)
        return self.ends_s[-1]

    def wait(self, end: Any) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, end - self._now_s()))
