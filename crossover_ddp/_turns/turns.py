"""One rank's turns: the methods that users call, and the thread that draws, waits and publishes.

[Note: one draw for each acquire]
The lead rank draws turns, and the job's other ranks receive the turns' numbers in the same order.
If a process trains two models, the exchange of one may end before or after the compute of the
other, differently on each rank. So neither the number of turns drawn nor the turn that a rank is in
may depend on whether the rank is inside a turn at that moment. Therefore, in a job of several
ranks, every `acquire` draws a turn, and a rank that is still inside a turn first gives that one
back. If the rank kept both, it would hold a turn that a sibling waits for, while its own peers
already wait behind that sibling: a deadlock. A job that stays side by side draws one turn for
several calls of `acquire` (`Grant.steps`), which are the same calls on all ranks. Therefore a rank
asks for the next turn only once it knows how many calls the last one covers. The turns of all these
calls but the first have no number, and siblings do not see them.

[Note: a turn is for computing]
A rank that waits for data, writes a checkpoint or sleeps inside its turn does not use the device.
Two signs show this. The process uses almost no processor time. On a GPU, moreover, all work is done
on the streams on which this turn began and the last turn ended. If the process has been idle for
longer than a hand-over lasts, and a sibling is waiting, the thread *lends* the turn: it publishes
the turn as given back, on this rank alone. When the rank computes again, it does so beside the
sibling; it never waits inside its turn. Lending removes waits and adds none, so each rank may
decide it separately. Our design.
"""

import contextlib
import functools
import logging
import math
import os
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum, auto
from typing import Any, Final

import torch

from .joining import Membership, leave
from .rules import Grant, Lease, Member, Mode, Patience, Trial, TurnLog, blockers
from .segment import no_fork

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_FAILED_TIMEOUT_S = 1.0
_LATENCIES_KEPT = 100
_CHECK_S, _LONGEST_CHECK_S = 0.005, 0.08
_IDLE_CHECKS = 2
_IDLE_SHARE = 0.1  # a process that computes nothing may run for this fraction of the time
_NO_NUMBER: Final = 0
"""The number of a turn without a number: one of a later `acquire` that the same grant covers."""


class Counters:
    """Statistics about one rank's turns. They outlive the `Turns` object."""

    def __init__(self) -> None:
        # The last known turn number; 0 before the first turn.
        self.turn = 0
        self.count = 0
        self.held_s = 0.0
        self.waited_s = 0.0
        # The mode of the last grant that arrived.
        self.mode = Mode.UNTRIED
        self._hand_overs_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    def hand_over(self, since_s: float, given_back_ns: int) -> None:
        """Record the delay between a sibling's turn and this rank's turn, which starts now.

        Nothing is recorded if the sibling gave its turn back before this rank began to wait.

        Args:
            since_s: when this rank began to wait.
            given_back_ns: when the sibling gave its turn back.
        """
        now_ns = time.monotonic_ns()
        # The sibling's clock may differ, since containers can have their own time namespace.
        if since_s * 1e9 < given_back_ns <= now_ns:
            self._hand_overs_s.append((now_ns - given_back_ns) / 1e9)

    def summary(self) -> dict[str, Any]:
        """Return the statistics for `GPUMutex.stats`, including the last hundred hand-overs."""
        latencies = sorted(self._hand_overs_s)
        return {
            "turn": self.turn,
            "turns": self.count,
            "held_s": self.held_s,
            "waited_s": self.waited_s,
            "turns_pay": {Mode.TURNS: True, Mode.SIDE_BY_SIDE: False}.get(self.mode),
            "handovers": len(latencies),
            "handover_median_s": statistics.median(latencies) if latencies else None,
            "handover_p99_s": latencies[int(0.99 * (len(latencies) - 1))] if latencies else None,
        }


