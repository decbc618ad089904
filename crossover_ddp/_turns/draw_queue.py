"""The job's turns on their way to one rank: drawn, but not yet begun there. Our design.

[Note: one draw for each acquire]
The lead rank draws turns, and the job's other ranks take their numbers in the same order. Where a process trains two
models, one's exchange may end before or after the other's compute, differently on each rank. So neither the number of
turns drawn nor which of them a rank is in may depend on whether it is inside a turn at that moment: in a job of
several ranks every `acquire` draws one, and a rank that is still inside a turn gives that back first. If it kept both,
it would stay before a sibling that its own peers, already behind that sibling, wait for: a deadlock.
"""

from collections import deque

from .joining import Membership
from .rules import Grant, Member, TurnLog, is_close_behind


class DrawQueue:
    """Draw turns where this is the job's lead rank, and hand their grants out in order.

    Args:
        membership: the rank's place in its job and among the siblings.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._log = TurnLog()
        self._requested = 0  # turns drawn for an `acquire` that is still to come
        self._not_taken = 0  # turns drawn whose grants this rank has not taken
        self._grants: deque[Grant] = deque()  # of those, on the lead rank
        self._idling = False

    @property
    def owes_a_grant(self) -> bool:
        """Whether a turn was claimed whose grant has not been taken."""
        return self._not_taken > self._requested

    def request(self, phase: float | None = None, *, may_idle: bool = False) -> None:
        """Draw a turn for the `claim` to come; arguments: see `RankTurns.request`."""
        self._draw(phase, may_idle=may_idle)
        self._requested += 1

    def claim(self, *, inside: bool) -> None:
        """Use up a request, or draw a turn now; a rank that stays ``inside`` a turn needs none.

        See [Note: one draw for each acquire].
        """
        if self._requested:
            self._requested -= 1
        elif not inside:
            self._draw()

    def _draw(self, phase: float | None = None, *, may_idle: bool = False) -> None:
        self._not_taken += 1
        if not self._membership.is_lead:
            return
        segment, channel = self._membership.segment, self._membership.channel
        turn = segment.draw_turn()
        self._log.read(segment.read_log(self._log.read_numel, turn - 1))
        members = segment.members()
        grant = self._log.grant(turn, self._membership.job, members)
        if phase is not None:
            self._idling = may_idle and self._is_close_behind(members)
            grant = grant._replace(idle=self._idling)
            segment.publish_phase(None if self._idling else phase)
        self._grants.append(grant)
        if channel is not None:
            channel.send(grant)

    def _is_close_behind(self, members: list[Member]) -> bool:
        own = self._membership.job
        phases = {each.job: each.phase for each in members if each.job != own and each.phase is not None}
        return is_close_behind(phases.values(), idling=self._idling)

    def take(self) -> Grant:
        """Return the next grant; other ranks than the lead rank wait for it."""
        if self._membership.is_lead:
            grant = self._grants.popleft()
        else:
            assert self._membership.channel is not None
            grant = self._membership.channel.receive()
        self._not_taken -= 1
        return grant
