"""The centre of elastic averaging, each owner its part, in float32, and the rounds in which ranks pull it.

[Note: elastic pull] With rate α a rank takes δ = α(x - c) off its parameters, and the centre gets the sum of all ranks'
δ: what one loses the other gains. The distance of the ranks' mean to the centre shrinks by 1 - α(n + 1) if n ranks
pull, so α must be less than 2 / (n + 1). After EASGD (arXiv 1412.6651, and its authors' mpiT).

[Note: rounds] All ranks' threads go through the same rounds. A round begins with a table: who offers, after how many
steps, and who wants to hold. Those that offer pull and are pulled; the others' threads send their parts of the centre.
So a slow rank delays nobody. A thread joins the next round when it has an offer, or after a pause that each round with
an offer halves and each one without doubles, on all ranks alike. A pull that a slow rank has not collected yet waits
for it, and the rank offers nothing meanwhile: nothing is counted twice, and nothing is lost. Our design.

[Note: holding] Threads end on all ranks behind the same table: that in which every rank wants to hold. Until then
rounds go on, so that a rank that has ended its steps early serves the slower ones.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from crossover_ddp._ddp.groups import on_destruction
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Layout, Link, all_finite, parts, tree_sum
from crossover_ddp._engine.observe import Meter
from crossover_ddp.errors import ExchangeError

from .replica import KEPT

_SHORTEST_PAUSE_S: Final = 1e-3
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
ROUNDS_KEPT: Final = 100_000


def moving_rate_for(ranks: int, given: float | None) -> float:
    """Return α; refuse one with which the centre and the ranks' mean swing ever more widely."""
    rate = 0.9 / ranks if given is None else given  # by default they add up to β of EASGD
    if not 0 < rate < 2 / (ranks + 1):
        raise ValueError(
            f"expected 0 < moving_rate < 2 / (ranks + 1) = {2 / (ranks + 1):.4g}, got moving_rate={rate}: beyond it "
            "the distance of mean and centre grows in every round; leave it out for 0.9 / ranks"
        )
    return rate


async def pull(
    values: torch.Tensor,
    layout: Layout,
    centre: torch.Tensor,
    rate: float,
    pulls: Sequence[bool],
    link: Link,
) -> None:
    """Replace ``values``, of ranks that pull, by what pulls them; pull the centre. See [Note: elastic pull]."""
    is_pulling = pulls[link.rank]
    own_layout = layout if is_pulling else [0] * link.size
    coming = [len(centre) * each for each in pulls]
    incoming = centre.new_empty(sum(coming))
    await link.all_to_all(values, own_layout, incoming, coming)
    if is_pulling:  # some links have written there
        parts(incoming, coming)[link.rank].copy_(parts(values, layout)[link.rank])
    await link.compute()
    former = _move(centre, incoming.view(sum(pulls), len(centre)), rate)
    del incoming  # before there is memory for the whole centre
    whole = centre.new_empty(sum(own_layout))
    if is_pulling:
        parts(whole, layout)[link.rank].copy_(former)
    if all(pulls):
        await link.all_gather(whole, layout)
    else:  # nothing for who stays away
        await link.all_to_all(former.repeat(sum(pulls)), coming, whole, own_layout)
    if is_pulling:
        values.sub_(whole).mul_(-rate)


def _move(centre: torch.Tensor, addends: torch.Tensor, rate: float) -> torch.Tensor:
    """Pull the centre, and return it as it was; NaN if values are not finite, for every rank to refuse them."""
    former, total = centre.clone(), addends[0]
    if len(addends) > 1:
        tree_sum(addends.unbind(), total)
    if not all_finite(total):
        return former.fill_(torch.nan)  # the centre stays as it is
    centre.add_(total.sub_(former, alpha=len(addends)), alpha=rate)
    return former


class Centre:
    """This rank's parts of each block's centre, which begins as ``start`` on all ranks, in float32 or wider; rate α."""

    def __init__(
        self, exchange: Exchange, start: Sequence[torch.Tensor], rate: float, meter: Meter
    ) -> None:
        self._exchange, self._rate, self._meter = exchange, rate, meter
        self._layouts = [exchange.equal_layout(vector) for vector in start]
        cut = [parts(vector, layout) for vector, layout in zip(start, self._layouts, strict=True)]
        self._own = [each[exchange.rank].clone() for each in cut]

    def begin_pull(self, place: int, values: torch.Tensor, pulls: Sequence[bool]) -> Trip:
        """Begin `pull` of the block in this place. **Collective**."""
        way = functools.partial(
            pull, values, self._layouts[place], self._own[place], self._rate, pulls
        )
        return self._exchange.begin(way, values, "parameters", meter=self._meter)

    def gathered(self) -> list[torch.Tensor]:
        """Return the whole centre, block by block, while nobody pulls. **Collective**."""
        found = []
        for part, layout in zip(self._own, self._layouts, strict=True):
            whole = part.new_zeros(sum(layout))
            parts(whole, layout)[self._exchange.rank].copy_(part)
            self._exchange.gather(whole, layout, KEPT)
            found.append(whole)
        return found


