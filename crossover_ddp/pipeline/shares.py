"""How replicas of different speed share the micro-batches of a step. Pure."""

import heapq
import math
from collections.abc import Sequence


def fastest_shares(times_s: Sequence[float], count: int) -> list[int]:
    """Return how many of ``count`` micro-batches each replica takes, at least one each.

    The replica that computes longest computes as briefly as possible.

    Args:
        times_s: how long each replica computes for one micro-batch, in seconds.
        count: the number of micro-batches, at least the number of replicas.
    """
    shares = [1] * len(times_s)
    # The replica that would end first with one more micro-batch takes the next one.
    ends = [(2 * time_s, place) for place, time_s in enumerate(times_s)]
    heapq.heapify(ends)
    for _ in range(count - len(times_s)):
        end_s, place = ends[0]
        shares[place] += 1
        heapq.heapreplace(ends, (end_s + times_s[place], place))
    return shares


def pattern_of(shares: Sequence[int]) -> tuple[int, ...]:
    """Return an order in which replicas take micro-batches in turn, for `Stage.pattern`.

    It is as even as possible: at each place, the replica that lags most behind its share is next.
    The result is empty if the shares are equal, since this is the default of `Stage`.
    """
    if len(set(shares)) == 1:
        return ()
    divisor = math.gcd(*shares)
    parts = [share // divisor for share in shares]
    total = sum(parts)
    credit = [0] * len(parts)
    found = []
    for _ in range(total):
        credit = [have + part for have, part in zip(credit, parts, strict=True)]
        place = max(range(len(parts)), key=lambda each: (credit[each], -each))
        credit[place] -= total
        found.append(place)
    return tuple(found)
