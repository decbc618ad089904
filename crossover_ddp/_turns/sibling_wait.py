"""How a rank's host waits for the siblings whose turns come first: until they give back, die or outlast their lease.

Our design; who is waited for, and for how long, is decided in `rules`.
"""

import logging
import time

from .joining import Membership
from .rules import Grant, Patience, blockers

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

    def _warn_of_lost_patience(self) -> None:
        for lost in self._patience.lost:
            if lost.at_limit not in self._warned_of:
                self._warned_of.add(lost.at_limit)
                logger.warning("%s; going on beside it (said once)", lost.words(self._membership.device))

    def interrupt(self) -> None:
        """End this wait and all later ones; for other threads."""
        self._interrupted = True
        self._membership.segment.ring_self()
