"""How one rank of a joined job takes turns and gives them back. Our design.

The order of what happens: draw (`DrawQueue`), wait for siblings (`SiblingWait`), begin; and at the end mark the
device's work (`DeviceOrder`), then publish.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crossover_ddp.errors import CrossoverError

from .draw_queue import DrawQueue
from .joining import Membership
from .rules import Grant, Lease, Patience
from .sibling_wait import SiblingWait
from .turn_counters import TurnCounters

if TYPE_CHECKING:
    import torch


class RankTurns:
    """Take the turns of one rank on its device, one after the other.

    Methods raise whatever goes wrong; the caller must leave the siblings then. Not thread-safe, except `interrupt`.

    Args:
        membership: the rank's place in its job and among the siblings.
        lease: how long siblings are asked to wait for the rank's turns.
        patience: how long the rank waits for siblings' turns.
        counters: where turns and times are counted.
        on_failure: called with the error if a turn that was given back cannot be published; on the thread that waits
            for the device where there is one. It must not raise.
    """

    def __init__(
        self,
        membership: Membership,
        lease: Lease,
        patience: Patience,
        counters: TurnCounters,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.membership = membership
        self.holding = False
        """Whether the rank is inside a turn."""
        self.shared = True
        """Whether a sibling was present when the last turn was drawn whose grant was taken; see `settle`."""
        self.idle = False
        """Whether the turn is one in which the job should compute nothing; see `request`."""
        self._lease = lease
        self._patience = patience
        self._counters = counters
        self._on_failure = on_failure
        self._queue = DrawQueue(membership)
        self._sibling_wait = SiblingWait(membership, patience)

    @property
    def has_peers(self) -> bool:
        """Whether the job has other ranks."""
        return self.membership.channel is not None

    @property
    def ordered_by(self) -> str:
        """How turns are ordered on the device: see `device_order`."""
        return self.membership.order.kind

    def count_siblings(self) -> int:
        """Return how many other jobs are on the device."""
        jobs = {slot.job for slot in self.membership.segment.slots().values()}
        return len(jobs - {self.membership.job})

    def interrupt(self) -> None:
        """End the wait that another thread is in, and all later ones."""
        self._sibling_wait.interrupt()
        if self.membership.channel is not None:
            self.membership.channel.interrupt()

    # --- taking --------------------------------------------------------------------------------------------

    def request(self, phase: float | None = None, *, may_idle: bool = False) -> None:
        """Draw the turn of the next `acquire`.

        Args:
            phase: the part of the job's step, from 0 to 1, that is done when that turn ends; siblings see it. None: a
                step has no parts.
            may_idle: the turn is `idle`, on all the job's ranks, where the job is close behind a sibling.
        """
        self._queue.request(phase, may_idle=may_idle)

    def end_step(self) -> None:
        """Tell siblings no phase any more, until the next `request` with one."""
        if self.membership.is_lead:
            self.membership.segment.publish_phase(None)

    def acquire(self, *, ahead: bool) -> None:
        """Begin the job's next turn when it has come; as `GPUMutex.acquire`."""
        if not self.holding or self.has_peers:
            self.membership.order.check_usable()
        if self.has_peers:  # see [Note: one draw for each acquire] in `draw_queue`
            self._give_back(())
        self._queue.claim(inside=self.holding)
        if self.holding:  # siblings wait for this rank: to wait for them would cost a lease
            return
        if ahead and not self.shared:
            self._begin(self._counters.turn)  # the number is not known yet: see `settle`
        else:
            self._start(self._queue.take())

    def _start(self, grant: Grant) -> None:
        since_s = time.monotonic()
        try:
            waited = self._sibling_wait.until_free(grant)
            given_back_ns = self._sibling_wait.until_over(grant)
        except BaseException:  # Ctrl-C: siblings need not wait for a turn that was drawn and never begins
            self._publish(grant.turn)
            raise
        if waited:
            self._counters.hand_over(since_s, given_back_ns)
        self._counters.wait(time.monotonic() - since_s)
        self._patience.started()
        self.shared, self.idle = grant.shared, grant.idle
        self.membership.segment.publish_started(grant.turn)
        self._begin(grant.turn)

    def _begin(self, turn: int) -> None:
        self._counters.begin(turn)
        self.holding = True

    def settle(self) -> None:
        """Take the grant of a turn that was begun ahead of it. The turn has begun, so no sibling is waited for."""
        while self.holding and self._queue.owes_a_grant:
            grant = self._queue.take()
            self._counters.turn, self.shared = grant.turn, grant.shared
            self.membership.segment.publish_started(grant.turn)

    # --- giving back ---------------------------------------------------------------------------------------

    def release(self, streams: "Sequence[torch.cuda.Stream]") -> None:
        """Give the turn back, if the rank is inside one; as `GPUMutex.release`."""
        if self.holding:
            self.membership.order.check_usable()
        self._give_back(streams)

    def _give_back(self, streams: "Sequence[torch.cuda.Stream]") -> None:
        self.settle()
        if not self.holding:
            return
        self.holding = False
        turn = self._counters.turn
        if self._lease.note(self._counters.end()):
            self.membership.segment.publish_lease(self._lease.seconds)
        self.membership.order.finish(turn, functools.partial(self._publish, turn), streams)

    def _publish(self, turn: int) -> None:
        try:
            self.membership.segment.publish_returned(turn)
        except (OSError, CrossoverError) as error:
            self._on_failure(error)
