"""Bring the clocks of several hosts together by causality. Pure; all times in seconds.

[Note: clocks by causality] An exchange ends on no rank before it has begun on every rank. Let clock h read b
when it began there, and clock r read e when it ended there: h's correction o (what to add to h to get r's
time) is at most e - b at that moment; the same exchange, with the clocks exchanged, bounds o from below. Hosts'
clocks run at nearly constant rates, so o is a straight line between all these bounds (Duda et al. 1987 took
the line from the bounds' convex hulls). We take the line with the greatest distance from the bounds, the middle
of the permitted lines; the greatest distance of any permitted line from it is the *uncertainty*. It is a
guarantee, whatever the latencies were. Wall clocks are used only for hosts without a common exchange.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MAX_DRIFT: Final = 500e-6
"""How much faster one clock may run than another; what NTP slews at most."""
_SHARE_OF_MARGIN: Final = 0.9
_HALVINGS: Final = 60
_TOLERANCE_S: Final = 1e-6
"""The most by which rounding, and readings of one clock on two cores, may differ."""

_Point = tuple[float, float]


class SeenExchange(NamedTuple):
    """One exchange, as one clock saw it."""

    last_begin_s: float
    """The latest begin among the clock's ranks."""
    first_end_s: float
    """The earliest end that proves that all ranks had begun; infinite if there is none."""


@dataclass(frozen=True)
class Correction:
    """A line that turns one clock's readings into the common time.

    ``uncertainty_s`` is the most by which it can be wrong against ``anchor``, the clock to which it was aligned; None
    if nothing bounds it. ``contradiction_s`` is by how much the bounds contradict a clock of constant rate.
    """

    clock: str
    anchor: str
    offset_s: float
    at_s: float = 0.0
    rate: float = 0.0
    uncertainty_s: float | None = None
    exchanges: int = 0
    contradiction_s: float = 0.0
    wall_error_s: float | None = None
    """By how much the wall clock was ahead of the anchor's, at ``at_s``; None if only wall clocks are known."""

    def __call__(self, reading_s: float) -> float:
        """Return the common time at which the clock read ``reading_s``."""
        return reading_s + self.offset_s + self.rate * (reading_s - self.at_s)


@dataclass(frozen=True)
class Alignment:
    """All clocks' corrections. The common time is that of the clock ``reference``."""

    reference: str
    corrections: Mapping[str, Correction]
    exchanges: int
    """Exchanges in which more than one clock took part."""
    out_of_order: int
    """Exchanges that, on one clock, ended before they had begun: then the files do not belong together."""

    @property
    def islands(self) -> int:
        """Number of sets of clocks that only the wall clock relates to each other."""
        return len({each.anchor for each in self.corrections.values()})

    @property
    def uncertainty_s(self) -> float | None:
        """The greatest of all clocks; None if one of them has no bounds, or bounds that contradict each other."""
        worst = [each.uncertainty_s for each in self.corrections.values()]
        known = [each for each in worst if each is not None]
        return max(known) if len(known) == len(worst) and self.islands == 1 else None

    @property
    def contradiction_s(self) -> float:
        """The worst contradiction between bounds; 0 if there is none."""
        return max((each.contradiction_s for each in self.corrections.values()), default=0.0)


def align(
    walls_s: Mapping[str, float],
    observed: Mapping[Hashable, Mapping[str, SeenExchange]],
    extents_s: Mapping[str, tuple[float, float]],
) -> Alignment:
    """Work out every clock's correction, see [Note: clocks by causality].

    Args:
        walls_s: for each clock its wall time minus its own reading.
        observed: for each exchange when each clock saw it begin and end.
        extents_s: for each clock the readings between which the correction must hold.
    """
    if not walls_s:
        return Alignment("", {}, 0, 0)
    shared = [seen for seen in observed.values() if len(seen) > 1]
    counts = Counter(clock for seen in shared for clock in seen)
    order = sorted(walls_s, key=lambda clock: (-counts[clock], clock))
    reference = order[0]
    found: dict[str, Correction] = {}
    while left := [clock for clock in order if clock not in found]:
        # The wall clock places an island's first clock, exchanges place all others.
        anchor = left[0]
        shift_s = walls_s[anchor] - walls_s[reference]
        found[anchor] = Correction(anchor, anchor, shift_s, uncertainty_s=0.0)
        aligned = {anchor}
        while clock := _best_known(aligned, shared):
            bounds = _bounds(clock, {name: found[name] for name in aligned}, shared)
            wall_s = walls_s[clock] - walls_s[reference]
            found[clock] = _fit(clock, anchor, bounds, extents_s[clock], wall_s)
            aligned.add(clock)
    out_of_order = sum(
        any(seen.last_begin_s > seen.first_end_s + _TOLERANCE_S for seen in clocks.values())
        for clocks in observed.values()
    )
    return Alignment(reference, found, len(shared), out_of_order)


