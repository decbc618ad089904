"""The GPU mutex: jobs that share devices take turns on them.

A turn belongs to a job, all its ranks; every device sees the same order of turns; see [Note: turn order] in
`crossover_ddp._turns`. `CrossoverState` and the other hooks use a mutex by themselves; this class
is for whoever wants turns without a hook, and for giving the turn away during evaluation and checkpoints.
"""

import contextlib
import datetime
import logging
import os
import secrets
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from crossover_ddp._segment_files import EVENT_COUNT, EVENT_HANDLE_BYTES, SLOT_COUNT, Slot, digest
from crossover_ddp._turn_segment import TurnSegment
from crossover_ddp._turns import DEFAULT_LEASE_S, Grant, Patience, TurnLog, blockers, message_numel
from crossover_ddp.errors import (
    CrossoverError,
    SegmentError,
    TurnError,
    UnsupportedConfigurationError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

    from crossover_ddp._device_order import DeviceOrder

logger = logging.getLogger(__name__)

DEFAULT_GROUP = "default"
CLOSED = "closed"
_LEASE_TURNS = 4.0  # an adaptive lease covers this many of the job's longest recent turns
_RECENT_TURNS = 16
_LATENCIES_KEPT = 10_000
_CLOSE_TIMEOUT_S = 5.0
_LEAVING_LOOK_S = 0.01
_JOIN_ERRORS = {"TurnError": TurnError, "ValueError": ValueError}
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

_P = ParamSpec("_P")


def turns_disabled() -> bool:
    """Tell whether ``CROSSOVER_DISABLE=1`` is set."""
    return os.environ.get("CROSSOVER_DISABLE", "") not in ("", "0")


def _never_raises(
    method: "Callable[Concatenate[GPUMutex, _P], None]",
) -> "Callable[Concatenate[GPUMutex, _P], None]":
    """Turn any failure of ``method`` but a caller's mistake into the end of turns for this rank, with one warning."""

    def guarded(self: "GPUMutex", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        with self._busy:
            if self._segment is None:
                return
            try:
                method(self, *args, **kwargs)
            except UnsupportedConfigurationError:  # the caller's mistake, found before anything was done
                raise
            except Exception as error:  # promise 3: giving up on turns costs speed, never the job
                self._give_up(error)

    guarded.__doc__ = method.__doc__
    guarded.__name__ = method.__name__
    return guarded


class GPUMutex:
    """Take turns on a device with sibling jobs: the jobs of one user that name the same group.

    The mutex is advisory and never stands in a job's way: a sibling that dies is passed over at once, one that
    is stopped after its lease, and if turns fail on this rank for whatever reason it trains on
    without them, with one warning. Results of training do not depend on it.

    Args:
        name: group of siblings; default ``CROSSOVER_GROUP``, else ``default``.
        device: what is shared: a ``torch.device``, a GPU's index, or any text that names a device on the whole
            cluster. Default: the current GPU if this process uses one, else the CPU, whose name
            is ``CROSSOVER_DEVICE`` or made from the machine's boot id.
        process_group: the job; default the default group, or this process alone where there is none.
        lease: seconds that siblings wait for a turn of this job that does not end, or a ``timedelta``. Default
            5 s, or four of the job's longest recent turns if that is more.

    On failure: `SegmentError` for a foreign or malformed segment, `TurnError` when siblings share only some of the
    job's devices, on every rank alike; nothing is held then.

    **Collective**: the constructor and `acquire` must be called by all ranks of the job; nothing else.

    Example::

        mutex = GPUMutex()
        mutex.acquire()
        compute()
        mutex.release()
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        device: "torch.device | str | int | None" = None,
        process_group: "ProcessGroup | None" = None,
        lease: float | datetime.timedelta | None = None,
    ) -> None:
        self.name = name if name is not None else os.environ.get("CROSSOVER_GROUP", DEFAULT_GROUP)
        if isinstance(lease, datetime.timedelta):
            lease = lease.total_seconds()
        if lease is not None and not lease > 0:
            raise ValueError(f"expected a lease > 0 seconds, got lease={lease}; leave it out for the default")
        self._adaptive_lease = lease is None
        self._lease_s = DEFAULT_LEASE_S if lease is None else float(lease)
        self._busy = threading.RLock()
        self.closed = False
        self._segment: TurnSegment | None = None
        self.disabled_because: str | None = None
        self._reset_counters()
        if turns_disabled():
            self.disabled_because = "CROSSOVER_DISABLE is set"
            return
        self._join(device, process_group)

    def _reset_counters(self) -> None:
        self._holding = False
        self._requested = False
        self._turn = 0
        self._turn_count = 0
        self._started_s = 0.0
        self._held_s = 0.0
        self._waited_s = 0.0
        self._recent_held_s: deque[float] = deque(maxlen=_RECENT_TURNS)
        self._handovers_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._shared = True
        self._grant: Grant | None = None
        self._patience = Patience()
        self._log = TurnLog()
        self._waits_on_host = False

    # --- joining and leaving -------------------------------------------------------------------------------

    def _join(self, device: "torch.device | str | int | None", process_group: "ProcessGroup | None") -> None:
        self._channel = _channel(process_group)
        problem, torch_device, self.device = "", None, ""
        try:
            torch_device, self.device = _resolve_device(device)
        except Exception as error:  # told to all ranks below: either all take turns or none
            problem = f"{type(error).__name__}: {error}"
        everyone = self._gather((self.device, secrets.randbits(62) | 1, problem))
        self._raise_first({rank: text for rank, (_, _, text) in enumerate(everyone) if text})
        assert torch_device is not None
        devices = [name for name, _, _ in everyone]
        self._lead = devices.index(min(devices))
        self.job = everyone[self._lead][1]
        self._is_lead = (self._channel.rank if self._channel else 0) == self._lead
        segment, problem = self._take_slot(torch_device, devices)
        problems = {rank: text for rank, text in enumerate(self._gather(problem)) if text}
        self._raise_first(problems, segment)
        assert segment is not None
        self._segment = segment
        self._waits_on_host = self._order.waits_on_host
        self._finalizer = weakref.finalize(self, _depart, self._order, segment, os.getpid())
        logger.info("takes turns on %s with the jobs of group %r (job %x)", self.device, self.name, self.job)

    def _take_slot(self, device: "torch.device", devices: list[str]) -> tuple[TurnSegment | None, str]:
        """Join the own device's segment; return it, and what is wrong if anything is."""
        from crossover_ddp._device_order import device_order

        segment = None
        try:
            segment = TurnSegment(self.name, self.device)
            segment.reserve()  # the order may put files beside it
            self._order: DeviceOrder = device_order(device, EVENT_COUNT, segment)
            segment.join(
                job=self.job,
                devices=digest("\n".join(sorted(set(devices)))),
                rank=self._channel.rank if self._channel else 0,
                world_size=len(devices),
                lease_s=self._lease_s,
                events=self._order.handles,
                waits_on_host=self._order.waits_on_host,
            )
            _check_siblings(segment, self.job, set(devices))
        except Exception as error:  # as above
            return segment, f"{type(error).__name__}: {error}"
        return segment, ""

    def _raise_first(self, problems: dict[int, str], segment: TurnSegment | None = None) -> None:
        """Leave nothing behind and raise the first rank's problem, if there is one."""
        if not problems:
            return
        if hasattr(self, "_order"):
            self._order.close()
        if segment is not None:
            segment.leave()
        if self._channel:
            self._channel.close()
        rank, text = next(iter(problems.items()))
        kind, _, what = text.partition(": ")
        raise _JOIN_ERRORS.get(kind, SegmentError)(f"rank {rank} cannot take turns: {what}")

    def _gather(self, value: Any) -> list[Any]:
        return self._channel.gather(value) if self._channel else [value]

    def close(self) -> None:
        """Leave for good: siblings no longer wait for this job. Not collective; may be called twice.

        A turn that another thread waits for ends at once, without the turn.
        """
        self.closed = True
        segment = self._segment
        if segment is not None:
            segment.ring_self()
        idle = self._busy.acquire(
            timeout=_CLOSE_TIMEOUT_S
        )  # not idle: another thread listens to the lead rank
        try:
            if self._segment is not None:
                self._leave(CLOSED, hear_out=True)
        finally:
            if idle:
                self._busy.release()

    def _leave(self, reason: str, *, hear_out: bool = False) -> None:
        self.disabled_because = reason
        self._segment = None
        self._holding = False
        try:
            self._finalizer()
        finally:
            if self._channel:
                self._channel.close(hear_out=hear_out)

    def _give_up(self, error: Exception) -> None:
        if self._segment is None:  # closed meanwhile by another thread
            return
        logger.warning(
            "turns on %s failed (%s: %s); this job trains on without them: same results, no crossover",
            self.device,
            type(error).__name__,
            error,
        )
        with contextlib.suppress(Exception):
            self._leave(f"{type(error).__name__}: {error}")

    def __enter__(self) -> "GPUMutex":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = self.disabled_because or ("holds a turn" if self._holding else "between turns")
        return f"GPUMutex(name={self.name!r}, device={getattr(self, 'device', None)!r}, {state})"

    # --- turns ---------------------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether this rank is inside a turn."""
        return self._holding

    @property
    def shared(self) -> bool:
        """Whether a sibling was present when the last turn was drawn; the same on all ranks of the job.

        While it is False nobody waits for a turn given back, so a caller may go on at once and
        pass ``ahead=True`` to `acquire`. Waits for the grant of a turn that was acquired ahead.
        """
        self._settle()
        return self._shared and self._segment is not None

    @_never_raises
    def _settle(self) -> None:
        """Learn the number of a turn that was taken ahead; it has begun, so nobody is waited for."""
        segment = self._segment
        if segment is not None and self._requested and self._holding:
            grant = self._take_grant()
            self._turn, self._shared = grant.turn, grant.shared
            segment.publish_started(grant.turn)

    @_never_raises
    def request(self) -> None:
        """Join the queue for the next turn before it is needed, so that its number travels meanwhile.

        Optional before `acquire`, and like it called by all ranks. Never blocks, never raises.
        """
        self._request()

    def _request(self) -> None:
        if self._requested:
            return
        self._requested = True
        if not self._is_lead:
            assert self._channel is not None
            self._channel.expect(self._lead)
            return
        segment = self._segment
        assert segment is not None
        turn = segment.draw_turn()
        self._log.read(segment.read_log(self._log.read_numel, turn - 1))
        self._grant = self._log.grant(turn, self.job, segment.members())
        if self._channel:
            self._channel.send(self._grant)

    def _take_grant(self) -> Grant:
        if not self._is_lead:
            assert self._channel is not None
            self._grant = self._channel.receive()
        self._requested = False
        assert self._grant is not None
        return self._grant

    @_never_raises
    def acquire(self, *, ahead: bool = False, streams: "Sequence[torch.cuda.Stream]" = ()) -> None:
        """Block until this job's turn has come on this device; on a GPU let the current stream wait as well.

        Siblings that die are passed over at once, others after their lease. If turns fail the job goes on
        without them. Does nothing inside a turn.

        Args:
            ahead: go on at once although the turn's number is not known yet; for callers that have seen
                `shared` to be False. A sibling that joins at this very moment may compute beside this turn.
            streams: further streams of the GPU that begin after the siblings' turns; default the current one alone.

        On failure: `UnsupportedConfigurationError` while the current stream captures a CUDA graph, whose replays
            would take no turn; nothing has changed then. Raises nothing else.
        """
        if self._holding:  # waiting for siblings that wait for us would cost a lease
            return
        self._order.check_usable()
        self._request()
        if ahead and not self._shared:
            self._begin_turn(self._turn)
        else:
            self._start(self._take_grant())
        if streams:
            self._order.admit(streams)

    def _start(self, grant: Grant) -> None:
        segment = self._segment
        assert segment is not None
        since_s = time.monotonic()
        waited = self._wait(segment, grant)
        self._follow_on_device(segment, grant, since_s if waited else None)
        self._waited_s += time.monotonic() - since_s
        self._patience.started()
        self._shared = grant.shared
        segment.publish_started(grant.turn)
        self._begin_turn(grant.turn)

    def _begin_turn(self, turn: int) -> None:
        self._turn = turn
        self._turn_count += 1
        self._started_s = time.monotonic()
        self._holding = True

    def _wait(self, segment: TurnSegment, grant: Grant) -> bool:
        """Wait until nobody on this device is before ``grant``; tell whether that took any waiting."""
        waited = False
        while not self.closed:
            waiting = blockers(grant, self.job, segment.members())
            expired = self._patience.expired_count
            left_s = self._patience.remaining(waiting, time.monotonic())
            if self._patience.expired_count == expired + 1 == 1:
                logger.warning(
                    "a sibling on %s kept its turn for longer than its lease of %.1f s; going on beside it (said once)",
                    self.device,
                    waiting[0].member.lease_s,
                )
            if left_s is None:
                break
            waited = True
            segment.wait([blocker.member for blocker in waiting], left_s)
        return waited

    def _follow_on_device(self, segment: TurnSegment, grant: Grant, since_s: float | None) -> None:
        """Order the device behind every sibling's last turn, and note how long the hand-over took."""
        last_ns = 0
        needed = dict(grant.after)
        for index, slot in segment.slots().items():
            if slot.job == self.job or not 0 < needed.get(slot.job, 0) <= slot.returned:
                continue
            last_ns = max(last_ns, slot.returned_at_ns)
            if slot.event_count:
                self._follow_sibling(segment, index, slot)
        now_ns = time.monotonic_ns()
        # A sibling's clock may be another one: containers have time namespaces.
        if since_s is not None and since_s * 1e9 < last_ns <= now_ns:
            self._handovers_s.append((now_ns - last_ns) / 1e9)

    def _follow_sibling(self, segment: TurnSegment, index: int, slot: Slot) -> None:
        handles = bytes(slot.events)[: slot.event_count * EVENT_HANDLE_BYTES]
        try:
            problem = self._order.follow((index, slot.incarnation), handles, slot.returned)
        except RuntimeError:
            if segment.is_alive(index, slot.incarnation):
                raise
            problem = None
        # If it has ended since its slot was read, and its events with it, there is nothing to wait for.
        if problem is not None and segment.is_alive(index, slot.incarnation):
            self._wait_on_host(segment, problem)

    def _wait_on_host(self, segment: TurnSegment, problem: str) -> None:
        """Have siblings tell their turns late from their next one on; see [Note: telling late] in `_gpu_order`."""
        if self._waits_on_host:
            return
        self._waits_on_host = True
        segment.publish_waits_on_host()
        logger.warning(
            "cannot wait on %s itself for the end of a sibling's turns: %s; from now on siblings tell theirs when the "
            "device has done them, which costs some of the gain",
            self.device,
            problem,
        )

    @_never_raises
    def release(self, *, streams: "Sequence[torch.cuda.Stream]" = ()) -> None:
        """Give the turn back once what the current stream has queued is done; on the host at once.

        Never blocks; does nothing outside a turn. Not collective.

        Args:
            streams: further streams of the GPU whose kernels belong to the turn and are not awaited by the current
                stream; default the current one alone.

        On failure: as `acquire`.
        """
        if self._holding:
            self._order.check_usable()
        self._settle()
        if not self._holding:
            return
        self._holding = False
        held_s = time.monotonic() - self._started_s
        self._held_s += held_s
        self._recent_held_s.append(held_s)
        segment, turn = self._segment, self._turn
        assert segment is not None
        self._adapt_lease(segment)
        self._order.finish(
            turn,
            lambda: self._publish_returned(segment, turn),
            on_host=self._order.on_device and self._is_awaited_on_host(segment),
            streams=streams,
        )

    def _is_awaited_on_host(self, segment: TurnSegment) -> bool:
        return any(slot.waits_on_host and slot.job != self.job for slot in segment.slots().values())

    def _publish_returned(self, segment: TurnSegment, turn: int) -> None:
        """Tell siblings; where the host has to wait for the device, on the order's own thread. Never raises."""
        try:
            segment.publish_returned(turn)
        except (OSError, CrossoverError) as error:
            # Whoever is busy may be leaving, and then waits for the order's thread, which is this one, to end.
            while self._segment is segment:
                if self._busy.acquire(timeout=_LEAVING_LOOK_S):
                    try:
                        self._give_up(error)
                    finally:
                        self._busy.release()

    def _adapt_lease(self, segment: TurnSegment) -> None:
        wanted_s = _LEASE_TURNS * max(self._recent_held_s)
        if self._adaptive_lease and wanted_s > self._lease_s:
            self._lease_s = wanted_s
            segment.publish_lease(wanted_s)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Give the turn away while the body runs: evaluation, a checkpoint, anything long without training.

        Not collective: one rank alone may pause. A job of one rank takes its turn back at the end; one of several
        ranks takes it with the end of its next exchange, since a turn is all its ranks' or none's.
        """
        held = self._holding
        self.release()
        try:
            yield
        finally:
            if held and self._channel is None:
                self.acquire()

    def stats(self) -> dict[str, Any]:
        """Return counters of this rank: turns, seconds held and waited, hand-over latencies, siblings.

        A hand-over runs from a sibling's giving back to the start here, where this rank waited; seconds.
        """
        latencies = sorted(list(self._handovers_s))
        return {
            "group": self.name,
            "device": getattr(self, "device", None),
            "job": f"{getattr(self, 'job', 0):x}",
            "turn": self._turn,
            "turns": self._turn_count,
            "holding": self._holding,
            "siblings": self._count_siblings(),
            "held_s": self._held_s,
            "waited_s": self._waited_s,
            "lease_s": self._lease_s,
            "leases_expired": self._patience.expired_count,
            "handovers": len(latencies),
            "handover_median_s": statistics.median(latencies) if latencies else None,
            "handover_p99_s": latencies[int(0.99 * (len(latencies) - 1))] if latencies else None,
            "ordered_by": self._ordered_by(),
            "disabled_because": self.disabled_because,
        }

    def _ordered_by(self) -> str | None:
        """Return what the device waits for, if it does: events or semaphores; host once it cannot."""
        if self._segment is None:
            return None
        return "host" if self._waits_on_host else self._order.kind

    def _count_siblings(self) -> int | None:
        """Return how many other jobs are on the device; None while another thread waits for the turn."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            if self._segment is None:
                return 0
            return len({slot.job for slot in self._segment.slots().values()} - {self.job})
        except (OSError, CrossoverError):
            return None
        finally:
            self._busy.release()


def _depart(order: "DeviceOrder", segment: TurnSegment, pid: int) -> None:
    """Leave, also at the end of the process: first end what is on the device, where siblings wait for it."""
    try:
        if os.getpid() == pid:
            order.close()
    finally:
        segment.leave()


def _channel(process_group: "ProcessGroup | None") -> Any:
    """Return the job's channel, or None for a job of one process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from crossover_ddp._turn_channel import TurnChannel

    channel = TurnChannel(process_group, message_numel(SLOT_COUNT - 1))
    return channel if channel.size > 1 else None


def _resolve_device(device: "torch.device | str | int | None") -> "tuple[torch.device, str]":
    """Return the torch device and the name under which its siblings know it."""
    import torch

    from crossover_ddp._device_order import default_device, device_name

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
        return found, device_name(found)
    return found, os.environ.get("CROSSOVER_DEVICE") or f"cpu-{_machine()}"


def _machine() -> str:
    """Return what all containers of one machine have in common."""
    with open(_BOOT_ID) as file:
        return file.read().strip()


def _check_siblings(segment: TurnSegment, job: int, devices: set[str]) -> None:
    """Refuse siblings that share only some devices: they would have no common order of turns."""
    own = digest("\n".join(sorted(devices)))
    for slot in segment.slots().values():
        if slot.job != job and slot.devices != own:
            raise TurnError(
                f"expected siblings to use the same set of devices, got a job (process {slot.pid}) that shares "
                f"{segment.device} but not all of {sorted(devices)}; give both jobs the same devices, or name "
                "different groups with CROSSOVER_GROUP"
            )
