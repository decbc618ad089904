"""How all ranks of a job join the siblings, or none of them does. Our design.

[Note: misfits]
Siblings use the same set of devices, or they would have no common order of turns. A *misfit* is a sibling with another
set. A job that finds one refuses itself on all ranks, so its slots are in use on some devices for a moment before it
leaves. Which of two misfits leaves is therefore decided in two rounds. First every rank looks once: a job that has
taken a turn stays, and the newcomer leaves. Then only newcomers are left, some of which may be leaving; each waits for
the other, and of two that both stay the one with the greater number leaves first.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from crossover_ddp._system import environment
from crossover_ddp.errors import CrossoverError, SegmentError, TurnError

from .group_timeout import group_timeout_s
from .segment import TurnSegment
from .slots import Slot, digest

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from .channel import TurnChannel
    from .device_order import DeviceOrder

_ERRORS: dict[str, type[Exception]] = {
    "TurnError": TurnError,
    "ValueError": ValueError,
    "TypeError": TypeError,
}
_NEWCOMER_S = (
    1.0  # the job with the greater number waits so long for a misfit without turns, the other twice that
)
_LOOK_EVERY_S = 0.01
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
        device, name, problem = None, "", ""
        try:
            device, name = _resolve_device(wanted)
            self._claim(name)
        except Exception as error:  # all ranks learn of it: either all take turns or none
            problem = _described(error)
        everyone = self._agree((name, secrets.randbits(62) | 1, problem), problem_at=2)
        assert device is not None
        devices = [found for found, _, _ in everyone]
        lead = devices.index(min(devices))
        job = int(everyone[lead][1])
        self._agree_on(lambda: self._take_slot(device, name, job, devices))
        self._agree_on(lambda: self._stay(job, devices))
        assert self._segment is not None and self._order is not None
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

    def _agree_on(self, action: Callable[[], None]) -> None:
        """Run ``action`` on all ranks; if it fails on one of them, raise that rank's problem on all."""
        problem = ""
        try:
            action()
        except Exception as error:  # all ranks learn of it: either all take turns or none
            problem = _described(error)
        self._agree((problem,), problem_at=0)

    def _agree(self, answer: tuple[Any, ...], *, problem_at: int) -> list[Any]:
        """Return all ranks' answers; if some have a problem, raise the first rank's problem on all ranks."""
        everyone = self._channel.gather(answer) if self._channel is not None else [answer]
        for rank, each in enumerate(everyone):
            if each[problem_at]:
                kind, _, what = str(each[problem_at]).partition(": ")
                reason = _ERRORS.get(kind, SegmentError)(f"rank {rank} cannot take turns: {what}")
                raise NotJoinedError(reason, agreed=True)
        return everyone

    def _take_slot(self, device: "torch.device", name: str, job: int, devices: list[str]) -> None:
        from .device_order import DeviceOrder

        segment = self._segment = TurnSegment(self._name, name)
        order = self._order = DeviceOrder(device)
        segment.join(
            job=job,
            devices=digest("\n".join(sorted(set(devices)))),
            rank=self._rank,
            world_size=len(devices),
            lease_s=self._lease_s,
            events=order.handle,
        )
        misfit = _misfit(segment, job, set(devices))
        if misfit is not None and misfit.started:
            raise _refusal(misfit, segment, devices)

    def _stay(self, job: int, devices: list[str]) -> None:
        """Wait for misfits without turns to leave; see [Note: misfits]."""
        segment = self._segment
        assert segment is not None
        begin_s = time.monotonic()
        while (misfit := _misfit(segment, job, set(devices))) is not None:
            patience_s = _NEWCOMER_S if job > misfit.job else 2 * _NEWCOMER_S
            if self._channel is not None:  # the other ranks wait for this one's answer
                patience_s = min(patience_s, self._channel.timeout_s / 4)
            if misfit.started or time.monotonic() - begin_s > patience_s:
                raise _refusal(misfit, segment, devices)
            time.sleep(_LOOK_EVERY_S)

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


def _misfit(segment: TurnSegment, job: int, devices: set[str]) -> Slot | None:
    """Return a sibling that shares only some devices, one with turns if there is one."""
    own = digest("\n".join(sorted(devices)))
    misfits = [slot for slot in segment.slots().values() if slot.job != job and slot.devices != own]
    return max(misfits, key=lambda slot: slot.started, default=None)


def _refusal(misfit: Slot, segment: TurnSegment, devices: Iterable[str]) -> TurnError:
    return TurnError(
        f"expected siblings to use the same set of devices, got a job (process {misfit.pid}) that shares "
        f"{segment.device} but not all of {sorted(set(devices))}; give both jobs the same devices, or name "
        f"different groups with {environment.GROUP}"
    )