def _best_known(aligned: set[str], shared: Iterable[Mapping[str, SeenExchange]]) -> str | None:
    """Return the clock with the most exchanges in common with the aligned ones."""
    common: Counter[str] = Counter()
    for seen in shared:
        if not aligned.isdisjoint(seen):
            common.update(seen.keys() - aligned)
    return min(common, key=lambda clock: (-common[clock], clock), default=None)


class _Bounds(NamedTuple):
    """The bounds of a correction: at most ``value`` at reading ``at`` for each of ``upper``; ``lower`` likewise."""

    upper: Sequence[_Point]
    lower: Sequence[_Point]
    exchanges: int


def _bounds(
    clock: str, aligned: Mapping[str, Correction], shared: Iterable[Mapping[str, SeenExchange]]
) -> _Bounds:
    upper, lower, exchanges = [], [], 0
    for seen in shared:
        others = [(aligned[name], seen[name]) for name in seen if name in aligned]
        if clock not in seen or not others:
            continue
        exchanges += 1
        begin_s, end_s = seen[clock]
        # A clock that is known to within u proves bounds only to within u.
        last_s = min(correct(other.first_end_s) + _doubt(correct) for correct, other in others)
        first_s = max(correct(other.last_begin_s) - _doubt(correct) for correct, other in others)
        if math.isfinite(last_s):
            upper.append((begin_s, last_s - begin_s + _TOLERANCE_S))
        if math.isfinite(end_s):
            lower.append((end_s, first_s - end_s - _TOLERANCE_S))
    return _Bounds(upper, lower, exchanges)


def _doubt(correction: Correction) -> float:
    return (correction.uncertainty_s or 0.0) + correction.contradiction_s


def _fit(
    clock: str, anchor: str, bounds: _Bounds, extent_s: tuple[float, float], wall_s: float
) -> Correction:
    if not bounds.upper or not bounds.lower:
        return _fit_to_one_side(clock, anchor, bounds, wall_s)
    at_s = (extent_s[0] + extent_s[1]) / 2
    corridor = _Corridor(bounds, at_s)
    rate = corridor.best_rate()
    margin_s, offset_s = corridor.margin(rate), corridor.middle(rate)
    uncertainty_s = None
    if margin_s >= 0:
        ends_s = [each - at_s for each in extent_s]
        uncertainty_s = max(corridor.doubt(offset_s, rate, end_s) for end_s in ends_s)
    return Correction(
        clock=clock,
        anchor=anchor,
        offset_s=offset_s,
        at_s=at_s,
        rate=rate,
        uncertainty_s=uncertainty_s,
        exchanges=bounds.exchanges,
        contradiction_s=max(0.0, -margin_s),
        wall_error_s=wall_s - offset_s,
    )


def _fit_to_one_side(clock: str, anchor: str, bounds: _Bounds, wall_s: float) -> Correction:
    """Use the wall clock as far as the bounds permit; they do not say how wrong it may be."""
    most_s = min((value for _, value in bounds.upper), default=math.inf)
    least_s = max((value for _, value in bounds.lower), default=-math.inf)
    offset_s = max(least_s, min(most_s, wall_s))
    return Correction(clock, anchor, offset_s, exchanges=bounds.exchanges, wall_error_s=wall_s - offset_s)


