"""One rank's turns: what the mutex's callers ask for, and the one thread that draws, waits and publishes. Our design.

[Note: one draw for each acquire]
The lead rank draws turns, and the job's other ranks take their numbers in the same order. Where a process trains two
models, one's exchange may end before or after the other's compute, differently on each rank. So neither the number of
turns drawn nor which of them a rank is in may depend on whether it is inside a turn at that moment: in a job of
several ranks every `acquire` draws one, and a rank that is still inside a turn gives that back first. If it kept both,
it would stay before a sibling that its own peers, already behind that sibling, wait for: a deadlock. A job that stays
side by side draws one turn for several `acquire` (`Grant.steps`), the same ones on all ranks: so the next turn is asked
for once it is known for how many the last one was. Those behind the first have no number, and siblings do not see them.

[Note: a turn is for computing]
A rank that waits for data, writes a checkpoint or sleeps inside its turn does not use the device. That shows in the
processor time of the process, and on a GPU also in the streams on which the turn began and the last one ended, which
have done all that they were given. Once both have stood still for longer than a hand-over lasts while a sibling queues,
the thread publishes the turn as given back, on this rank alone. When the rank computes again it does so beside the
sibling: it never waits inside its turn. That takes waits away and adds none, so ranks need not do it alike.
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
from typing import Any

import torch

from .joining import Membership, leave
from .rules import Grant, Lease, Member, Mode, Patience, Trial, TurnLog, blockers
from .segment import no_fork

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_FAILED_TIMEOUT_S = 1.0
_LATENCIES_KEPT = 100
_LOOK_S, _LONGEST_LOOK_S = 0.005, 0.08
_IDLE_LOOKS = 2
_IDLE = 0.1  # part of the time in which a process that computes nothing may run


class Counters:
    """What one rank has seen of its turns; lives on when they have ended."""

    def __init__(self) -> None:
        self.turn = 0
        """The number of the last turn, as far as it is known; 0 before the first."""
        self.count = 0
        self.held_s = 0.0
        self.waited_s = 0.0
        self.mode = Mode.UNTRIED
        """How the last turn was to be computed, as far as it is known."""
        self._hand_overs_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    def hand_over(self, since_s: float, given_back_ns: int) -> None:
        """Count a turn for which this rank has waited ``since_s``, and which a sibling gave back at that moment."""
        now_ns = time.monotonic_ns()
        # A sibling's clock may be another one: containers have time namespaces.
        if since_s * 1e9 < given_back_ns <= now_ns:
            self._hand_overs_s.append((now_ns - given_back_ns) / 1e9)

    def summary(self) -> dict[str, Any]:
        """Return the figures, as in `GPUMutex.stats`; hand-overs are the last hundred."""
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


class Looks:
    """How long the process has computed nothing while a turn lasted."""

    def __init__(self) -> None:
        self._idle = self._ran = 0
        self._last_s, self._last_cpu_s = time.monotonic(), time.process_time()

    @property
    def interval_s(self) -> float:
        """Time until the next look. Each takes Python's lock from training, so who computes is seldom looked at."""
        return min(_LONGEST_LOOK_S, _LOOK_S * 2.0 ** max(0, self._ran - 1))

    def is_idle(self) -> bool:
        """Look once more."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        ran = cpu_s - self._last_cpu_s > _IDLE * (now_s - self._last_s)
        self._idle = 0 if ran else self._idle + 1
        self._ran = self._ran + 1 if ran else 0
        self._last_s, self._last_cpu_s = now_s, cpu_s
        return self._idle >= _IDLE_LOOKS


class _Turn:
    """A turn that is wanted, or has begun. It is published as given back once it is over and its number is known."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self.streams = streams
        self.number: int | None = None
        """None as long as it is not known, 0 if it has none."""
        self.began_s = 0.0
        self.awaited = threading.Event()
        """Set when it has begun, or never will."""
        self.given_up = False
        self.returned = False
        """Whether it was given back, perhaps before it was over."""
        self.looks: Looks | None = None


