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
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from crossover_ddp._system import environment
from crossover_ddp._system.device import named_device
from crossover_ddp.errors import CrossoverError, SegmentError, TurnError

from .channel import TurnChannel, group_timeout_s
from .device_order import DeviceOrder, order_on
from .rules import Member
from .segment import TurnSegment

logger = logging.getLogger(__name__)

_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (TurnError, ValueError, TypeError)
}
_places: set[tuple[int, str, str]] = set()
"""Where this process takes turns: its PID, as a fork is another process; group; device."""
_claiming = threading.Lock()


class NotJoinedError(CrossoverError):
    """The job takes no turns, by ``reason``, and holds nothing. ``agreed``: all ranks have it, and one may warn."""

    def __init__(self, reason: Exception, *, agreed: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.agreed = agreed


class Membership(NamedTuple):
    """A rank's place in its job and among the siblings."""

    job: int
    """Number of the job, the same on all its ranks."""
    is_lead: bool
    segment: TurnSegment
    order: DeviceOrder | None
    """None on a CPU."""
    channel: TurnChannel


def join(
    name: str,
    device: torch.device | str | int | None,
    group: ProcessGroup | None,
    *,
    lease_s: float,
    trial: bool,
    timeout_s: float | None,
) -> Membership:
    """Take a place in the group ``name`` for every rank of the job, by arguments as `GPUMutex` has them.

    ``timeout_s``: how long the ranks may be apart; None: as long as their collectives may take.

    On failure: `NotJoinedError`; nothing is held then. **Collective.**
    """
    try:
        with contextlib.ExitStack() as taken:
            limit_s = group_timeout_s(group)
            channel = TurnChannel(
                group, limit_s if timeout_s is None else min(timeout_s, limit_s / 4)
            )
            taken.callback(channel.close)
            machine, problem = 0, ""
            try:
                torch_device, device_name = named_device(device)
                _claim(name, device_name, taken)
                segment = TurnSegment(name, device_name)
                taken.callback(segment.leave)
                segment.reserve()
                order = order_on(torch_device)
                machine = segment.machine
            except Exception as error:  # all ranks learn of it: either all take turns or none
                problem = f"{type(error).__name__}: {error}"
            everyone = _agree(channel, (machine, secrets.randbits(62) | 1, problem))
            machines = [found for found, _, _ in everyone]
            lead = channel.lead = machines.index(min(machines))  # see [Note: leads]
            job = int(everyone[lead][1])
            try:
                member = Member(
                    job=job,
                    lead=machines[lead],
                    rank=channel.rank,
                    world_size=len(machines),
                    lease_s=lease_s,
                    trial=trial,
                )
                segment.join(member)
                _look_for_other_leads(segment, machines[lead])
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            _agree(channel, (problem,))  # every slot is there before the first turn is drawn
            taken.pop_all()
            return Membership(job, channel.rank == lead, segment, order, channel)
    except NotJoinedError:
        raise
    except Exception as error:
        raise NotJoinedError(error, agreed=False) from error


def _claim(name: str, device: str, taken: contextlib.ExitStack) -> None:
    """Take the process's one place in the group on the device: two would wait for each other, a lease each time."""
    place = (os.getpid(), name, device)
    with _claiming:
        if place in _places:
            raise TurnError(
                f"expected one GPUMutex of a process for group {name!r} on {device}, got a second one; give "
                "the first one to all states (mutex=…; a hook's own is state.mutex), or close() it before"
            )
        _places.add(place)
    taken.callback(_places.discard, place)


def _agree(channel: TurnChannel, answer: tuple[Any, ...]) -> list[Any]:
    """Return all ranks' answers, each of which ends with its problem; raise the first problem on all ranks."""
    everyone = channel.gather(answer)
    for rank, (*_, problem) in enumerate(everyone):
        if problem:
            kind, _, what = str(problem).partition(": ")
            reason = _ERRORS.get(kind, SegmentError)(f"rank {rank} cannot take turns: {what}")
            raise NotJoinedError(reason, agreed=True)
    return everyone


def _look_for_other_leads(segment: TurnSegment, lead: int) -> None:
    if others := [each for each in segment.members() if each.lead != lead]:
        logger.warning(
            "on %s this job and another one (process %d) are in no common order, since they share some machines "
            "only, and not the one that orders their turns: both compute at the same time; give both the same "
            "machines and /dev/shm, or name different groups with %s",
            segment.device,
            others[0].pid,
            environment.GROUP,
        )


def leave(membership: Membership) -> None:
    """Give up what `join` has taken."""
    _places.discard((os.getpid(), membership.segment.group, membership.segment.device))
    membership.segment.leave()
    membership.channel.close(end_grants=membership.is_lead)
