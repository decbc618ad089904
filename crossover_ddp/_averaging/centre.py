"""The centre of elastic averaging, and the background rounds in which ranks pull it.

[Note: elastic pull] With rate α, a rank subtracts δ = α(x - c) from its parameters x and adds δ to
the centre c. So the centre gains what all ranks lose. If n ranks pull, the distance between
their mean and the centre is multiplied by 1 - α(n + 1), so α must be less than 2 / (n + 1). The
method follows EASGD (arXiv 1412.6651, and its authors' mpiT).

[Note: rounds] The threads of all ranks run the same rounds. A round begins with a table: whether
each rank offers its parameters, after how many steps it made the offer, and whether it wants to
hold. The ranks that offer pull the centre and are pulled by it. The threads of the other
ranks only serve their parts of the centre, so a slow rank delays no other rank. A thread joins the
next round when its rank makes an offer, or after a pause. A round with an offer halves the pause on
all ranks; a round without one doubles it. A rank that has not applied its last pull offers nothing,
so no pull is lost or applied twice. This is our own design.

[Note: holding] The threads of all ranks stop after the same round: the first one in which every
rank wants to hold. Rounds continue until then, so a rank that finishes its steps early still serves
the slower ranks.
"""

import contextlib
import enum
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from crossover_ddp._ddp.groups import on_destruction
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Journey, JourneyCoroutine
from crossover_ddp._engine.links import Layout, Link, all_finite, parts, tree_sum
from crossover_ddp._engine.observe import Meter
from crossover_ddp.errors import ExchangeError

from .replica import OWNED_STATE

_SHORTEST_PAUSE_S: Final = 1e-3
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
ROUNDS_KEPT: Final = 100_000
"""The maximum number of rounds in the log."""


def moving_rate_for(ranks: int, given: float | None) -> float:
    """Return α; refuse a rate that would make the centre and the ranks' mean diverge."""
    # By default all ranks together move the centre by EASGD's β = 0.9.
    rate = 0.9 / ranks if given is None else given
    if not 0 < rate < 2 / (ranks + 1):
        raise ValueError(
            f"expected 0 < moving_rate < 2 / (ranks + 1) = {2 / (ranks + 1):.4g}, got "
            f"moving_rate={rate}: with a larger one the distance of mean and centre grows in every "
            "round; leave it out for 0.9 / ranks"
        )
    return rate


class CentrePart(NamedTuple):
    """This rank's part of the centre of one block."""

    # In float32 or wider.
    own: torch.Tensor
    # The length of each rank's part.
    layout: Layout
    # α.
    rate: float

    def move(self, addends: torch.Tensor) -> torch.Tensor:
        """Pull this part towards the ranks, and return its former values.

        If any addend is not finite, leave the part unchanged and return NaN, so that every rank
        refuses its update.

        Args:
            addends: the parameters of the ranks that pull, of shape [ranks that pull, elements].
                They are overwritten.
        """
        former = self.own.clone()
        total = addends[0]
        if len(addends) > 1:
            tree_sum(addends.unbind(), total)
        if not all_finite(total):
            return former.fill_(torch.nan)
        self.own.add_(total.sub_(former, alpha=len(addends)), alpha=self.rate)
        return former


# The coroutine `pull` of `crossover_ddp.averaging_hooks`.
Pull = Callable[[CentrePart, torch.Tensor, Sequence[bool], Link], JourneyCoroutine]


class Centre:
    """This rank's parts of the centre: one part per block, in float32 or wider.

    Args:
        exchange: connects the ranks.
        initial: the whole centre, one vector per block; it must be the same on all ranks.
        rate: α.
        meter: counts the bytes sent by pulls and the time that they take.
        pull: the coroutine that carries one pull of a block.
    """

    def __init__(
        self,
        exchange: Exchange,
        initial: Sequence[torch.Tensor],
        rate: float,
        meter: Meter,
        pull: Pull,
    ) -> None:
        self._exchange = exchange
        self._meter = meter
        self._pull = pull
        self._parts = []
        for vector in initial:
            layout = exchange.equal_layout(vector)
            own = parts(vector, layout)[exchange.rank].clone()
            self._parts.append(CentrePart(own, layout, rate))

    def begin_pull(self, block: int, values: torch.Tensor, pulls: Sequence[bool]) -> Journey:
        """Start to pull the block with this number. **Collective**.

        Args:
            block: the number of the block.
            values: this rank's parameters if it pulls, otherwise an empty tensor. They become this
                rank's update.
            pulls: for each rank, whether it pulls.
        """
        make = functools.partial(self._pull, self._parts[block], values, pulls)
        return self._exchange.begin(make, values, "parameters", meter=self._meter)

    def gathered(self) -> list[torch.Tensor]:
        """Return the whole centre, one vector per block. No pull may be running. **Collective**."""
        found = []
        for own, layout, _ in self._parts:
            whole = own.new_zeros(sum(layout))
            parts(whole, layout)[self._exchange.rank].copy_(own)
            self._exchange.gather(whole, layout, OWNED_STATE)
            found.append(whole)
        return found