class Turns:
    """Take the turns of one rank on its device, one after the other. Thread-safe.

    If anything fails the thread leaves the siblings, and every call does nothing from then on; so it is in a fork.

    Args:
        lends: whether a turn ends early while the process computes nothing, see [Note: a turn is for computing].
        on_failure: called with the error, on the thread. It must not raise.
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
        self._segment, self._order, self._channel = (
            membership.segment,
            membership.order,
            membership.channel,
        )
        self.shared = True
        """Whether a sibling was on the device when the last turn began, and the turn was to wait for it."""
        self._lease, self._patience, self._on_failure = lease, patience, on_failure
        self._lends = lends
        self._current: _Turn | None = None
        # Held for moments only: the current turn, numbers and ends, who waits. A signal's handler may come in one.
        self._lock = threading.RLock()
        self._more = 0  # for how many further `acquire` the last grant is
        self._wanted: set[_Turn] = set()
        self._ended = False
        self._closing = False
        self._pid = os.getpid()
        # What follows is the thread's own.
        self._trial = Trial(membership.job)
        self._log = TurnLog(self._trial)
        self._requested = 0  # claimed for an `acquire` that is still to come
        self._unknown = 0  # claimed, and it is not known with which grant: for the first of them one was asked for
        self._grants: deque[Grant] = deque()  # of those claimed that are known
        self._unnumbered: deque[_Turn] = deque()  # turns begun whose grants have not come
        self._warned_of: set[bool] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="crossover-turn", daemon=True)
        if not membership.is_lead:
            self._channel.listen(self._grant_came)
        self._thread.start()

    # --- for callers ---------------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether the rank is inside a turn."""
        return self._current is not None

    @property
    def has_peers(self) -> bool:
        """Whether the job has other ranks."""
        return self._channel.size > 1

    def count_siblings(self) -> int:
        """Return how many other jobs are on the device."""
        return len({each.job for each in self._segment.members()} - {self.membership.job})

    def request(self) -> None:
        """Draw the turn of the next `acquire`, if that would wait for it."""
        if self.counters.mode.waits:
            self._put(self._request)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Begin the job's next turn when it has come; as `GPUMutex.acquire`."""
        if not self._is_here():
            return True
        order, inside = self._order, self._current
        streams: Sequence[torch.cuda.Stream] = ()
        if order is not None:
            if inside is None or self.has_peers:
                order.check_usable()
            streams = order.streams()
        if (
            inside is not None and not self.has_peers
        ):  # siblings wait for this rank: it must not wait for them
            self._put(self._pass_request, inside)
            return True
        try:
            shared = self.counters.mode.waits and self.count_siblings() > 0
        except Exception as error:  # promise 3: giving up on turns costs speed, never the job
            self._fail(error)
            return True
        if shared and not blocking:
            return False
        if inside is not None:  # see [Note: one draw for each acquire]
            self.release(inside.streams)  # another thread's stream may take the next turn
        self.shared, turn = shared, _Turn(streams)
        if shared:
            self._wait(turn)
            return True
        # See [Note: alone on a device] in `rules`; side by side nobody is waited for, either.
        self._begin(turn)
        if self._takes_more():
            turn.number = 0
        else:
            self._put(self._number, turn)
        return True

    def _wait(self, turn: _Turn) -> None:
        with self._lock:
            if self._ended:
                return
            self._wanted.add(turn)
        self._put(self._take, turn)
        try:
            turn.awaited.wait()
        except BaseException:  # Ctrl-C: siblings need not wait for a turn that nobody uses
            turn.given_up = True
            self._segment.bells.ring_own()
            self._put(self._give_up, turn)
            raise

    def _give_up(self, turn: _Turn) -> None:
        if turn is self._current:
            self.release()

    def release(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Give the turn back, if the rank is inside one; as `GPUMutex.release`."""
        if not self._is_here() or not self.holding:
            return
        if self._order is not None:
            self._order.check_usable()
        if (turn := self._take_current()) is None:
            return
        try:
            end = self._mark(streams)
            if end is None:
                self._end(turn)
            else:
                self._put(self._end, turn, end)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Leave the siblings, once the device has done the last turn, or after 10 s. May be called again."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        with contextlib.suppress(Exception):
            self._segment.bells.ring_own()
            self._channel.interrupt()
        self._jobs.put(None)
        # Python's collector may close a mutex inside of `no_fork`, a signal's handler inside of the lock: without them
        # the thread cannot end.
        is_inside = no_fork._is_owned() or self._lock._is_owned()  # type: ignore[attr-defined]
        if threading.current_thread() is not self._thread and not is_inside:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():  # the device does not come to the end
                self._leave()

    def _is_here(self) -> bool:
        return not self._ended and os.getpid() == self._pid

    def _put(self, job: Callable[..., None], *arguments: Any) -> None:
        if self._is_here():
            self._jobs.put(functools.partial(job, *arguments))

    def _fail(self, error: Exception) -> None:
        """Let the thread leave the siblings because of what has failed on another one."""
        self._put(_raise, error)
        self._thread.join(_FAILED_TIMEOUT_S)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
                del job
        except Exception as error:
            if not self._closing:
                self._on_failure(error)
        self._leave()

    def _next_job(self) -> Callable[[], None] | None:
        while True:
            turn = self._current
            if turn is None or not (self._lends and self.shared and turn.number) or turn.returned:
                return self._jobs.get()
            turn.looks = turn.looks or Looks()
            try:
                return self._jobs.get(timeout=turn.looks.interval_s)
            except queue.Empty:
                if turn.looks.is_idle():
                    self._lend_if_wanted(turn)

    def _lend_if_wanted(self, turn: _Turn) -> None:
        """See [Note: a turn is for computing]."""
        members = self._segment.members()
        wanted = any(
            each.job != self.membership.job and each.queued > each.started for each in members
        )
        if wanted and (self._order is None or self._order.is_done(turn.streams)):
            self._give_back(turn)

    def _leave(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._current = None
        leave(self.membership)
        for turn in self._wanted:
            turn.awaited.set()

    def _begin(self, turn: _Turn) -> None:
        turn.began_s = time.monotonic()
        with self._lock:
            before = self._current
            if not self._ended:
                self._current = turn
        if before is not None:  # of another thread, which has acquired at the same moment
            self._put(self._end, before, self._mark(before.streams))
        self.counters.count += 1

    def _take_current(self) -> _Turn | None:
        with self._lock:
            turn, self._current = self._current, None
        return turn

    def _mark(self, streams: Sequence[torch.cuda.Stream]) -> torch.cuda.Event | None:
        return self._order.mark(streams) if self._order is not None else None

    def _end(self, turn: _Turn, end: torch.cuda.Event | None = None) -> None:
        """End a turn when the device has reached ``end``: its length is the device's, too."""
        if end is not None and self._order is not None:
            self._order.wait(end)
        self.counters.held_s += time.monotonic() - turn.began_s
        self._give_back(turn)

    def _give_back(self, turn: _Turn) -> None:
        """Publish a turn that is over, or lent, as given back; with `_give_number`, if that comes later."""
        with self._lock:
            if turn.returned:
                return
            turn.returned = True
            if self._lease.note(time.monotonic() - turn.began_s):
                self._segment.publish(lease_s=self._lease.seconds)
            if turn.number is not None:
                self._publish_returned(turn.number)

    def _give_number(self, turn: _Turn, number: int) -> None:
        self.counters.turn = number or self.counters.turn
        with self._lock:
            turn.number = number
            if turn.returned:
                self._publish_returned(number)
            elif number:
                self._segment.publish(started=number)

    def _publish_returned(self, number: int) -> None:
        if number:
            self._segment.publish_returned(number)
        else:
            self._segment.count_turn()

    # --- drawing -------------------------------------------------------------------------------------------

    def _request(self) -> None:
        self._claim_next()
        self._requested += 1

    def _claim(self) -> None:
        if not self._requested:
            self._request()
        self._requested -= 1

    def _claim_next(self) -> None:
        """Claim a grant for one more `acquire`: one that is there already, or a new one."""
        self._hear()
        if self._takes_more():
            self._grants.append(Grant(0, (), self.counters.mode))
            return
        self._unknown += 1
        if self._unknown == 1:
            self._draw()

    def _takes_more(self) -> bool:
        """Use the last grant once more, if it is for more."""
        with self._lock:
            takes = self._more > 0
            self._more -= takes
        return takes

    def _hear(self, *, wait: bool = False) -> None:
        """Take in the grant that was asked for, if it has come, and ask for the next one that is claimed."""
        while self._unknown and (wait or self._channel.arrived):
            wait, grant = False, self._channel.receive()
            self.counters.mode = grant.mode
            self._grants.append(grant)
            same = min(grant.steps, self._unknown) - 1
            self._grants.extend([Grant(0, (), grant.mode)] * same)
            self._unknown -= same + 1
            with self._lock:
                self._more += grant.steps - same - 1
            if self._unknown:
                self._draw()

    def _draw(self) -> None:
        """Append, look, read, in this order: the model finds overlaps in others. Other ranks ask for the grant."""
        if not self.membership.is_lead:
            return self._channel.ask()
        mode_before = self._trial.mode
        if (
            not self._log.read_numel
        ):  # a log of days is read for seconds, and siblings wait for who has drawn
            self._look_and_read(self._segment.drawn())
        turn = self._segment.draw_turn()
        members = self._look_and_read(turn - 1)
        self._channel.send(self._log.grant(turn, self.membership.job, members))
        self._try(mode_before)

    def _look_and_read(self, last: int) -> Sequence[Member]:
        members = self._segment.members(in_order=True)
        self._trial.look(members)
        self._log.read(self._segment.read_log(self._log.read_numel, last))
        return members

    def _try(self, mode_before: Mode) -> None:
        """Do the job's part in the trial; see [Note: trial of turns] in `rules`."""
        trial, publish = self._trial, self._segment.publish
        if trial.mode is not mode_before:
            publish(mode=trial.mode)
            if trial.mode in (Mode.TURNS, Mode.SIDE_BY_SIDE) and trial.vote.pairs:
                logger.info(
                    "turns on %s: a step takes %.4f s in turns and %.4f s side by side with %d sibling(s); from now on "
                    "%s",
                    self._segment.device,
                    trial.vote.turns_s,
                    trial.vote.side_s,
                    self.count_siblings(),
                    "in turns" if trial.mode.waits else "side by side",
                )
        if trial.drew(time.monotonic()):
            publish(
                pairs=0, tried=trial.begun_at, turns_s=trial.vote.turns_s, side_s=trial.vote.side_s
            )
            publish(pairs=trial.vote.pairs)
        if (word := trial.due()) is not None:
            self._segment.write_word(word)

    def _number(self, turn: _Turn) -> None:
        self._claim()
        self._unnumbered.append(turn)
        self._number_begun()

    def _grant_came(self) -> None:
        if self._unnumbered or self._unknown > 1:
            self._put(self._number_begun)

    def _number_begun(self, *, wait: bool = False) -> None:
        self._hear()
        while self._unnumbered and (wait or self._grants):
            self._give_number(self._unnumbered.popleft(), self._grant().turn)

    def _pass_request(self, inside: _Turn) -> None:
        """Let a turn that goes on have the number that was drawn meanwhile; of a job of one rank."""
        if self._requested:
            self._requested -= 1
            self._give_number(inside, self._grant().turn)

    def _grant(self) -> Grant:
        if not self._grants:
            self._hear(wait=True)
        return self._grants.popleft()

    # --- waiting -------------------------------------------------------------------------------------------

    def _take(self, turn: _Turn) -> None:
        """Begin the next turn when siblings' earlier ones are over."""
        # What another thread has acquired meanwhile; see [Note: one draw for each acquire].
        if (before := self._take_current()) is not None:
            self._end(before, self._mark(before.streams))
        since_s = time.monotonic()
        self._claim()
        self._number_begun(wait=True)
        grant = self._grant()
        last, seen = dict(grant.after), self._until_free(grant, turn)
        past = (each for each in seen if last.get(each.job, math.inf) <= each.returned)
        self.counters.hand_over(since_s, max((each.returned_at_ns for each in past), default=0))
        self.counters.waited_s += time.monotonic() - since_s
        self._patience.started()
        if self._closing:
            return
        self._give_number(turn, grant.turn)
        self._begin(turn)
        with self._lock:
            self._wanted.discard(turn)
        turn.awaited.set()

    def _until_free(self, grant: Grant, turn: _Turn) -> Sequence[Member]:
        """Block until no sibling's turn comes before ``grant``; return who is there then, nobody without a wait."""
        segment, waited, members = self._segment, False, list[Member]()
        while not (self._closing or turn.given_up):
            members = segment.members()
            waiting = blockers(grant, self.membership.job, members)
            left_s = self._patience.remaining(waiting, members, time.monotonic())
            self._warn_of_lost_patience()
            if left_s is None:
                break
            if not waited:
                segment.publish(queued=grant.turn)
            waited = True
            segment.bells.wait([blocker.member.process for blocker in waiting], left_s)
        return members if waited else ()

    def _warn_of_lost_patience(self) -> None:
        for lost in self._patience.lost:
            kept, limit = "longer than", ""
            if at_limit := lost.waited_s < lost.lease_s:
                kept = f"{lost.waited_s:.1f} s, which is less than"
                limit = ", but siblings may cost this job a quarter of its process group's timeout at most"
            if at_limit not in self._warned_of:
                self._warned_of.add(at_limit)
                words = "a sibling on %s kept its turn for %s its lease of %.1f s%s; going on beside it (said once)"
                logger.warning(words, self._segment.device, kept, lost.lease_s, limit)


def _raise(error: Exception) -> None:
    raise error
