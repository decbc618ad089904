"""Times several ways to train by blocks of steps, and chooses one on all ranks. Our design.

[Note: race] Deferring and coding cost processor time. They save only time that would otherwise be
spent waiting: none on a fast link. Only training shows whether the cost or the gain is larger. So
once buckets have settled, all *arms* take turns in blocks of steps, and the weakest arm within 2 %
of the fastest is kept. Arms are given the weakest first: the one that changes the training least
and costs the least processor time, which is not all measured.

The first block is the weakest arm's. Its step less the time for which backward waited is C, and its
time on the wire is M. No arm is faster than C, nor than its messages. An arm that could not gain
2 % over a weaker one even at this bound is not run. If that holds for all others, the race is over.

Rounds follow, of one block per arm. Only differences within a round count, because the machine's
pace changes between rounds; for the scatter of the differences, see [Note: scatter] in
`_system/comparing.py`. Rounds go twice through the arms in one direction and then twice in the
other. So a steady drift cancels, and since a busy minute is one stretch of time, in the first two
rounds it cannot slow down both blocks of one arm and no block of another.

Ranks must change arms in the same step. So a decision never depends on a rank's own clock or
scatter, but only on a table that all ranks have gathered, of which the slowest and the most
scattered rank counts. Backward passes are counted because all ranks run the same number of them,
whatever else a rank does.

All arms of a round have the same buckets, because after a change of buckets passes are not timed
until new ones have settled. If the weakest of three or more arms has other buckets than the rest, it
runs in the first block, and again behind the last round, in turn with the arm that the rounds have
chosen. It is compared with the closest blocks of that arm, so a steady drift cancels again, until
comparisons agree.

After the verdict the chosen arm's steps are measured like those of one long block. The race is run
again if they have become a fifth slower, or if nothing was tried and something could now be gained.
"""

import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.observe import Meter
from crossover_ddp._system.comparing import (
    FIRST_PAIR,
    HYSTERESIS,
    scatter_of,
    uncertainty,
    usual_scatter_of,
)

logger = logging.getLogger(__name__)
_log = functools.partial(logger.info, "decoupled: %s")

WARM_UP: Final = 5
"""The number of backward passes on settled buckets to skip: the first ones record and check."""
FIRST: Final = 4
"""How many steps of the first block count. One more step precedes them: it ends the arm before."""
COUNTED: Final = 3
"""How many steps of each later block count, after one that does not."""
WATCHED: Final = 250
"""How many steps are measured together after the verdict."""
SLOWER: Final = 1.2
"""The race is run again if steps take this many times as long as at the verdict."""
# For normally distributed step times: the scatter of the difference between two blocks' medians,
# over the mean deviation from the median within a block.
_OF_BLOCKS: Final = 1.7
# This many times that scatter makes the difference between two blocks clear by itself.
_CLEAR: Final = 3.0
_MOST_APART: Final = 6  # the most comparisons with the weakest arm, if it is apart
# The time on the wire is measured beside backward, which slows messages down.
_ALONE: Final = 0.8


class Arm(NamedTuple):
    """One way to train.

    Args:
        name: the name that users see.
        defers: whether steps are deferred.
        codec: the codec for both halves of the exchange; None if gradients are exact.
        rate: the bytes of the codec's messages over those of exact gradients.
        is_refitted: whether the model gets buckets made for it. Otherwise it has the user's own.
    """

    name: str
    defers: bool
    codec: Any = None
    rate: float = 1.0
    is_refitted: bool = False


WHOLE: Final = Arm("whole", False)
DEFERRED: Final = Arm("deferred", True)


class Block(NamedTuple):
    """One block's measurement, for all ranks. The times are medians, in seconds per step."""

    step_s: float
    # The mean deviation of steps from their median, as the logarithm of a ratio of times.
    scatter: float
    # The step less what backward waited, and the time during which messages were under way.
    compute_s: float
    wire_s: float


class _Mark(NamedTuple):
    """The end of a backward pass: its time, and the meter's seconds of waiting and under way."""

    at: Any
    waited_s: float
    wire_s: float


