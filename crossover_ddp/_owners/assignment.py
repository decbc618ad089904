"""Assigns things to ranks by their cost. Pure: no tensors, no processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Assignment(NamedTuple):
    """The owners of things."""

    owners: tuple[int, ...]  # rank of each thing, in the order in which the costs were given
    loads: tuple[float, ...]  # by rank, the cost of all that it owns

    @property
    def busiest_share(self) -> float:
        """The busiest rank's part of the total cost; 0 if nothing costs anything."""
        return max(self.loads) / sum(self.loads) if any(self.loads) else 0.0


def assign(
    costs: Sequence[float],
    world_size: int,
    *,
    buckets: Sequence[int] | None = None,
    ties: Sequence[Any] | None = None,
) -> Assignment:
    """Give each thing to the rank with the least load so far, the most expensive thing first.

    Among ranks with equal loads it goes to the lowest. With one bucket no rank has more than
    4/3 − 1/(3·W) times the least possible maximum (Graham's bound for this order, 1969).

    Args:
        costs: of each thing.
        world_size: number W of ranks.
        buckets: the bucket of each thing, by number. Pass it if each bucket waits for the rank with
            the largest load in it. Then a rank's load is that in the thing's bucket, plus its load
            in all buckets divided by their number. Default: one bucket.
        ties: among equal costs, the thing with the least of these goes first. Default: the last
            thing, since backward makes gradients in about that order, so that things of one bucket
            spread over the ranks.
    """
    loads: list[float] = [0] * world_size
    bucket_of = [0] * len(costs) if buckets is None else buckets
    in_buckets: dict[int, list[float]] = {bucket: [0] * world_size for bucket in bucket_of}
    owners = [0] * len(costs)

    def by_cost(thing: int) -> Any:
        return -costs[thing], -thing if ties is None else ties[thing]

    for thing in sorted(range(len(costs)), key=by_cost):
        in_bucket = in_buckets[bucket_of[thing]]
        has = [own + all_ / len(in_buckets) for own, all_ in zip(in_bucket, loads, strict=True)]
        owner = has.index(min(has))
        owners[thing] = owner
        loads[owner] += costs[thing]
        in_bucket[owner] += costs[thing]
    return Assignment(tuple(owners), tuple(loads))
