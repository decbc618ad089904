"""Assigns things to ranks by their cost. Pure: no tensors, no processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Assignment(NamedTuple):
    """The owner of each thing, and the load of each rank."""

    owners: tuple[int, ...]  # the rank that owns each thing, in the order of the given costs
    loads: tuple[float, ...]  # by rank, the total cost of the things that it owns

    @property
    def busiest_share(self) -> float:
        """The busiest rank's share of the total cost, or 0 if the total cost is 0."""
        return max(self.loads) / sum(self.loads) if any(self.loads) else 0.0


def assign(
    costs: Sequence[float],
    world_size: int,
    *,
    buckets: Sequence[int] | None = None,
    ties: Sequence[Any] | None = None,
) -> Assignment:
    """Give each thing to the rank with the least load so far, starting with the most expensive.

    If several ranks have the same load, the lowest rank gets the thing. With one bucket, no rank's
    load exceeds 4/3 − 1/(3·W) times the smallest possible maximum (Graham's bound for this order,
    1969).

    Args:
        costs: the cost of each thing.
        world_size: the number W of ranks.
        buckets: the number of each thing's bucket. Pass it if each bucket waits for the rank with
            the largest load in it. A rank's load is then its load in the thing's bucket plus its
            total load divided by the number of buckets. Default: one bucket.
        ties: one key per thing. Among things of equal cost, the one with the smallest key goes
            first. Default: the last thing goes first. Backward computes gradients in about that
            order, so the things of one bucket spread over the ranks.
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
