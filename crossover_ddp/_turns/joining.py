"""How a job joins its siblings: on all ranks, or on none. Our design.

[Note: leads]
Among a job's machines, the one with the smallest number is its *lead* machine. The log of that
machine holds the order of the job's turns on all its devices. The job's first rank there, the *lead
rank*, draws the turns. Jobs with the same lead machine share one order, whatever devices they use.
Jobs with different lead machines have no common order: where they meet on a device, they ignore
each other and warn.
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
from crossover_ddp._system.torch_private import group_timeout_s
from crossover_ddp.errors import CrossoverError, SegmentError, TurnError

from .channel import TurnChannel
from .device_order import DeviceOrder, order_on
from .rules import Member
from .segment import TurnSegment

logger = logging.getLogger(__name__)

# Errors that keep their class when other ranks raise them. All others become `SegmentError`.
_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (TurnError, ValueError, TypeError)
}
# Where this process takes turns: (pid, group, device). A forked child has another pid, so its
# parent's claims do not count for it.
_claims: set[tuple[int, str, str]] = set()
_claiming = threading.Lock()


class NotJoinedError(CrossoverError):
    """Raised if the job has not joined its siblings. It then holds no resources.

    Args:
        reason: the error that kept a rank from joining.
        agreed: whether all ranks have the same reason, so that one warning is enough.
    """

    def __init__(self, reason: Exception, *, agreed: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.agreed = agreed


class Membership(NamedTuple):
    """A rank's connections to its job and to the job's siblings."""

    # A random number that identifies the job. It is the same on all its ranks.
    job: int
    # Whether this is the job's lead rank.
    is_lead: bool
    segment: TurnSegment
    # The order of turns on a GPU; None on a CPU.
    order: DeviceOrder | None
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
    """Join the siblings in group ``name``, with all ranks of the job.

    Args:
        name: the siblings' group, as in `GPUMutex`.
        device: the shared device, as in `GPUMutex`.
        group: the job's process group. None for a job that consists of this process alone.
        lease_s: how many seconds siblings wait for a turn of the job.
        trial: whether the job takes part in trials of turns.
        timeout_s: how many seconds after the first rank the last rank may arrive, but at most a
            quarter of the timeout of their collectives. None means that whole timeout.

    On failure: `NotJoinedError`; the job holds nothing afterwards.

    **Collective.**
    """
    try:
        with contextlib.ExitStack() as undo:
            limit_s = group_timeout_s(group)
            channel = TurnChannel(
                group, limit_s if timeout_s is None else min(timeout_s, limit_s / 4)
            )
            undo.callback(channel.close)
            machine = 0
            problem = ""
            try:
                torch_device, device_name = named_device(device)
                _claim(name, device_name, undo)
                segment = TurnSegment(name, device_name)
                undo.callback(segment.leave)
                segment.reserve()
                order = order_on(torch_device)
                machine = segment.machine
            except Exception as error:  # sent to all ranks, so that none of them takes turns
                problem = f"{type(error).__name__}: {error}"
            everyone = _agree(channel, (machine, secrets.randbits(62) | 1, problem))
            machines = [number for number, _, _ in everyone]
            lead = machines.index(min(machines))  # see [Note: leads]
            channel.lead = lead
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
                _warn_of_other_leads(segment, machines[lead])
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            # After this, every rank has shown its slot. No turn is drawn before that.
            _agree(channel, (problem,))
            undo.pop_all()
            return Membership(job, channel.rank == lead, segment, order, channel)
    except NotJoinedError:
        raise
    except Exception as error:
        raise NotJoinedError(error, agreed=False) from error


def _claim(name: str, device: str, undo: contextlib.ExitStack) -> None:
    """Refuse a second mutex of this process for the same group and device.

    The two mutexes would wait for each other, one lease each time.

    Args:
        name: the siblings' group.
        device: the name of the device.
        undo: receives a callback that gives up the claim.
    """
    claim = (os.getpid(), name, device)
    with _claiming:
        if claim in _claims:
            raise TurnError(
                f"this process already has a GPUMutex for group {name!r} on {device}; pass that "
                "one to all states (mutex=…; a hook's own is state.mutex), or close() it first"
            )
        _claims.add(claim)
    undo.callback(_claims.discard, claim)


def _agree(channel: TurnChannel, answer: tuple[Any, ...]) -> list[Any]:
    """Exchange answers between all ranks of the job, and return them.

    The last item of an answer is the rank's problem, or "" if it has none. If any rank has a
    problem, all ranks raise the first one.
    """
    everyone = channel.gather(answer)
    for rank, (*_, problem) in enumerate(everyone):
        if problem:
            kind, _, message = str(problem).partition(": ")
            reason = _ERRORS.get(kind, SegmentError)(f"rank {rank} cannot take turns: {message}")
            raise NotJoinedError(reason, agreed=True)
    return everyone


def _warn_of_other_leads(segment: TurnSegment, lead: int) -> None:
    others = [each for each in segment.members() if each.lead != lead]
    if others:
        logger.warning(
            "on %s this job and another one (process %d) are in no common order, so both compute "
            "at the same time: they share some machines, but not the one that orders their turns; "
            "give both the same machines and /dev/shm, or name different groups with %s",
            segment.device,
            others[0].pid,
            environment.GROUP,
        )


def leave(membership: Membership) -> None:
    """Give up everything that `join` has taken. Not collective, and safe to call more than once."""
    _claims.discard((os.getpid(), membership.segment.group, membership.segment.device))
    membership.segment.leave()
    membership.channel.close(end_grants=membership.is_lead)
