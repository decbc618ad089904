"""How a rank's device waits for the siblings' last turns, whose kernels may run on after the host gave the turn back.

Our design; what a device can wait for is in `device_order`.
"""

import logging

from .joining import Membership
from .rules import Grant
from .slots import EVENT_HANDLE_BYTES, Slot

logger = logging.getLogger(__name__)


class DeviceWait:
    """Order the device behind siblings, or have them publish late where it cannot wait for them.

    Args:
        membership: the rank's place among the siblings.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.on_host = membership.order.waits_on_host
        """Whether siblings must publish a turn only after its kernels have finished."""

    def follow(self, grant: Grant) -> int:
        """Let the device wait for every turn that ``grant`` names.

        Returns the ``CLOCK_MONOTONIC`` in nanoseconds at which the last of them was given back, by its owner's clock.
        """
        last_ns = 0
        needed = dict(grant.after)
        for index, slot in self._membership.segment.slots().items():
            if slot.job == self._membership.job or not 0 < needed.get(slot.job, 0) <= slot.returned:
                continue
            last_ns = max(last_ns, slot.returned_at_ns)
            if slot.event_count:
                self._follow_sibling(index, slot)
        return last_ns

    def _follow_sibling(self, index: int, slot: Slot) -> None:
        segment, order = self._membership.segment, self._membership.order
        handles = bytes(slot.events)[: slot.event_count * EVENT_HANDLE_BYTES]
        try:
            problem = order.follow((index, slot.incarnation), handles, slot.returned)
        except RuntimeError:
            if segment.is_alive(index, slot.incarnation):
                raise
            problem = None
        # If it has ended since its slot was read, and its events with it, there is nothing to wait for.
        if problem is not None and segment.is_alive(index, slot.incarnation):
            self._wait_on_host(problem)

    def _wait_on_host(self, problem: str) -> None:
        """Have siblings publish late from their next turn on; see [Note: publishing late] in `gpu_order`."""
        if self.on_host:
            return
        self.on_host = True
        self._membership.segment.publish_waits_on_host()
        logger.warning(
            "%s cannot wait by itself for the end of a sibling's turns: %s; from now on siblings publish a turn only "
            "after its kernels have finished, which costs some of the gain",
            self._membership.device,
            problem,
        )

    def is_awaited_on_host(self) -> bool:
        """Return whether a sibling needs this rank to publish a turn only after its kernels have finished."""
        job = self._membership.job
        return self._membership.order.on_device and any(
            slot.waits_on_host and slot.job != job for slot in self._membership.segment.slots().values()
        )
