"""The GPU mutex: jobs that share devices take turns on them.

A turn belongs to a job, all its ranks; every device sees the same order of turns; see [Note: turn order] in
`crossover_ddp._turns.rules`. `CrossoverState` and the other hooks use a mutex by themselves; this class
is for whoever wants turns without a hook, and for giving the turn away during evaluation and checkpoints.

[Note: one draw for each acquire]
The lead rank draws turns, and the job's other ranks take their numbers in the same order. Where a process trains two
models, one's exchange may end before or after the other's compute, differently on each rank. So neither the number of
turns drawn nor which of them a rank is in may depend on whether it is inside a turn at that moment: in a job of
several ranks every `acquire` draws one, and a rank that is still inside a turn gives that back first. If it kept both,
it would stay before a sibling that its own peers, already behind that sibling, wait for: a deadlock.
"""

import contextlib
import datetime
import logging
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from crossover_ddp._system import environment
from crossover_ddp._turns.group_timeout import patience_limit_s
from crossover_ddp._turns.joining import Membership, NotJoinedError, join
from crossover_ddp._turns.rules import Grant, Lease, Patience, TurnLog, blockers
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp._turns.slots import EVENT_HANDLE_BYTES, Slot
from crossover_ddp.errors import CrossoverError, UnsupportedConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

    from crossover_ddp._turns.channel import TurnChannel

logger = logging.getLogger(__name__)

CLOSED = "closed"
_LATENCIES_KEPT = 10_000
_CLOSE_TIMEOUT_S = 5.0
_LEAVING_LOOK_S = 0.01
_HOOK_JOIN_TIMEOUT_S = 60.0  # the ranks come from the same exchange

_P = ParamSpec("_P")


