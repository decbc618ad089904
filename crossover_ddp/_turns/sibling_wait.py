"""How a rank waits for the siblings whose turns come first: until they give back, die or outlast their lease.

Our design; who is waited for, and for how long, is decided in `rules`.
"""

import logging
import time

from .joining import Membership
from .rules import DEFAULT_LEASE_S, Grant, Patience, blockers
from .slots import EVENT_HANDLE_BYTES, Slot

logger = logging.getLogger(__name__)


class SiblingWait:
    """Wait on one device, with one warning for each way in which patience ends.

    Args:
        membership: the rank's place among the siblings.
        patience: how long it waits for them.
    """

    def __init__(self, membership: Membership, patience: Patience) -> None:
        self._membership = membership
        self._patience = patience
        self._warned_of: set[bool] = set()
        self._warned_of_events = False
        self._interrupted = False

    def until_free(self, grant: Grant) -> bool:
        """Block until no sibling's turn comes before ``grant`` on this device; return whether that took any waiting."""
        segment, waited = self._membership.segment, False
        while not self._interrupted:
            members = segment.members()
            waiting = blockers(grant, self._membership.job, members)
            left_s = self._patience.remaining(waiting, members, time.monotonic())
            self._warn_of_lost_patience()
            if left_s is None:
                break
            waited = True
            segment.wait([blocker.member for blocker in waiting], left_s)
        return waited

    def until_over(self, grant: Grant) -> int:
        """Block until the device has done the turns that ``grant`` names, as long as their owners live and lease.

        Returns the ``CLOCK_MONOTONIC`` in nanoseconds at which the last of them was given back, by its owner's clock.
        """
        last_ns, needed = 0, dict(grant.after)
        for index, slot in self._membership.segment.slots().items():
            if slot.job != self._membership.job and 0 < needed.get(slot.job, 0) <= slot.returned:
                last_ns = max(last_ns, slot.returned_at_ns)
                if slot.event_count:
                    self._until_event(index, slot)
        return last_ns

    def _until_event(self, index: int, slot: Slot) -> None:
        segment, order, process = self._membership.segment, self._membership.order, (index, slot.incarnation)
        handles = bytes(slot.events)[: slot.event_count * EVENT_HANDLE_BYTES]
        try:
            over = order.follow(process, handles, slot.returned, segment.ring_self)
        except RuntimeError as error:
            if segment.is_alive(*process) and not self._warned_of_events:
                self._warned_of_events = True
                logger.warning(
                    "cannot wait for the end of a sibling's turns on %s, its events cannot be opened (%s): kernels of "
                    "both may overlap; unset CROSSOVER_DEVICE_ORDER in both jobs",
                    self._membership.device,
                    error,
                )
            return
        ends_s = time.monotonic() + min(slot.lease() or DEFAULT_LEASE_S, self._patience.limit_s)
        while not over.is_set() and segment.is_alive(*process) and (left_s := ends_s - time.monotonic()) > 0:
            segment.bells.wait([process], left_s)
        if not over.is_set():
            order.leave_behind()

    def _warn_of_lost_patience(self) -> None:
        for lost in self._patience.lost:
            if lost.at_limit not in self._warned_of:
                self._warned_of.add(lost.at_limit)
                logger.warning("%s; going on beside it (said once)", lost.words(self._membership.device))

    def interrupt(self) -> None:
        """End this wait and all later ones; for other threads."""
        self._interrupted = True
        self._membership.segment.ring_self()