class IdleDetector:
    """Detect from its processor time that the process has computed nothing for a while."""

    def __init__(self) -> None:
        # How many of the last checks in a row have found the process idle, or running.
        self._idle_count = 0
        self._running_count = 0
        self._last_s = time.monotonic()
        self._last_cpu_s = time.process_time()

    @property
    def interval_s(self) -> float:
        """Seconds until the next check.

        Each check takes the GIL, so checks become rarer while the process is busy.
        """
        return min(_LONGEST_CHECK_S, _CHECK_S * 2.0 ** max(0, self._running_count - 1))

    def is_idle(self) -> bool:
        """Check again, and return whether the last two checks in a row found the process idle."""
        now_s = time.monotonic()
        cpu_s = time.process_time()
        if cpu_s - self._last_cpu_s > _IDLE_SHARE * (now_s - self._last_s):
            self._running_count += 1
            self._idle_count = 0
        else:
            self._running_count = 0
            self._idle_count += 1
        self._last_s = now_s
        self._last_cpu_s = cpu_s
        return self._idle_count >= _IDLE_CHECKS


class _TurnPhase(IntEnum):
    """The phase of a turn. A turn only moves forward, and only `_Turn.enter` changes its phase."""

    WANTED = auto()
    """Entered by `Turns.acquire`, which waits for the turn, or begins it at once."""
    ABANDONED = auto()
    """Entered when the wait was interrupted (Ctrl-C). The thread still takes the turn, without
    waiting for siblings, and gives it back."""
    HELD = auto()
    """Entered by `Turns._begin`: the rank is inside, and siblings wait."""
    LENT = auto()
    """Entered by `Turns._lend_if_wanted`: the rank is inside, but siblings do not wait."""
    RETURNED = auto()
    """Entered by `Turns._end`, once the device has done the turn's work."""


