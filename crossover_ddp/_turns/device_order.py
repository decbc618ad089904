"""Order of turns on the device itself: what the next holder's kernels wait for.

On a GPU the host runs ahead of the device, so a turn given back on the host still has kernels in the queue.
``CROSSOVER_DEVICE_ORDER`` says what the next holder waits for. Our design.

- ``host``, the default, and the way taken where another one does not work: a thread of the holder waits for the
  device, then publishes the turn. The next holder's host waits for that, or for the holder's death.
- ``semaphores``: the holder's stream writes a 64-bit word in host memory that siblings share, and the next holder's
  stream waits for it; a host releases the words of the dead. See `semaphore_order`.
- ``events``: the holder records an inter-process CUDA event, and the next holder's stream waits for it. See
  `event_order`.

[Note: why the host waits]
With ``events`` a stream of one process waits for a record of another one. If that process dies first (out of memory, a
SIGTERM, a SIGKILL), its record may never come, and nobody can take the wait back: an innocent job stands still for
ever. So no such wait is enqueued unless the user asks for it. The price of ``host`` is the time in which a thread
notices the end, some tens of microseconds once per turn.

Siblings may use different ways: see [Note: publishing late] in `gpu_order`.
"""

import logging
import os
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from crossover_ddp._system import environment

from .event_order import EventOrder
from .gpu_order import GpuOrder, Key, SiblingFiles, Streams
from .semaphore_order import SemaphoreOrder

logger = logging.getLogger(__name__)


class DeviceOrder(Protocol):
    """How the next holder's device learns that a turn has ended."""

    kind: ClassVar[str]
    """How turns are ordered, for people to read."""
    on_device: ClassVar[bool]
    """Whether a turn given back on the host may still be under way on the device."""
    waits_on_host: ClassVar[bool]
    """Whether siblings must publish a turn only after its kernels have finished; published in this process's slot."""
    handles: bytes
    """What siblings need in order to wait for this process; published in its slot."""

    def check_usable(self) -> None:
        """Raise ``UnsupportedConfigurationError`` while a turn can neither begin nor end."""

    def finish(
        self, turn: int, publish: Callable[[], None], *, on_host: bool = False, streams: Streams = ()
    ) -> None:
        """Mark the end of ``turn`` behind what the current stream, and ``streams``, have queued, then ``publish`` it.

        ``on_host``: a sibling cannot wait for the mark. ``publish`` must not raise.
        """

    def admit(self, streams: Streams) -> None:
        """Let ``streams`` begin after what the current stream waits for."""

    def follow(self, key: Key, handles: bytes, turn: int) -> str | None:
        """Let the current stream wait for the end of a sibling's ``turn``; return why it cannot, once for a sibling."""

    def close(self) -> None:
        """Free what the device holds, once nothing waits for it. May be called again."""


class HostOrder:
    """CPU devices: a turn given back on the host is over on the device too."""

    kind: ClassVar[str] = "host"
    on_device: ClassVar[bool] = False
    waits_on_host: ClassVar[bool] = False
    handles: bytes = b""

    def check_usable(self) -> None:
        """Do nothing: a turn can always begin and end."""

    def finish(
        self, turn: int, publish: Callable[[], None], *, on_host: bool = False, streams: Streams = ()
    ) -> None:
        """Publish at once."""
        publish()

    def admit(self, streams: Streams) -> None:
        """Do nothing: a CPU has no streams."""

    def follow(self, key: Key, handles: bytes, turn: int) -> str | None:
        """Do nothing: a published turn is over."""
        return None

    def close(self) -> None:
        """Do nothing: nothing is held."""


class SynchronizedOrder(GpuOrder):
    """The host's way: a thread waits for the device, then publishes the turn; see [Note: why the host waits]."""

    kind: ClassVar[str] = "host"
    waits_on_host: ClassVar[bool] = True


def device_order(device: torch.device, event_count: int, siblings: SiblingFiles) -> DeviceOrder:
    """Return the order for ``device``; warn if it is not the one that the user wanted.

    On failure: ``ValueError`` if ``CROSSOVER_DEVICE_ORDER`` names none.
    """
    wanted = os.environ.get(environment.DEVICE_ORDER) or environment.DEVICE_ORDERS[0]
    if wanted not in environment.DEVICE_ORDERS:
        raise ValueError(
            f"expected {environment.DEVICE_ORDER} to be one of {', '.join(environment.DEVICE_ORDERS)}, "
            f"got {wanted!r}; unset it"
        )
    if device.type != "cuda":
        return HostOrder()
    try:
        if wanted == "events":
            return EventOrder(device, event_count, siblings)
        if wanted == "semaphores":
            return SemaphoreOrder(device, siblings)
    except (RuntimeError, OSError) as error:
        logger.warning(
            "CUDA IPC %s do not work on %s (%s): turns are ordered on the host, which costs some of the gain",
            wanted,
            device,
            error,
        )
    return SynchronizedOrder(device)