def now_on(device: torch.device) -> Any:
    """Return the time, or on a GPU an event that records it when the GPU gets there."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(times: Sequence[Any]) -> list[float]:
    """Return the seconds between each two results of `now_on` that follow each other."""
    if isinstance(times[-1], float):
        return [after - before for before, after in itertools.pairwise(times)]
    times[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(times)]


class Race:
    """Decides in which way each backward pass is exchanged.

    Args:
        arms: the arms, the weakest first. If there is only one, it is chosen from the start.
        meter: the meter of the state's hook.
        use: a function to call with an arm before its first step.
        report: a function to call with each verdict, as a sentence.
    """

    _clock = staticmethod(now_on)

    def __init__(
        self,
        arms: Iterable[Arm],
        meter: Meter,
        use: Callable[[Arm], object] = lambda arm: None,
        report: Callable[[str], object] = _log,
    ) -> None:
        self.arms = tuple(arms)
        self._meter = meter
        self._use = use
        self._report = report
        # The way of the next backward pass; the same on all ranks.
        deferring = [each for each in self.arms if each.defers and each.codec is None]
        self.arm = [*deferring, self.arms[0]][0]
        # The arm of the last verdict; None before the first one.
        self.chosen: Arm | None = None
        # Whether no race is under way.
        self.is_over = False
        # The seconds per step of each arm that was measured, by name, and C, N and M.
        self.figures: dict[str, float] = {}
        # The number of backward passes of this race, except those before buckets first settled.
        self._passes = 0
        # The ends of the backward passes of the current block, and the number of its steps.
        self._marks: list[_Mark] = []
        self._length = FIRST
        # Whether the weakest arm runs only in the first block, and behind the last round.
        self._is_apart = len(self.arms) > 2 and any(
            each.is_refitted != self.arms[0].is_refitted for each in self.arms[1:]
        )
        # The number of passes since the last change of arms in which buckets had yet to settle, and
        # the most that a round may lose in this way: it changes buckets at most twice.
        self._pause = 0
        self._longest_pause = 0
        # The arms that may still be chosen, and those whose blocks are still to come in this round.
        self._left: list[Arm] = []
        self._order: list[Arm] = []
        # The arm that the rounds have chosen, while it is compared with the weakest one, apart.
        self._finalist: Arm | None = None
        # How much faster the finalist was in each of these comparisons, as logarithms.
        self._apart: list[float] = []
        # For each round, the logarithm of each arm's seconds per step.
        self._rounds: list[dict[Arm, float]] = []
        # The latest block of the weakest arm; None if its waits are not known.
        self._base: Block | None = None
        # The scatter within each block.
        self._scatters: list[float] = []
        # The seconds per step at the verdict; None if the choice was not measured in this process.
        self._verdict_s: float | None = None
        # Whether the verdict is that no other arm needs to be tried.
        self._is_by_bounds = False
        if len(self.arms) == 1:
            self.choose(self.arms[0])

    @property
    def has_begun(self) -> bool:
        """Whether arms take turns, or have done so."""
        return self._passes >= WARM_UP

    @property
    def defers(self) -> bool:
        """Whether the next backward pass is deferred."""
        return self.arm.defers

    def choose(self, arm: Arm) -> None:
        """End the race with ``arm``, from the next step on."""
        self.chosen = arm
        self.is_over = True
        self._to(arm, WATCHED)

    def backward_ended(self, exchange: Exchange, device: torch.device) -> None:
        """Record the end of a backward pass on settled buckets; the gradients are on ``device``.

        This is **collective** after each block.
        """
        if len(self.arms) == 1:
            return
        self._passes += 1
        if not self.is_over and self._passes <= WARM_UP:
            if self._passes == WARM_UP:
                self._begin()
            return
        meter = self._meter
        self._marks.append(_Mark(self._clock(device), meter.exposed_s, meter.under_way_s))
        if len(self._marks) <= self._length:
            return
        block = self._measured(exchange, device)
        if self.is_over:
            self._watch(block)
        else:
            self._block_ended(block)

    def pass_over(self) -> None:
        """Record the end of a backward pass on buckets that have yet to settle."""
        if self._passes >= WARM_UP and not self.is_over:
            self._passes += 1
            self._marks = []
            self._pause += 1
            self._longest_pause = max(self._longest_pause, 2 * self._pause)

    def _begin(self) -> None:
        """Begin a race with the first block, of the weakest arm."""
        self._left = [*self.arms]
        self._finalist = None
        self._rounds = [{}]
        self._scatters = []
        self._to(self.arms[0], FIRST)

    def _to(self, arm: Arm, length: int) -> None:
        """Train with ``arm`` from the next step on, and measure ``length`` steps of it."""
        self.arm = arm
        self._marks = []
        self._pause = 0
        self._length = length
        self._use(arm)

    # --- measuring -----------------------------------------------------------------------------

    def _measured(self, exchange: Exchange, device: torch.device) -> Block:
        """Return the measurement of the block that has ended. **Collective**."""
        times, waited_s, wire_s = zip(*self._marks, strict=True)
        steps_s = [max(each, 1e-9) for each in seconds_between(times)]
        waits_s = seconds_between(waited_s)
        computes_s = [step_s - wait_s for step_s, wait_s in zip(steps_s, waits_s, strict=True)]
        # The low median of two values is the one without an evaluation in it.
        step_s = statistics.median_low(steps_s)
        own = (
            step_s,
            statistics.fmean(abs(math.log(each / step_s)) for each in steps_s),
            statistics.median_low(computes_s),
            # A rank that is early counts the others' computation as time on the wire.
            -statistics.median_low(seconds_between(wire_s)),
        )
        slowest = map(max, zip(*exchange.gather_numbers(own, device), strict=True))
        step_s, scatter, compute_s, less_wire_s = slowest
        return Block(step_s, scatter, compute_s, -less_wire_s)

    def _block_ended(self, block: Block) -> None:
        """Go on to the next arm of the round, or end the round."""
        weakest = self.arms[0]
        block_s = math.log(block.step_s)
        if self._finalist is not None:
            self._block_apart_ended(block_s, self._finalist)
            return
        self._scatters.append(block.scatter)
        self._rounds[-1][self.arm] = block_s
        if self.arm is weakest:
            # On a GPU the host does not see when journeys end, and nothing waits for deferred ones.
            has_waits = self._meter.is_timed and not weakest.defers
            self._base = block if has_waits else None
            if len(self._left) == len(self.arms) and len(self._rounds) == 1:
                self._left = [arm for arm in self.arms if arm is weakest or self._can_gain(arm)]
                self._order = self._left[:0:-1]
        while self._order:
            arm = self._order.pop(0)
            if arm is weakest or not self._is_bounded(arm):
                self._to(arm, COUNTED)
                return
            self._left.remove(arm)
        self._round_ended()

    def _round_ended(self) -> None:
        """Drop the arms that have lost, and begin another round or decide."""
        rounds = len(self._rounds)
        if rounds > 1:
            self._left = [arm for arm in self._left if not self._has_lost(arm)] or self._left[:1]
        elif self._is_apart and len(self._left) > 1:
            del self._left[0]  # it returns behind the last round
        # Whether an arm is still to be compared with the weakest one, apart.
        has_finalist = self._is_apart and self._left[0] is not self.arms[0]
        more = (1 + COUNTED) * len(self._left) + self._longest_pause
        if has_finalist:
            more += 2 + FIRST + COUNTED
        is_alone = len(self._left) == 1
        if has_finalist and rounds == 1:
            is_alone = False  # its only block may have fallen into a busy minute
        if is_alone or not self._has_time(more):
            if has_finalist:
                self._begin_apart(self._fastest())
            else:
                self._decide(self._fastest())
            return
        self._order = [self._left[0], *self._left[:0:-1]]
        if len(self._rounds) % 4 > 1:
            self._order.reverse()
        self._rounds.append({})
        self._to(self._order.pop(0), COUNTED)

    def _begin_apart(self, finalist: Arm) -> None:
        """Compare the weakest arm, which has run in the first block, with the rounds' fastest."""
        self._finalist = finalist
        self._apart = [self._gains(finalist, self.arms[0])[0]]
        self._to(self.arms[0], FIRST)

    def _block_apart_ended(self, block_s: float, finalist: Arm) -> None:
        """Go on with the weakest arm and the finalist in turn, or decide between them.

        ``block_s`` is the logarithm of the latest block's seconds per step.
        """
        weakest = self.arms[0]
        is_finalist = self.arm is finalist
        other = self._times(weakest if is_finalist else finalist)[-1]
        self._apart.append(other - block_s if is_finalist else block_s - other)
        self._rounds.append({self.arm: block_s})
        # The first two comparisons have no block in common, and a block takes part in two at most.
        # So two show that the finalist is faster, and otherwise three must agree: if the weakest arm
        # wins, no hook may be left that could begin another race.
        is_faster = [gain > HYSTERESIS for gain in self._apart]
        agree = len(is_faster) > 2 and len({*is_faster[-3:]}) == 1
        if is_faster != [True, True] and not agree and len(is_faster) < _MOST_APART:
            if is_finalist:
                self._to(weakest, FIRST)
            else:
                self._to(finalist, COUNTED)
            return
        self._decide(finalist if statistics.median(self._apart[-3:]) > HYSTERESIS else weakest)

    def _has_time(self, passes: int) -> bool:
        """Return whether the race may take this many more passes."""
        return self._passes + passes <= most_passes(len(self.arms))

    # --- bounds --------------------------------------------------------------------------------

    def _bound_s(self, arm: Arm, base: Block) -> float:
        """Return the seconds per step below which ``arm`` cannot come, by the first block."""
        if arm.defers or arm.is_refitted:
            return base.compute_s
        return max(base.compute_s, base.step_s - (1 - arm.rate) * base.wire_s)

    def _can_gain(self, arm: Arm, needed: float = HYSTERESIS) -> bool:
        """Return whether ``arm`` could be faster than the weakest by more than ``needed``."""
        base = self._base
        if base is None:
            return True
        return self._bound_s(arm, base) * math.exp(needed) < base.step_s

    def _is_bounded(self, arm: Arm) -> bool:
        """Return whether by its bound ``arm`` has no chance, and is not run any more.

        Its bound is compared with arms that were run. This leaves out the slowest arms on a slow
        link. An arm's time that is below its own bound shows that the bounds no longer hold.
        """
        base = self._base
        if base is None:
            return False
        doubt = 2 * self._noise
        floor = math.log(max(self._bound_s(arm, base), _ALONE * arm.rate * base.wire_s))
        floor -= math.log(base.step_s)
        place = self.arms.index(arm)
        for number, other in enumerate(self.arms[1:], start=1):
            if other is arm or not (gains := self._gains(other, self.arms[0])):
                continue
            its = -statistics.median(gains)
            lowest = math.log(self._bound_s(other, base) / base.step_s)
            needed = HYSTERESIS if number > place else -HYSTERESIS
            if its > lowest - HYSTERESIS and floor > its + needed + doubt:
                return True
        return False

    # --- deciding ------------------------------------------------------------------------------

    @property
    def _noise(self) -> float:
        """The scatter of the difference between two blocks, by the scatter within blocks."""
        return _OF_BLOCKS * statistics.median(self._scatters)

    def _times(self, arm: Arm) -> list[float]:
        return [each[arm] for each in self._rounds if arm in each]

    def _gains(self, arm: Arm, other: Arm) -> list[float]:
        """Return how much faster ``arm`` was than ``other``, as logarithms, in each round of both."""
        return [each[other] - each[arm] for each in self._rounds if arm in each and other in each]

    def _gain(
        self, arm: Arm, other: Arm, scatter: Callable[[list[float]], float] = scatter_of
    ) -> tuple[float, float]:
        """Return the median of `_gains`, and how far it may be from the true gain.

        ``scatter`` returns the scatter of gains.
        """
        gains = self._gains(arm, other)
        if len(gains) < FIRST_PAIR:
            return sum(gains), math.inf
        known = 2 * self._noise / math.sqrt(len(gains))
        return statistics.median(gains), max(known, uncertainty(scatter(gains), len(gains)))

    def _is_clear(self, arm: Arm, other: Arm) -> bool:
        """Return whether it is beyond doubt if ``arm`` is faster than ``other`` by at least 2 %.

        It is if the median of several rounds is clear, or if each round is clear by itself: no busy
        minute changes all of them.
        """
        gain, doubt = self._gain(arm, other)
        beyond = [each - HYSTERESIS for each in self._gains(arm, other)]
        closest = min(beyond) if gain > HYSTERESIS else -max(beyond, default=0.0)
        by_itself = len(beyond) >= FIRST_PAIR and closest > _CLEAR * self._noise
        return abs(gain - HYSTERESIS) > doubt or by_itself

    def _has_lost(self, arm: Arm) -> bool:
        """Return whether a stronger arm is faster, or a weaker one is as fast, beyond doubt."""
        place = self.arms.index(arm)
        for other in self._left:
            is_stronger = self.arms.index(other) > place
            pair = (other, arm) if is_stronger else (arm, other)
            is_faster = self._gain(*pair)[0] > HYSTERESIS
            if other is not arm and is_faster == is_stronger and self._is_clear(*pair):
                return True
        return False

    def _fastest(self) -> Arm:
        """Return the weakest arm within 2 % of the fastest of the rounds. In doubt it is weaker.

        There is no time for more rounds, so rounds in a busy minute do not add to the doubt.
        """
        first = self._left[0]
        gains = {first: 0.0}
        for arm in self._left[1:]:
            gain, doubt = self._gain(arm, first, usual_scatter_of)
            if gain - doubt / 4 > HYSTERESIS:
                gains[arm] = gain
        fastest = max(gains.values())
        return next(arm for arm, gain in gains.items() if gain >= fastest - HYSTERESIS)

    def _decide(self, arm: Arm) -> None:
        """End the race with ``arm``, and report it."""
        times = {each: self._times(each) for each in self.arms}
        self.figures = {
            each.name: math.exp(statistics.median(logs)) for each, logs in times.items() if logs
        }
        if (base := self._base) is not None:
            waited_s = max(0.0, base.step_s - base.compute_s)
            self.figures |= {"C": base.compute_s, "N": waited_s, "M": base.wire_s}
        self._is_by_bounds = not any(times[each] for each in self.arms[1:])
        self._verdict_s = self.figures[arm.name]
        self.choose(arm)
        self._report(self._in_words(arm))

    def _in_words(self, arm: Arm) -> str:
        weakest = self.arms[0]
        why = f"no other is 2 % faster than {weakest.name}"
        if arm is not weakest:
            gain, _ = self._gain(arm, weakest)
            if arm is self._finalist:
                gain = statistics.median(self._apart[-3:])
            why = f"{math.exp(gain):.2f} times as fast as {weakest.name}"
        measured = [each.name for each in self.arms if each.name in self.figures]
        times = ", ".join(f"{self.figures[name]:.4f} s ({name})" for name in measured)
        return f"chose {arm.name}: {why}, after {self._passes} steps; a step takes {times}"

    def _watch(self, block: Block) -> None:
        """Begin another race if the chosen arm's steps have changed; see [Note: race]."""
        self._marks = self._marks[-1:]
        former_s = block.step_s if self._verdict_s is None else self._verdict_s
        self._verdict_s = min(former_s, block.step_s)
        can_gain = False
        if self._is_by_bounds:
            self._base = block
            can_gain = any(self._can_gain(arm, 2 * HYSTERESIS) for arm in self.arms[1:])
        if can_gain or block.step_s > SLOWER * former_s:
            self.is_over = False
            self._passes = 0


def most_passes(arms: int) -> int:
    """Return how many backward passes a race of ``arms`` arms may take.

    Only contradictory comparisons with an arm that runs apart may take it beyond.
    """
    return 30 + 15 * arms
