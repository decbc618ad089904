"""Who owns what, by its cost. Pure: no tensors, no processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Assignment(NamedTuple):
    """Rank of each thing, in the order in which they were given, and the cost of what each rank owns."""

    owners: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def busiest_share(self) -> float:
        """The busiest rank's cost over that of all; 0 if nothing costs anything."""
        return max(self.loads) / sum(self.loads) if any(self.loads) else 0.0


def assign(
    costs: Sequence[float],
    world_size: int,
    *,
    buckets: Sequence[int] | None = None,
    ties: Sequence[Any] | None = None,
) -> Assignment:
    """Give each thing to the rank that has the least so far, the most expensive first; of equal ranks to the lowest.

    No rank has more than 4/3 − 1/(3·W) times the least possible maximum (Graham's bound for this order, 1969), if there
    is one bucket.

    Args:
        costs: of each thing.
        world_size: number W of ranks.
        buckets: number of the bucket of each, if each bucket waits for the rank that has most of it: what a rank has
            counts in that bucket, and, divided by the number of buckets, in all.
        ties: of equal costs, the thing with the least of these goes first. Default: the last one, since backward makes
            gradients in about that order, so that those of one bucket spread over the ranks.
    """
    loads: list[float] = [0] * world_size
    bucket_of = [0] * len(costs) if buckets is None else buckets
    in_buckets: dict[int, list[float]] = {bucket: [0] * world_size for bucket in bucket_of}
    owners = [0] * len(costs)
    for number in sorted(
        range(len(costs)), key=lambda i: (-costs[i], -i if ties is None else ties[i])
    ):
        here = in_buckets[bucket_of[number]]
        has = [own + all_ / len(in_buckets) for own, all_ in zip(here, loads, strict=True)]
        owner = owners[number] = min(range(world_size), key=lambda rank: (has[rank], rank))
        loads[owner] += costs[number]
        here[owner] += costs[number]
    return Assignment(tuple(owners), tuple(loads))