def turns_disabled() -> bool:
    """Tell whether ``CROSSOVER_DISABLE=1`` is set."""
    return environment.is_set(environment.DISABLE)


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
            four of the job's long recent turns (an outlier does not count), at least 5 s and at most 60 s. However long
            siblings' leases are, a rank waits in one `acquire` for at most a quarter of its own group's timeout.

    On failure: `SegmentError` for a foreign or malformed segment, `TurnError` when siblings share only some of the
    job's devices, on every rank alike; nothing is held then. A hook that makes its own mutex trains on without turns
    instead, with one warning.

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
        if isinstance(lease, datetime.timedelta):
            lease = lease.total_seconds()
        if lease is not None and not lease > 0:
            raise ValueError(f"expected a lease > 0 seconds, got lease={lease}; leave it out for the default")
        self._prepare(name, lease, process_group)
        if self.disabled_because is None:
            try:
                self._enter(
                    join(self.name, device, process_group, lease_s=self._lease.seconds, timeout_s=None)
                )
            except NotJoinedError as error:
                raise error.reason from error.__cause__

    @classmethod
    def for_hook(cls, device: "torch.device | None", process_group: "ProcessGroup") -> "GPUMutex":
        """Return the mutex of a hook's own: where the job cannot join it takes no turns, with one warning.

        Raises wrong arguments only (a bad ``CROSSOVER_GROUP``): nobody asked for a mutex, so none may stop the job.
        **Collective.**
        """
        mutex = cls.__new__(cls)
        mutex._prepare(None, None, process_group)
        if mutex.disabled_because is None:
            try:
                membership = join(
                    mutex.name,
                    device,
                    process_group,
                    lease_s=mutex._lease.seconds,
                    timeout_s=_HOOK_JOIN_TIMEOUT_S,
                )
            except NotJoinedError as error:
                if isinstance(error.reason, ValueError | TypeError):
                    raise error.reason from error.__cause__
                mutex._stay_out(error, process_group.rank())
            else:
                mutex._enter(membership)
        return mutex

    def _prepare(self, name: str | None, lease_s: float | None, process_group: "ProcessGroup | None") -> None:
        self.name = name if name is not None else os.environ.get(environment.GROUP, environment.DEFAULT_GROUP)
        self._lease = Lease(None if lease_s is None else float(lease_s))
        self._busy = threading.RLock()
        self.closed = False  # `close` was called, whether or not turns had failed before
        self.device = ""
        self._channel: TurnChannel | None = None
        self._segment: TurnSegment | None = None
        self.disabled_because = "CROSSOVER_DISABLE is set" if turns_disabled() else None
        self._reset_counters(patience_limit_s(process_group))

    def _reset_counters(self, patience_limit_s: float) -> None:
        self._holding = False
        # [Note: one draw for each acquire]
        self._asked = 0  # requests whose `acquire` is still to come
        self._drawn = 0  # turns drawn for this job whose numbers this rank has not looked at
        self._grants: deque[Grant] = deque()  # of those, on the lead rank
        self._turn = 0
        self._turn_count = 0
        self._started_s = 0.0
        self._held_s = 0.0
        self._waited_s = 0.0
        self._handovers_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._shared = True
        self._patience = Patience(patience_limit_s)
        self._warned_of: set[bool] = set()
        self._log = TurnLog()
        self._waits_on_host = False

    # --- joining and leaving -------------------------------------------------------------------------------

    def _enter(self, membership: Membership) -> None:
        self.job, self.device, self._is_lead = membership.job, membership.device, membership.is_lead
        self._channel, self._order, self._segment = membership.channel, membership.order, membership.segment
        self._waits_on_host = membership.order.waits_on_host
        self._finalizer = weakref.finalize(self, _depart, membership, os.getpid())
        logger.info("takes turns on %s with the jobs of group %r (job %x)", self.device, self.name, self.job)

    def _stay_out(self, error: NotJoinedError, rank: int) -> None:
        """Train on without turns. What all ranks know, rank 0 tells."""
        self.disabled_because = f"{type(error.reason).__name__}: {error.reason}"
        logger.log(
            logging.INFO if error.agreed and rank else logging.WARNING,
            "cannot take turns in group %r: %s. This job trains on without them: same results, no crossover",
            self.name,
            error.reason,
        )

    def close(self) -> None:
        """Leave for good: siblings no longer wait for this job. Not collective; may be called twice.

        A turn that another thread waits for ends at once, without the turn.
        """
        self.closed = True
        segment = self._segment
        if segment is not None:
            segment.ring_self()
            if self._channel is not None:
                self._channel.interrupt()
        idle = self._busy.acquire(timeout=_CLOSE_TIMEOUT_S)  # not idle: another thread waits for the device
        try:
            if self._segment is not None:
                self._leave(CLOSED)
        finally:
            if idle:
                self._busy.release()

    def _leave(self, reason: str) -> None:
        self.disabled_because = reason
        self._segment = None
        self._holding = False
        self._finalizer()

    def _give_up(self, error: Exception) -> None:
        if self._segment is None:  # closed meanwhile by another thread
            return
        if self.closed:  # whoever closes ends the waits of other threads
            self._leave(CLOSED)
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
        return f"GPUMutex(name={self.name!r}, device={self.device or None!r}, {state})"

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
        while segment is not None and self._holding and self._drawn > self._asked:
            grant = self._take_grant()
            self._turn, self._shared = grant.turn, grant.shared
            segment.publish_started(grant.turn)

    @_never_raises
    def request(self) -> None:
        """Join the queue for the turn of the next `acquire` before it is needed, so that its number travels meanwhile.

        Optional, once for an `acquire`, and like it called by all ranks. Never blocks, never raises.
        """
        self._draw()
        self._asked += 1

    def _draw(self) -> None:
        """Draw one turn, see [Note: one draw for each acquire]."""
        self._drawn += 1
        if not self._is_lead:
            return
        segment = self._segment
        assert segment is not None
        turn = segment.draw_turn()
        self._log.read(segment.read_log(self._log.read_numel, turn - 1))
        grant = self._log.grant(turn, self.job, segment.members())
        self._grants.append(grant)
        if self._channel is not None:
            self._channel.send(grant)

    def _take_grant(self) -> Grant:
        if self._is_lead:
            grant = self._grants.popleft()
        else:
            assert self._channel is not None
            grant = self._channel.receive()
        self._drawn -= 1
        return grant

    @_never_raises
    def acquire(self, *, ahead: bool = False, streams: "Sequence[torch.cuda.Stream]" = ()) -> None:
        """Block until this job's turn has come on this device; on a GPU let the current stream wait as well.

        Siblings that die are passed over at once, others after their lease. If turns fail the job goes on
        without them. Inside a turn a job of one rank goes on at once, one of several ranks gives it back first.

        Args:
            ahead: go on at once although the turn's number is not known yet; for callers that have seen
                `shared` to be False. A sibling that joins at this very moment may compute beside this turn.
            streams: further streams of the GPU that begin after the siblings' turns; default the current one alone.

        On failure: `UnsupportedConfigurationError` while the current stream captures a CUDA graph, whose replays
            would take no turn; nothing has changed then. Raises nothing else.
        """
        if not self._holding or self._channel is not None:
            self._order.check_usable()
        if self._channel is not None:  # see [Note: one draw for each acquire]
            self._give_back()
        if self._asked:
            self._asked -= 1
        elif not self._holding:
            self._draw()
        if self._holding:  # waiting for siblings that wait for us would cost a lease
            return
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
        waited_s = time.monotonic() - since_s
        self._waited_s += waited_s
        if self._patience.lost and self._channel is not None:
            self._channel.tell_wait(grant.turn, waited_s)  # before peers that wait for this rank give back
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
            members = segment.members()
            waiting = blockers(grant, self.job, members)
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
                logger.warning("%s; going on beside it (said once)", lost.words(self.device))

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
        """Have siblings tell their turns late from their next one on; see [Note: telling late]."""
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
        self._give_back(streams)

    def _give_back(self, streams: "Sequence[torch.cuda.Stream]" = ()) -> None:
        self._settle()
        if not self._holding:
            return
        self._holding = False
        held_s = time.monotonic() - self._started_s
        self._held_s += held_s
        segment, turn = self._segment, self._turn
        assert segment is not None
        if self._lease.note(self._own_seconds(turn, held_s)):
            segment.publish_lease(self._lease.seconds)
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

    def _own_seconds(self, turn: int, held_s: float) -> float:
        """Return how much of a turn was the job's own doing.

        A rank's own waits for siblings end before its turn begins. But inside it may wait for a peer that still waits
        for a stopped sibling. Such a peer tells how long that took, and who asks does so only where it matters.
        """
        if self._channel is None or not self._lease.matters(held_s):
            return held_s
        return max(0.0, held_s - self._channel.told_wait_s(turn))

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
            "device": self.device or None,
            "job": f"{getattr(self, 'job', 0):x}",
            "turn": self._turn,
            "turns": self._turn_count,
            "holding": self._holding,
            "siblings": self._count_siblings(),
            "held_s": self._held_s,
            "waited_s": self._waited_s,
            "lease_s": self._lease.seconds,
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


def _depart(membership: Membership, pid: int) -> None:
    """Leave, also at the end of the process: first end what is on the device, where siblings wait for it."""
    try:
        if os.getpid() == pid:
            membership.order.close()
    finally:
        membership.segment.leave()
        if membership.channel is not None:
            membership.channel.close(tell=membership.is_lead)