class ElasticRound(NamedTuple):
    """One round as one rank saw it, see `ElasticState.rounds`; what is None took no part, or was not collected yet."""

    number: int
    offered: tuple[int | None, ...]
    collected: int | None = None


class Rounds:
    """See [Note: rounds]. Methods are called on the training thread; none waits, but `held` and `close`.

    They have an `Exchange` of their own: their thread begins journeys at moments that differ from rank to rank, and
    links must be drawn in one order. If it fails, the group's connections are closed all the same, the thread ends, and
    every later call raises what ended it. **Collective**.

    ``group`` exchanges host memory by messages. ``start``: of each block's `Centre`; with none tables alone travel.
    """

    def __init__(
        self, group: dist.ProcessGroup, start: Sequence[torch.Tensor], rate: float, meter: Meter
    ) -> None:
        # What is registered first comes last: after the exchange's own end.
        self._forget = [on_destruction(group, self._join)]
        self._exchange = Exchange(group)
        self._forget.append(on_destruction(group, self._tell))
        self.centre = Centre(self._exchange, start, rate, meter)
        self.log: deque[ElasticRound] = deque(maxlen=ROUNDS_KEPT)
        self._vectors = [torch.empty_like(vector) for vector in start]
        self._changed = threading.Condition()
        self._offer: int | None = None  # after how many steps it was made
        self._is_taken = False  # it is in a round
        self._back: int | None = None  # the round whose pull is there
        self._wants_hold = False
        self._number = 0  # of rounds
        self._failure: Exception | None = None  # or what says that the group was destroyed
        self._pause_s = _FIRST_PAUSE_S
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="crossover-rounds", daemon=True)
        self._thread.start()

    def offer(self, steps: int, fill: Callable[[Sequence[torch.Tensor]], bool]) -> bool:
        """Offer the vectors that ``fill`` writes, if it finds them fit; False: a former offer is under way."""
        with self._changed:
            self.check()
            if self._is_taken or self._back is not None:
                return False
            self._offer = steps if fill(self._vectors) else None
            self._changed.notify_all()
            return True

    def collect(
        self, steps: int, apply: Callable[[Sequence[torch.Tensor]], None], *, leave: bool = False
    ) -> bool:
        """Let ``apply`` add the pull that has come, if one has; ``leave`` it there for another time."""
        self.check()
        if (number := self._back) is None:  # nobody but this thread takes it back
            return False
        apply(self._vectors)
        if not leave:
            with self._changed:
                self._back = None
                if (place := number - self.log[0].number) >= 0:
                    self.log[place] = self.log[place]._replace(collected=steps)
        return True

    def check(self) -> None:
        """Raise what has ended the rounds, if anything has."""
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let rounds stand still during the block, when all ranks hold; take back what is in none. **Collective**."""
        self._hold()
        self.check()
        self._offer = None
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
        """End the thread when all ranks close, see [Note: holding]. Raises nothing."""
        self._hold()
        self._tell()
        self._exchange.close()
        for forget in self._forget:
            forget()

    def _tell(self) -> None:
        """Begin no round any more."""
        why = "the state was closed, or the process group destroyed; call it before"
        self._fail(ExchangeError(f"expected rounds that run, got ended ones: {why}"))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _join(self, timeout_s: float | None = 5.0) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        torch.get_num_threads()  # see `_system.worker`
        try:
            with torch.no_grad():
                while not (self._ends() or self._go()):
                    pass
        except Exception as error:  # whatever it is, the training thread raises it
            self._fail(error)

    def _ends(self) -> bool:
        """Wait for an offer or for the pause to end; tell whether the rounds are over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._offer is not None or self._wants_hold,
                self._pause_s,
            )
            return self._failure is not None

    def _go(self) -> bool:
        """Go through a round; tell whether all ranks hold after it."""
        with self._changed:
            steps, holds = self._offer, self._wants_hold
            if steps is not None:
                self._is_taken, self._offer = True, None
        own = [-1.0 if steps is None else float(steps), float(holds)]
        table = self._exchange.gather_numbers(own, torch.device("cpu"))
        offered = tuple([None if number < 0 else int(number) for number, _ in table])
        pulls = [each is not None for each in offered]
        factor = 0.5 if any(pulls) else 2.0
        self._pause_s = min(max(_SHORTEST_PAUSE_S, factor * self._pause_s), _LONGEST_PAUSE_S)
        if any(pulls):
            # One block after the other, so that only one centre is under way.
            for place, vector in enumerate(self._vectors):
                trip = self.centre.begin_pull(
                    place, vector if steps is not None else vector[:0], pulls
                )
                trip.waits = None  # training does not wait
                trip.wait()
            with self._changed:
                self.log.append(ElasticRound(self._number, offered))
                if steps is not None:
                    self._back, self._is_taken = self._number, False
                self._number += 1
        return all([holds for _, holds in table])