class ElasticRound(NamedTuple):
    """One round as one rank saw it; see `ElasticState.rounds`."""

    number: int
    # For each rank, the number of steps after which it made its offer; None if it made none.
    offered: tuple[int | None, ...]
    # The number of steps after which this rank applied its pull; None if it has not yet.
    collected: int | None = None


class OfferPhase(enum.Enum):
    """What a rank's vectors are in use for. Only `AveragingThread._enter` changes the phase.

    An offer goes through all phases in this order. It can return from OFFERED to IDLE when a
    replacement offer is unusable, or when the rank holds.
    """

    # There is no offer. The training thread may write to the vectors.
    IDLE = enum.auto()
    # An offer waits for the next round. The training thread may still replace it.
    OFFERED = enum.auto()
    # The averaging thread is using the vectors in a round.
    IN_ROUND = enum.auto()
    # The vectors hold a pull that the training thread has not applied yet.
    PULLED = enum.auto()


class AveragingThread:
    """The thread that runs a rank's rounds, and its interface; see [Note: rounds].

    The training thread calls the public methods. Only `held` and `close` wait.

    The thread has an `Exchange` of its own, because it begins journeys at moments that differ from
    rank to rank, whereas all ranks must create links in the same order. If that exchange fails, the
    group's connections are closed as usual, the thread ends, and every later call raises the
    error. Creating the thread is **collective**.

    Args:
        group: a process group that exchanges host memory by messages.
        initial: the whole centre, one vector per block; without blocks, only tables travel.
        rate: α.
        meter: counts the bytes that rounds send.
        pull: the coroutine that carries one pull of a block.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        initial: Sequence[torch.Tensor],
        rate: float,
        meter: Meter,
        pull: Pull,
    ) -> None:
        # When the group is destroyed, these functions run in reverse order of registration: no
        # further round begins, the exchange ends, and then the thread is joined.
        self._unregister = [on_destruction(group, self._join)]
        self._exchange = Exchange(group)
        self._unregister.append(on_destruction(group, self._stop))
        self.centre = Centre(self._exchange, initial, rate, meter, pull)
        self.log: deque[ElasticRound] = deque(maxlen=ROUNDS_KEPT)
        # One vector per block. They hold the parameters of an offer, and later the pull.
        self._vectors = [torch.empty_like(vector) for vector in initial]
        # Guards the attributes below. It is notified when the thread may have something to do.
        self._changed = threading.Condition()
        self._phase = OfferPhase.IDLE
        # In OFFERED and IN_ROUND: the number of steps after which the offer was made.
        self._offer_steps: int | None = None
        # In PULLED: the number of the round that made the pull.
        self._pull_round = 0
        self._wants_hold = False
        self._next_round = 0
        # The error that has ended the rounds; also set by `close`.
        self._failure: Exception | None = None
        # Only the averaging thread uses it.
        self._pause_s = _FIRST_PAUSE_S
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="crossover-rounds", daemon=True)
        self._thread.start()

    def _enter(self, phase: OfferPhase, offer_steps: int | None = None) -> None:
        """Enter a phase of the offer. The caller must hold the lock."""
        self._phase = phase
        self._offer_steps = offer_steps
        self._changed.notify_all()

    def offer(self, steps: int, fill: Callable[[Sequence[torch.Tensor]], bool]) -> bool:
        """Offer this rank's parameters, unless its last offer or pull is still in use.

        Args:
            steps: the number of steps that this rank has taken.
            fill: writes the parameters to the vectors, and returns whether they may be offered.

        Returns:
            True if ``fill`` was called.
        """
        with self._changed:
            self.check()
            if self._phase in (OfferPhase.IN_ROUND, OfferPhase.PULLED):
                return False
            if fill(self._vectors):
                self._enter(OfferPhase.OFFERED, steps)
            else:
                self._enter(OfferPhase.IDLE)
            return True

    def collect(
        self, steps: int, apply: Callable[[Sequence[torch.Tensor]], None], *, leave: bool = False
    ) -> bool:
        """Pass the last round's pull to ``apply``; return False if no pull is waiting.

        With ``leave``, keep the pull so that it can be collected again.
        """
        self.check()
        # Only the training thread leaves this phase, so no lock is needed.
        if self._phase is not OfferPhase.PULLED:
            return False
        apply(self._vectors)
        if not leave:
            with self._changed:
                self._enter(OfferPhase.IDLE)
                place = self._pull_round - self.log[0].number
                if place >= 0:  # the log may have dropped the round
                    self.log[place] = self.log[place]._replace(collected=steps)
        return True

    def check(self) -> None:
        """Raise the error that has ended the rounds, if any."""
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the rounds inside the ``with`` block, and withdraw any offer. **Collective**.

        The block begins when all ranks hold; see [Note: holding].
        """
        self._hold()
        self.check()
        if self._phase is OfferPhase.OFFERED:
            with self._changed:
                self._enter(OfferPhase.IDLE)
        try:
            yield
        finally:
            self._wants_hold = False
            self._start()

    def _hold(self) -> None:
        with self._changed:
            self._wants_hold = True
            self._changed.notify_all()
        self._join(None)

    def close(self) -> None:
        """End the thread once all ranks close; see [Note: holding]. Never raises."""
        self._hold()
        self._stop()
        self._exchange.close()
        for unregister in self._unregister:
            unregister()

    def _stop(self) -> None:
        """Prevent further rounds."""
        self._fail(
            ExchangeError(
                "the averaging thread has stopped: the state was closed, or the process group was "
                "destroyed; average or save before that"
            )
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _join(self, timeout_s: float | None = 5.0) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        torch.get_num_threads()  # see `_run_jobs` in `_engine.journeys`
        try:
            with torch.no_grad():
                while self._wait_for_round():
                    if self._run_round():
                        return
        except Exception as error:  # the training thread raises it
            self._fail(error)

    def _has_reason(self) -> bool:
        """Return whether there is a reason to end the pause early."""
        is_offered = self._phase is OfferPhase.OFFERED
        return self._failure is not None or is_offered or self._wants_hold

    def _wait_for_round(self) -> bool:
        """Wait until the next round is due; return False if the rounds have ended.

        A round is due at the end of the pause, or earlier if this rank makes an offer or wants to
        hold.
        """
        with self._changed:
            self._changed.wait_for(self._has_reason, self._pause_s)
            return self._failure is None

    def _run_round(self) -> bool:
        """Run a round; return whether all ranks wanted to hold when it began."""
        with self._changed:
            steps = self._offer_steps if self._phase is OfferPhase.OFFERED else None
            holds = self._wants_hold
            if steps is not None:
                self._enter(OfferPhase.IN_ROUND, steps)
        own = [-1.0 if steps is None else float(steps), float(holds)]
        table = self._exchange.gather_numbers(own, torch.device("cpu"))
        offered = tuple([None if number < 0 else int(number) for number, _ in table])
        pulls = [each is not None for each in offered]
        factor = 0.5 if any(pulls) else 2.0
        self._pause_s = min(max(_SHORTEST_PAUSE_S, factor * self._pause_s), _LONGEST_PAUSE_S)
        if any(pulls):
            self._pull_blocks(pulls)
            with self._changed:
                self.log.append(ElasticRound(self._next_round, offered))
                if steps is not None:
                    self._pull_round = self._next_round
                    self._enter(OfferPhase.PULLED)
                self._next_round += 1
        return all([each_holds for _, each_holds in table])

    def _pull_blocks(self, pulls: Sequence[bool]) -> None:
        """Pull the blocks one at a time, so that only one block's centre is in memory."""
        is_pulling = pulls[self._exchange.rank]
        for block, vector in enumerate(self._vectors):
            trip = self.centre.begin_pull(block, vector if is_pulling else vector[:0], pulls)
            trip.waits = None  # training does not wait for this journey
            trip.wait()