class _Turn:
    """One turn of this rank. It lasts from an `acquire` until the device has done the turn's work.

    The turn is published as given back once it is lent or over, and its number is known.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        # The streams on which the turn may compute, see `DeviceOrder.streams`.
        self.streams = streams
        self.phase = _TurnPhase.WANTED
        # None until the number is known; `_NO_NUMBER` if the turn has none.
        self.number: int | None = None
        self.began_s = 0.0
        # Set when the wait is over: the turn has begun, or never will.
        self.awaited = threading.Event()
        # The thread creates it when it first checks the turn.
        self.idle_detector: IdleDetector | None = None

    def enter(self, phase: _TurnPhase) -> None:
        """Move forward to a phase, unless the turn is already in a later one.

        The caller holds the lock of `Turns`.
        """
        self.phase = max(self.phase, phase)

    @property
    def is_given_back(self) -> bool:
        """Whether the turn is lent or over. Siblings then stop waiting once its number is known."""
        return self.phase >= _TurnPhase.LENT


class Phase(Enum):
    """The phase of a `Turns` object. Only `Turns._enter` changes it."""

    TAKING_TURNS = auto()
    """Entered by the constructor, after the rank has joined its siblings."""
    CLOSING = auto()
    """Entered by `Turns.close`. Calls do nothing. The thread ends its wait, finishes the work that
    is already queued, and leaves."""
    LEFT = auto()
    """Entered by `Turns._leave`: after `Turns.close`, or after an error. Calls do nothing."""


class Turns:
    """Take the turns of one rank on its device, one after the other. Thread-safe.

    If anything fails, the thread leaves the siblings, and from then on every call does nothing.
    Calls in a forked child do nothing either.

    Args:
        membership: this rank's membership, from `joining.join`.
        lease: decides how long siblings wait for a turn of this job.
        patience: decides how long this rank waits for a sibling's turn.
        counters: the statistics to update.
        lends: whether a turn may end early while the process computes nothing, see
            [Note: a turn is for computing].
        on_failure: called with the error on the thread of turns. It must not raise.
    """

    def __init__(
        self,
        membership: Membership,
        lease: Lease,
        patience: Patience,
        counters: Counters,
        lends: bool,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.membership = membership
        self.counters = counters
        # Whether the last `acquire` had to wait for siblings' turns, and there was a sibling.
        self.shared = True
        self._segment = membership.segment
        self._order = membership.order
        self._channel = membership.channel
        self._lease = lease
        self._patience = patience
        self._on_failure = on_failure
        self._lends = lends
        self._pid = os.getpid()
        self._phase = Phase.TAKING_TURNS

        # Guards the fields of this paragraph, and the phases and numbers of turns. It is held only
        # for moments. It is reentrant, since a signal handler may run at such a moment.
        self._lock = threading.RLock()
        # The turn that the rank is inside.
        self._current: _Turn | None = None
        # The turns that threads wait for.
        self._wanted: set[_Turn] = set()
        # How many further calls of `acquire` the last grant covers.
        self._steps_left = 0

        # Only the thread uses the fields of this paragraph. Each `acquire` *claims* one grant, and
        # `request` may claim it in advance.
        self._trial = Trial(membership.job)
        self._log = TurnLog(self._trial)
        # How many claims `request` has made for a later `acquire`.
        self._requested = 0
        # How many claims have no grant yet. If there are any, the next grant has been asked for.
        self._outstanding = 0
        # Grants that have been claimed but that no turn has taken yet, in order.
        self._grants: deque[Grant] = deque()
        # Turns that have begun, and may be over, without a grant.
        self._unnumbered: deque[_Turn] = deque()
        # Which warnings were given: True if this rank's own limit ended the wait, False if a lease.
        self._warned_of: set[bool] = set()

        # Work for the thread; None ends it. `SimpleQueue.put` is safe in a signal handler.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="crossover-turn", daemon=True)
        if not membership.is_lead:
            self._channel.listen(self._on_grant)
        self._thread.start()

    # --- for callers ----------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether the rank is inside a turn."""
        return self._current is not None

    @property
    def has_peers(self) -> bool:
        """Whether the job has other ranks."""
        return self._channel.size > 1

    def count_siblings(self) -> int:
        """Return how many other jobs use the device."""
        return len({each.job for each in self._segment.members()} - {self.membership.job})

    def request(self) -> None:
        """Draw the turn of the next `acquire` in advance, if that call would wait for siblings."""
        if self.counters.mode.waits:
            self._enqueue(self._request)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Wait for the job's next turn and begin it, like `GPUMutex.acquire`.

        Return whether the rank may compute, which is false only if ``blocking`` is false.

        Args:
            blocking: if false, return False instead of waiting for siblings.
        """
        if not self._is_active():
            return True
        inside = self._current
        streams: Sequence[torch.cuda.Stream] = ()
        if self._order is not None:
            if inside is None or self.has_peers:
                self._order.check_usable()
            streams = self._order.streams()
        if inside is not None and not self.has_peers:
            # Siblings may be waiting for this turn, so this rank must not wait for them. It stays
            # inside its turn.
            self._enqueue(self._take_requested_number, inside)
            return True
        try:
            shared = self.counters.mode.waits and self.count_siblings() > 0
        except Exception as error:  # failing turns cost speed, never the job
            self._fail(error)
            return True
        if shared and not blocking:
            return False
        if inside is not None:
            # See [Note: one draw for each acquire]. The turn ends behind its own streams, since
            # another thread, on another stream, may take the next one.
            self.release(inside.streams)
        self.shared = shared
        turn = _Turn(streams)
        if shared:
            self._wait(turn)
        else:
            self._begin_without_number(turn)
        return True

    def _begin_without_number(self, turn: _Turn) -> None:
        """Begin a turn that waits for no sibling. The thread finds out its number later.

        See [Note: alone on a device] in `rules`. A turn side by side does not wait either.
        """
        self._begin(turn)
        if self._use_grant_again():
            turn.number = _NO_NUMBER
        else:
            self._enqueue(self._claim_number, turn)

    def _wait(self, turn: _Turn) -> None:
        with self._lock:
            if self._phase is not Phase.TAKING_TURNS:
                return
            self._wanted.add(turn)
        self._enqueue(self._take, turn)
        try:
            turn.awaited.wait()
        except BaseException:  # Ctrl-C: siblings need not wait for an unused turn
            with self._lock:
                turn.enter(_TurnPhase.ABANDONED)
            self._segment.bells.ring_own()
            self._enqueue(self._release_abandoned, turn)
            raise

    def _release_abandoned(self, turn: _Turn) -> None:
        if turn is self._current:
            self.release()

    def release(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Give the turn back if the rank is inside one, like `GPUMutex.release`.

        Args:
            streams: further streams whose queued work belongs to the turn.
        """
        if not self._is_active() or not self.holding:
            return
        if self._order is not None:
            self._order.check_usable()
        turn = self._take_current()
        if turn is None:
            return
        try:
            end = self._mark(streams)
            if end is None:
                self._end(turn)
            else:
                self._enqueue(self._end, turn, end)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Leave the siblings once the device has finished the last turn, or after 10 s.

        It is safe to call this more than once, on any thread.
        """
        if os.getpid() != self._pid:
            return
        self._enter(Phase.CLOSING)
        with contextlib.suppress(Exception):
            self._segment.bells.ring_own()
            self._channel.interrupt()
        self._jobs.put(None)
        # Python's collector may run this method while this thread holds `no_fork`, and a signal
        # handler may run it while this thread holds the lock. The thread of turns needs both to
        # end, so it is not waited for then.
        is_inside = no_fork._is_owned() or self._lock._is_owned()  # type: ignore[attr-defined]
        if threading.current_thread() is not self._thread and not is_inside:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():  # the device has not finished the turn
                self._leave()

    # --- the phase ------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        """Change the phase.

        This takes no lock, since `close` may run in a signal handler or in Python's collector. So
        `close` may replace LEFT with CLOSING. The difference matters only to `_leave`, which may
        run twice.
        """
        if self._phase is not Phase.LEFT:
            self._phase = phase

    def _is_active(self) -> bool:
        return self._phase is Phase.TAKING_TURNS and os.getpid() == self._pid

    def _leave(self) -> None:
        with self._lock:
            if self._phase is Phase.LEFT:
                return
            self._enter(Phase.LEFT)
            self._current = None
        leave(self.membership)
        for turn in self._wanted:
            turn.awaited.set()

    def _fail(self, error: Exception) -> None:
        """Make the thread leave the siblings because of an error on the calling thread."""
        self._enqueue(_raise, error)
        self._thread.join(_FAILED_TIMEOUT_S)

    # --- the thread -----------------------------------------------------------------------------

    def _enqueue(self, job: Callable[..., None], *arguments: Any) -> None:
        if self._is_active():
            self._jobs.put(functools.partial(job, *arguments))

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
                del job  # it keeps a turn and its streams alive
        except Exception as error:
            if self._phase is Phase.TAKING_TURNS:
                self._on_failure(error)
        self._leave()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for the next job and return it.

        Meanwhile, lend the turn if the rank computes nothing.
        """
        while True:
            turn = self._current
            if turn is None or turn.is_given_back or not self._may_lend(turn):
                return self._jobs.get()
            turn.idle_detector = turn.idle_detector or IdleDetector()
            try:
                return self._jobs.get(timeout=turn.idle_detector.interval_s)
            except queue.Empty:
                if turn.idle_detector.is_idle():
                    self._lend_if_wanted(turn)

    def _may_lend(self, turn: _Turn) -> bool:
        return self._lends and self.shared and bool(turn.number)

    def _lend_if_wanted(self, turn: _Turn) -> None:
        """Lend a turn if a sibling is waiting; see [Note: a turn is for computing]."""
        own_job = self.membership.job
        members = self._segment.members()
        wanted = any(each.job != own_job and each.queued > each.started for each in members)
        if wanted and (self._order is None or self._order.is_done(turn.streams)):
            self._give_back(turn, _TurnPhase.LENT)

    # --- the beginning and the end of a turn ----------------------------------------------------

    def _begin(self, turn: _Turn) -> None:
        turn.began_s = time.monotonic()
        with self._lock:
            before = self._current
            if self._phase is Phase.TAKING_TURNS:
                turn.enter(_TurnPhase.HELD)
                self._current = turn
        if before is not None:  # another thread has acquired at the same moment
            self._enqueue(self._end, before, self._mark(before.streams))
        self.counters.count += 1

    def _take_current(self) -> _Turn | None:
        with self._lock:
            turn, self._current = self._current, None
        return turn

    def _mark(self, streams: Sequence[torch.cuda.Stream]) -> torch.cuda.Event | None:
        return self._order.mark(streams) if self._order is not None else None

    def _end(self, turn: _Turn, end: torch.cuda.Event | None = None) -> None:
        """Wait until the device has reached ``end``, then give the turn back.

        The wait counts as part of the turn.
        """
        if end is not None and self._order is not None:
            self._order.wait(end)
        self.counters.held_s += time.monotonic() - turn.began_s
        self._give_back(turn, _TurnPhase.RETURNED)

    def _give_back(self, turn: _Turn, phase: _TurnPhase) -> None:
        """Mark a turn as given back, and publish this unless the turn was lent before.

        If the turn's number is not known yet, `_give_number` publishes it later.

        Args:
            turn: the turn to give back.
            phase: the phase that the turn enters: LENT or RETURNED.
        """
        with self._lock:
            was_given_back = turn.is_given_back
            turn.enter(phase)
            if was_given_back:
                return
            if self._lease.note(time.monotonic() - turn.began_s):
                self._segment.publish(lease_s=self._lease.seconds)
            if turn.number is not None:
                self._publish_returned(turn.number)

    def _give_number(self, turn: _Turn, number: int) -> None:
        """Store a turn's number, and publish the turn as given back if it is, else as started."""
        self.counters.turn = number or self.counters.turn
        with self._lock:
            turn.number = number
            if turn.is_given_back:
                self._publish_returned(number)
            elif number != _NO_NUMBER:
                self._segment.publish(started=number)

    def _publish_returned(self, number: int) -> None:
        if number == _NO_NUMBER:
            self._segment.count_turn()
        else:
            self._segment.publish_returned(number)

    # --- claims and grants ----------------------------------------------------------------------

    def _request(self) -> None:
        self._claim()
        self._requested += 1

    def _claim_for_acquire(self) -> None:
        """Claim a grant for an `acquire`, unless `request` has already claimed it."""
        if self._requested:
            self._requested -= 1
        else:
            self._claim()

    def _claim(self) -> None:
        """Claim one more grant: the last one again if it covers this step, else a new one."""
        self._receive_grants()
        if self._use_grant_again():
            self._grants.append(Grant(_NO_NUMBER, (), self.counters.mode))
            return
        self._outstanding += 1
        if self._outstanding == 1:
            self._draw()

    def _use_grant_again(self) -> bool:
        """Use the last grant for one more step, and return whether it covers that step."""
        with self._lock:
            if not self._steps_left:
                return False
            self._steps_left -= 1
            return True

    def _receive_grants(self, *, wait: bool = False) -> None:
        """Receive the grant that was asked for, if it has arrived, and ask for the next one.

        This repeats until no claim is outstanding or no grant has arrived.

        Args:
            wait: block until the first grant arrives; default False.
        """
        while self._outstanding and (wait or self._channel.arrived):
            wait = False
            grant = self._channel.receive()
            self.counters.mode = grant.mode
            # The grant serves as many outstanding claims as it covers. The first gets its number.
            covered = min(grant.steps, self._outstanding)
            self._grants.append(grant)
            self._grants.extend([Grant(_NO_NUMBER, (), grant.mode)] * (covered - 1))
            self._outstanding -= covered
            with self._lock:
                self._steps_left += grant.steps - covered
            if self._outstanding:
                self._draw()

    def _next_grant(self) -> Grant:
        if not self._grants:
            self._receive_grants(wait=True)
        return self._grants.popleft()

    def _claim_number(self, turn: _Turn) -> None:
        """Claim a grant for a turn that has already begun."""
        self._claim_for_acquire()
        self._unnumbered.append(turn)
        self._number_turns()

    def _on_grant(self) -> None:
        """Handle the arrival of a grant. The channel calls this on its own thread."""
        if self._unnumbered or self._outstanding > 1:
            self._enqueue(self._number_turns)

    def _number_turns(self, *, wait: bool = False) -> None:
        """Assign the numbers that have arrived to the turns that have begun without one.

        Args:
            wait: block until all these turns have numbers; default False.
        """
        self._receive_grants()
        while self._unnumbered and (wait or self._grants):
            self._give_number(self._unnumbered.popleft(), self._next_grant().turn)

    def _take_requested_number(self, inside: _Turn) -> None:
        """Assign the number that was requested meanwhile to the current turn, which continues.

        This happens only in a job of one rank.
        """
        if self._requested:
            self._requested -= 1
            self._give_number(inside, self._next_grant().turn)

    # --- drawing, on the lead rank --------------------------------------------------------------

    def _draw(self) -> None:
        """Draw a turn and send its grant. Ranks other than the lead rank ask for a grant instead.

        The lead rank appends to the log, then looks at the members, then reads the log. With any
        other order, the exhaustive model finds turns that overlap.
        """
        if not self.membership.is_lead:
            return self._channel.ask()
        mode_before = self._trial.mode
        if not self._log.read_numel:
            # Read the old records before drawing: a log of several days takes seconds to read, and
            # siblings wait for a rank that has drawn.
            self._look_and_read(self._segment.drawn())
        turn = self._segment.draw_turn()
        members = self._look_and_read(turn - 1)
        self._channel.send(self._log.grant(turn, self.membership.job, members))
        self._follow_trial(mode_before)

    def _look_and_read(self, last: int) -> Sequence[Member]:
        members = self._segment.members(in_order=True)
        self._trial.look(members)
        self._log.read(self._segment.read_log(self._log.read_numel, last))
        return members

    def _follow_trial(self, mode_before: Mode) -> None:
        """Publish this job's part in the trial; see [Note: trial of turns] in `rules`."""
        trial, publish = self._trial, self._segment.publish
        if trial.mode is not mode_before:
            publish(mode=trial.mode)
            if trial.mode in (Mode.TURNS, Mode.SIDE_BY_SIDE) and trial.vote.pairs:
                logger.info(
                    "turns on %s: a step takes %.4f s in turns and %.4f s side by side with "
                    "%d sibling(s); from now on %s",
                    self._segment.device,
                    trial.vote.turns_s,
                    trial.vote.side_s,
                    self.count_siblings(),
                    "in turns" if trial.mode.waits else "side by side",
                )
        if trial.drew(time.monotonic()):
            # Siblings ignore a vote without pairs, so they never use a half-written one.
            publish(pairs=0, tried=trial.begun_at)
            publish(turns_s=trial.vote.turns_s, side_s=trial.vote.side_s)
            publish(pairs=trial.vote.pairs)
        word = trial.due()
        if word is not None:
            self._segment.write_word(word)

    # --- waiting --------------------------------------------------------------------------------

    def _take(self, turn: _Turn) -> None:
        """Begin the next turn once siblings' earlier turns are over."""
        # Another thread may have acquired meanwhile; see [Note: one draw for each acquire].
        before = self._take_current()
        if before is not None:
            self._end(before, self._mark(before.streams))
        since_s = time.monotonic()
        self._claim_for_acquire()
        self._number_turns(wait=True)
        grant = self._next_grant()
        members = self._wait_for_siblings(grant, turn)
        if members:
            # Count the hand-over from the last of the turns that this one has waited for.
            last = dict(grant.after)
            over = [each for each in members if last.get(each.job, math.inf) <= each.returned]
            given_back_ns = max((each.returned_at_ns for each in over), default=0)
            self.counters.hand_over(since_s, given_back_ns)
        self.counters.waited_s += time.monotonic() - since_s
        self._patience.started()
        if self._phase is not Phase.TAKING_TURNS:
            return
        self._give_number(turn, grant.turn)
        self._begin(turn)
        with self._lock:
            self._wanted.discard(turn)
        turn.awaited.set()

    def _wait_for_siblings(self, grant: Grant, turn: _Turn) -> Sequence[Member]:
        """Block until ``grant`` no longer has to wait for any sibling's turn.

        Return the members on the device at that moment. The result is empty if there was nothing to
        wait for, or if the wait was ended.
        """
        segment = self._segment
        waited = False
        while self._phase is Phase.TAKING_TURNS and turn.phase is not _TurnPhase.ABANDONED:
            members = segment.members()
            waiting = blockers(grant, self.membership.job, members)
            left_s = self._patience.remaining(waiting, members, time.monotonic())
            self._warn_of_lost_patience()
            if left_s is None:
                return members if waited else ()
            if not waited:
                segment.publish(queued=grant.turn)
                waited = True
            segment.bells.wait([blocker.member.process for blocker in waiting], left_s)
        return ()

    def _warn_of_lost_patience(self) -> None:
        for lost in self._patience.lost:
            own_limit = lost.waited_s < lost.lease_s
            if own_limit in self._warned_of:
                continue
            self._warned_of.add(own_limit)
            if own_limit:
                logger.warning(
                    "a sibling on %s kept its turn for %.1f s, which is less than its lease of "
                    "%.1f s, but siblings may delay this job by at most a quarter of its process "
                    "group's timeout; this rank computes beside the sibling (warned once)",
                    self._segment.device,
                    lost.waited_s,
                    lost.lease_s,
                )
            else:
                logger.warning(
                    "a sibling on %s kept its turn for longer than its lease of %.1f s; this rank "
                    "computes beside it (warned once)",
                    self._segment.device,
                    lost.lease_s,
                )


def _raise(error: Exception) -> None:
    raise error