class _Corridor:
    """Straight lines between upper and lower bounds; readings count from ``at_s``."""

    def __init__(self, bounds: _Bounds, at_s: float) -> None:
        # A line can touch only the corners of the hulls.
        self._upper = _lower_hull([(at - at_s, value) for at, value in bounds.upper])
        lower = _lower_hull([(at - at_s, -value) for at, value in bounds.lower])
        self._lower = [(at, -value) for at, value in lower]
        self._steepest = _maximum(self.margin, -MAX_DRIFT, MAX_DRIFT)

    def _highest(self, rate: float, at: float = 0.0) -> float:
        """Return the highest value at ``at`` of a line of this rate below all upper bounds."""
        return min(value - rate * (there - at) for there, value in self._upper)

    def _lowest(self, rate: float, at: float = 0.0) -> float:
        return max(value - rate * (there - at) for there, value in self._lower)

    def margin(self, rate: float) -> float:
        """Return the distance of the middle line of this rate from the bounds; negative if it violates them."""
        return (self._highest(rate) - self._lowest(rate)) / 2

    def middle(self, rate: float) -> float:
        """Return the value at 0 of the middle line of this rate."""
        return (self._highest(rate) + self._lowest(rate)) / 2

    def best_rate(self) -> float:
        """Return the rate nearest to 0 whose distance from the bounds is nearly the greatest."""
        best = self._steepest
        wanted = self.margin(best)
        return _edge(self.margin, best, 0.0, _SHARE_OF_MARGIN * wanted if wanted > 0 else wanted)

    def doubt(self, offset: float, rate: float, at: float) -> float:
        """Return how far a permitted line can be from the given one at ``at``."""
        slowest = _edge(self.margin, self._steepest, -MAX_DRIFT, 0.0)
        fastest = _edge(self.margin, self._steepest, MAX_DRIFT, 0.0)
        value = offset + rate * at

        def highest(rate: float) -> float:
            return self._highest(rate, at)

        def lowest(rate: float) -> float:
            return -self._lowest(rate, at)

        above = highest(_maximum(highest, slowest, fastest)) - value
        below = lowest(_maximum(lowest, slowest, fastest)) + value
        return max(above, below)


def _maximum(concave: Callable[[float], float], least: float, most: float) -> float:
    """Return where a concave function is greatest."""
    for _ in range(2 * _HALVINGS):
        third = (most - least) / 3
        if concave(least + third) < concave(most - third):
            least += third
        else:
            most -= third
    return max((least, (least + most) / 2, most), key=concave)


def _edge(concave: Callable[[float], float], inside: float, outside: float, wanted: float) -> float:
    """Return the place nearest to ``outside`` where the function is still ``wanted``, as it is ``inside``."""
    if concave(outside) >= wanted:
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if concave(middle) >= wanted:
            inside = middle
        else:
            outside = middle
    return inside


def _lower_hull(points: Iterable[_Point]) -> list[_Point]:
    """Return the corners of the convex hull that can be touched from below, from left to right."""
    hull: list[_Point] = []
    for x, y in sorted(points):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _turns_down(first: _Point, middle: _Point, last: _Point) -> bool:
    (x0, y0), (x1, y1), (x2, y2) = first, middle, last
    return (x1 - x0) * (y2 - y0) <= (y1 - y0) * (x2 - x0)


def seen_exchanges(
    seen: Iterable[tuple[Hashable, str, float, float]],
) -> dict[Hashable, dict[str, SeenExchange]]:
    """Collect when each clock saw each exchange begin and end.

    Args:
        seen: for each rank and exchange the exchange's identity, the rank's clock, the begin and the end there; an
            infinite end if that end proves nothing.
    """
    found: dict[Hashable, dict[str, SeenExchange]] = defaultdict(dict)
    for exchange, clock, begin_s, end_s in seen:
        before = found[exchange].get(clock, SeenExchange(-math.inf, math.inf))
        found[exchange][clock] = SeenExchange(
            max(before.last_begin_s, begin_s), min(before.first_end_s, end_s)
        )
    return dict(found)
