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


def join(
    name: str,
    device: "torch.device | str | int | None",
    process_group: "ProcessGroup | None",
    *,
    lease_s: float,
    trial: bool,
    timeout_s: float | None,
) -> Membership:
    """Take a place in the group ``name`` for every rank of the job.

    Args:
        name: of the group of siblings.
        device: as `GPUMutex` has it.
        process_group: the job; None for the default group, or this process alone where there is none.
        lease_s: how long siblings wait for a turn that does not end.
        trial: whether the job takes part in trials.
        timeout_s: how long the ranks may be apart; None: as long as their collectives may take.

    On failure: `NotJoinedError`; nothing is held then. **Collective.**
    """
    taken = contextlib.ExitStack()
    try:
        channel = _channel(process_group, timeout_s)
        if channel is not None:
            taken.callback(channel.close)
        return _join(name, device, lease_s, trial, channel, taken)
    except Exception as error:
        taken.close()
        if isinstance(error, NotJoinedError):
            raise
        raise NotJoinedError(error, agreed=False) from error


def _join(
    name: str,
    wanted: "torch.device | str | int | None",
    lease_s: float,
    trial: bool,
    channel: "TurnChannel | None",
    taken: contextlib.ExitStack,
) -> Membership:
    """Join on all ranks, or raise `NotJoinedError` on all ranks; note in ``taken`` how to give back what was taken."""
    rank = channel.rank if channel is not None else 0
    machine, problem = 0, ""
    try:
        device, device_name = _resolve_device(wanted)
        _claim(name, device_name, taken)
        segment = TurnSegment(name, device_name)
        taken.callback(segment.leave)
        segment.reserve()
        order = _order(device)
        taken.callback(order.close)
        machine = segment.machine
    except Exception as error:  # all ranks learn of it: either all take turns or none
        problem = _described(error)
    everyone = _agree(channel, (machine, secrets.randbits(62) | 1, problem))
    machines = [found for found, _, _ in everyone]
    lead = machines.index(min(machines))  # see [Note: leads]
    job = int(everyone[lead][1])
    if channel is not None:
        channel.lead = lead
    try:
        size = len(machines)
        segment.join(
            job=job,
            lead=machines[lead],
            rank=rank,
            world_size=size,
            lease_s=lease_s,
            event=order.handle,
            trial=trial,
        )
    except Exception as error:
        problem = _described(error)
    _agree(channel, (problem,))  # every slot is there before the first turn is drawn
    _look_for_other_leads(segment, machines[lead])
    return Membership(job, device_name, rank == lead, segment, order, channel)


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


def _order(device: "torch.device") -> "DeviceOrder":
    from .device_order import DeviceOrder

    return DeviceOrder(device)


def _agree(channel: "TurnChannel | None", answer: tuple[Any, ...]) -> list[Any]:
    """Return all ranks' answers, each of which ends with its problem; raise the first problem on all ranks."""
    everyone = channel.gather(answer) if channel is not None else [answer]
    for rank, (*_, problem) in enumerate(everyone):
        if problem:
            kind, _, what = str(problem).partition(": ")
            reason = _ERRORS.get(kind, SegmentError)(f"rank {rank} cannot take turns: {what}")
            raise NotJoinedError(reason, agreed=True)
    return everyone


def _look_for_other_leads(segment: TurnSegment, lead: int) -> None:
    others = [slot for slot in segment.slots().values() if slot.lead != lead]
    if others:
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
