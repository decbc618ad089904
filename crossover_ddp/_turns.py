"""Turns as pure decisions: who may compute now, whom one waits for, and for how long.

[Note: turn order]
All devices that a set of jobs share see one and the same sequence of turns, and a turn belongs to a
job, not to a process. The smallest device name of a job is its *lead* device, the same for all jobs that
share the devices. Only the job's rank there draws a turn number, by appending one record to the lead
device's log: the position of the record *is* the number, so the kernel's append is the only arbiter.
The number travels to the job's other ranks together with the last turn of every other live job before
it (a `Grant`). A rank may start turn n when, on its own device, every live slot of the other jobs has given
back the turns named in the grant.

Why nothing can deadlock: a rank in turn n waits only for turns below n, each of which waits only
for turns below itself, and a turn is never held while waiting for another one. Whatever collective a
rank enters inside its turn depends on its own job's ranks alone, and those wait for turns below n alone.
Deaths remove slots from the wait; a stopped process costs its siblings one lease. `tests/unit/
test_turn_model.py` explores every interleaving of two and three jobs on two devices with these functions.

No clock, no I/O here: bytes of the log, views of slots and the time now are arguments. Our design.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

DEFAULT_LEASE_S = 5.0
_GRANT_HEADER_NUMEL = 3


class Grant(NamedTuple):
    """One turn of a job, as its lead rank tells it to the job's other ranks."""

    turn: int
    shared: bool
    """Whether a sibling was present when the turn was drawn."""
    after: tuple[tuple[int, int], ...]
    """(job, turn): what every other live job must have given back on a device before this turn starts."""


class Member(NamedTuple):
    """What a rank sees of one slot on its own device."""

    slot: int
    job: int
    incarnation: int
    joined_at: int
    returned: int
    """The number of the last turn that this slot has given back; 0 before the first."""
    lease_s: float


class Blocker(NamedTuple):
    """A member that has not yet given back the turn that must come first."""

    member: Member
    turn: int


class TurnLog:
    """The lead device's log, read step by step: record k (from 1) names the slot that drew turn k."""

    def __init__(self) -> None:
        self._last_turn: dict[int, int] = {}
        self._read_numel = 0

    @property
    def read_numel(self) -> int:
        """How many records have been read."""
        return self._read_numel

    def read(self, records: bytes) -> None:
        """Take in the records that follow those read so far."""
        for offset, slot in enumerate(records, start=self._read_numel + 1):
            self._last_turn[slot] = offset
        self._read_numel += len(records)

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        """Return the grant of ``turn``, whose predecessors have all been read.

        Records older than a slot's present owner belong to an earlier one and say nothing.
        """
        others = [member for member in members if member.job != own_job]
        after: dict[int, int] = {}
        for member in others:
            last = self._last_turn.get(member.slot, 0)
            if last > member.joined_at:
                after[member.job] = max(last, after.get(member.job, 0))
        return Grant(turn, bool(others), tuple(sorted(after.items())))


def blockers(grant: Grant, own_job: int, members: Iterable[Member]) -> list[Blocker]:
    """Return whom ``grant`` still waits for on this device, the lowest turn first."""
    needed = dict(grant.after)
    waiting = [
        Blocker(member, needed[member.job])
        for member in members
        if member.job != own_job and member.returned < needed.get(member.job, 0)
    ]
    return sorted(waiting, key=lambda blocker: blocker.turn)


class Patience:
    """How long a rank waits for a member that neither gives back nor dies: the member's lease, once.

    The lease of a turn runs from the moment when the waiting rank sees it at the front, on the waiting
    rank's own clock; no clock is shared. A turn once forgiven is not waited for again.
    """

    def __init__(self) -> None:
        self._forgiven: dict[tuple[int, int], int] = {}
        self._front: tuple[int, int, int] | None = None
        self._front_since_s = 0.0
        self.expired_count = 0

    def remaining(self, waiting: Sequence[Blocker], now_s: float) -> float | None:
        """Return the seconds left before the front of ``waiting`` is forgiven; None when nobody is left.

        Args:
            waiting: from `blockers`, the lowest turn first.
            now_s: the waiting rank's monotonic clock.
        """
        for blocker in waiting:
            key = (blocker.member.slot, blocker.member.incarnation)
            if self._forgiven.get(key, 0) >= blocker.turn:
                continue
            if self._front != (*key, blocker.turn):
                self._front, self._front_since_s = (*key, blocker.turn), now_s
            left_s = self._front_since_s + blocker.member.lease_s - now_s
            if left_s > 0:
                return left_s
            self._forgive(key, blocker.turn)
        return None

    def _forgive(self, key: tuple[int, int], turn: int) -> None:
        slot, _ = key
        self._forgiven = {known: last for known, last in self._forgiven.items() if known[0] != slot}
        self._forgiven[key] = turn
        self.expired_count += 1

    def started(self) -> None:
        """Forget the front: the wait is over."""
        self._front = None


def message_numel(max_jobs: int) -> int:
    """Return how many int64 a message that names up to ``max_jobs`` other jobs takes."""
    return _GRANT_HEADER_NUMEL + 2 * max_jobs


def encode(grant: Grant, numel: int) -> list[int]:
    """Return ``grant`` as ``numel`` integers, the form in which it travels between ranks."""
    flat = [grant.turn, int(grant.shared), len(grant.after)]
    for job, turn in grant.after:
        flat += [job, turn]
    if len(flat) > numel:
        raise ValueError(
            f"expected at most {(numel - _GRANT_HEADER_NUMEL) // 2} sibling jobs, got {len(grant.after)}; "
            "spread the jobs over several groups (CROSSOVER_GROUP)"
        )
    return flat + [0] * (numel - len(flat))


def decode(message: Sequence[int]) -> Grant:
    """Return the grant that `encode` wrote."""
    turn, shared, count = message[:_GRANT_HEADER_NUMEL]
    pairs = message[_GRANT_HEADER_NUMEL : _GRANT_HEADER_NUMEL + 2 * count]
    return Grant(turn, bool(shared), tuple([*zip(pairs[::2], pairs[1::2], strict=True)]))
