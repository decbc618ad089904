"""How all ranks of a job join the siblings, or none of them does. Our design.

[Note: leads]
The machine with the smallest number among a job's machines is its *lead* machine; its log has the order of the job's
turns on all its devices, and the job's first rank there, the *lead rank*, draws them. Jobs with one lead machine are in
one order, whatever devices they use. Jobs with different ones are in none: they ignore each other where they meet, and
say so.
"""

import contextlib
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from crossover_ddp._system import environment
from crossover_ddp.errors import CrossoverError, SegmentError, TurnError

from .group_timeout import group_timeout_s
from .segment import TurnSegment

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from .channel import TurnChannel
    from .device_order import DeviceOrder

logger = logging.getLogger(__name__)

_ERRORS: dict[str, type[Exception]] = {
    "TurnError": TurnError,
    "ValueError": ValueError,
    "TypeError": TypeError,
}
_places: set[tuple[int, str, str]] = set()
"""Where this process takes turns: its PID, as a fork is another process; group; device."""
_claiming = threading.Lock()


class NotJoinedError(CrossoverError):
    """The job takes no turns; nothing is held.

    ``reason`` is the error to raise or to show. ``agreed``: all ranks have the same one, so one of them may warn for
    all.
    """

    def __init__(self, reason: Exception, *, agreed: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.agreed = agreed


class Membership(NamedTuple):
    """A rank's place in its job and among the siblings."""

    job: int
    """Number of the job, the same on all its ranks."""
    device: str
    """The name under which siblings know this rank's device."""
    is_lead: bool
    segment: TurnSegment
    order: "DeviceOrder"
    channel: "TurnChannel | None"
    """None for a job of one process."""


class _Attempt:
    """What one rank has taken so far; `undo` gives it back if another rank fails."""

    def __init__(self, name: str, lease_s: float, channel: "TurnChannel | None") -> None:
        self._name = name
        self._lease_s = lease_s
        self._channel = channel
        self._segment: TurnSegment | None = None
        self._order: DeviceOrder | None = None
        self._place: tuple[int, str, str] | None = None

    def run(self, wanted: "torch.device | str | int | None") -> Membership:
        """Join on all ranks, or raise `NotJoinedError` on all ranks."""
        name, machine, problem = "", 0, ""
        try:
            device, name = _resolve_device(wanted)
            self._claim(name)
            machine = self._reserve(device, name)
        except Exception as error:  # all ranks learn of it: either all take turns or none
            problem = _described(error)
        everyone = self._agree((machine, secrets.randbits(62) | 1, problem), problem_at=2)
        machines = [found for found, _, _ in everyone]
        lead = machines.index(min(machines))  # see [Note: leads]
        job = int(everyone[lead][1])
        problem = ""
        try:
            self._join(job, machines[lead], len(machines))
        except Exception as error:
            problem = _described(error)
        self._agree((problem,), problem_at=0)  # every slot is there before the first turn is drawn
        assert self._segment is not None and self._order is not None
        self._look_for_other_leads(machines[lead])
        return Membership(job, name, self._rank == lead, self._segment, self._order, self._channel)

    def _claim(self, device: str) -> None:
        """Take the process's one place in the group on the device: two would wait for each other, a lease each time."""
        place = (os.getpid(), self._name, device)
        with _claiming:
            if place in _places:
                raise TurnError(
                    f"expected one GPUMutex of a process for group {self._name!r} on {device}, got a second one; give "
                    "the first one to all states (mutex=…; a hook's own is state.mutex), or close() it before"
                )
            _places.add(place)
        self._place = place

    @property
    def _rank(self) -> int:
        return self._channel.rank if self._channel is not None else 0

    def _agree(self, answer: tuple[Any, ...], *, problem_at: int) -> list[Any]:
        """Return all ranks' answers; if some have a problem, raise the first rank's problem on all ranks."""
        everyone = self._channel.gather(answer) if self._channel is not None else [answer]
        for rank, each in enumerate(everyone):
            if each[problem_at]:
                kind, _, what = str(each[problem_at]).partition(": ")
                reason = _ERRORS.get(kind, SegmentError)(f"rank {rank} cannot take turns: {what}")
                raise NotJoinedError(reason, agreed=True)
        return everyone

    def _reserve(self, device: "torch.device", name: str) -> int:
        """Take a slot that siblings do not see yet; return the machine's number."""
        from .device_order import DeviceOrder

        segment = self._segment = TurnSegment(self._name, name)
        segment.reserve()
        self._order = DeviceOrder(device)
        return segment.machine

    def _join(self, job: int, lead: int, world_size: int) -> None:
        assert self._segment is not None and self._order is not None
        self._segment.join(
            job=job,
            lead=lead,
            rank=self._rank,
            world_size=world_size,
            lease_s=self._lease_s,
            event=self._order.handle,
        )

    def _look_for_other_leads(self, lead: int) -> None:
        assert self._segment is not None
        others = [slot for slot in self._segment.slots().values() if slot.lead != lead]
        if others:
            logger.warning(
                "on %s this job and another one (process %d) are in no common order, since they share some machines "
                "only, and not the one that orders their turns: both compute at the same time; give both the same "
                "machines and /dev/shm, or name different groups with %s",
                self._segment.device,
                others[0].pid,
                environment.GROUP,
            )

    def undo(self) -> None:
        """Give back what was taken, whatever else fails."""
        if self._place is not None:
            _places.discard(self._place)
        with contextlib.suppress(Exception):
            if self._order is not None:
                self._order.close()
        with contextlib.suppress(Exception):
            if self._segment is not None:
                self._segment.leave()
        if self._channel is not None:
            self._channel.close()


def join(
    name: str,
    device: "torch.device | str | int | None",
    process_group: "ProcessGroup | None",
    *,
    lease_s: float,
    timeout_s: float | None,
) -> Membership:
    """Take a place in the group ``name`` for every rank of the job.

    Args:
        name: of the group of siblings.
        device: as `GPUMutex` has it.
        process_group: the job; None for the default group, or this process alone where there is none.
        lease_s: how long siblings wait for a turn that does not end.
        timeout_s: how long the ranks may be apart; None: as long as their collectives may take.

    On failure: `NotJoinedError`; nothing is held then. **Collective.**
    """
    try:
        channel = _channel(process_group, timeout_s)
    except Exception as error:
        raise NotJoinedError(error, agreed=False) from error
    attempt = _Attempt(name, lease_s, channel)
    try:
        return attempt.run(device)
    except NotJoinedError:
        attempt.undo()
        raise
    except Exception as error:
        attempt.undo()
        raise NotJoinedError(error, agreed=False) from error


def leave(membership: Membership) -> None:
    """Give up what `join` has taken."""
    _places.discard((os.getpid(), membership.segment.group, membership.device))
    membership.segment.leave()
    if membership.channel is not None:
        membership.channel.close(end_grants=membership.is_lead)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _channel(process_group: "ProcessGroup | None", timeout_s: float | None) -> "TurnChannel | None":
    """Return the job's channel, or None for a job of one process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from .channel import TurnChannel

    limit_s = group_timeout_s(process_group)
    channel = TurnChannel(process_group, limit_s if timeout_s is None else min(timeout_s, limit_s / 4))
    return channel if channel.size > 1 else None


def _resolve_device(device: "torch.device | str | int | None") -> "tuple[torch.device, str]":
    """Return the torch device and the name under which its siblings know it."""
    import torch

    from crossover_ddp._system.device import default_device, sibling_name

    found = default_device() if device is None else None
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):  # not one of torch's: a name of the user's own
            found = torch.device(device)
        if found is None:
            return torch.device("cpu"), device
    elif device is not None:
        found = torch.device("cuda", device) if isinstance(device, int) else device
    assert found is not None
    if found.type == "cuda":
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found, sibling_name(found)
