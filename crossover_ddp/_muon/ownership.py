"""Who owns which matrix, by the cost of Newton-Schulz. Pure: no tensors, no processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Shape = tuple[int, int]

_WORTH: Final = 0.95


@dataclass(frozen=True)
class Ownership:
    """Who owns what.

    Args:
        owners: rank of each matrix, in the order in which they were given.
        loads: cost of what each rank owns, in FLOP.
    """

    owners: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def busiest_share(self) -> float:
        """The busiest rank's cost over that of all; 0 if nothing costs anything."""
        return max(self.loads) / sum(self.loads) if any(self.loads) else 0.0


def newton_schulz_flop(shape: Shape, steps: int = 5) -> int:
    """Return the floating-point operations of one Newton-Schulz of a matrix.

    With m <= n its sides, a step multiplies X·Xᵀ (2·m²·n), G·G (2·m³) and G·X (2·m²·n); five steps cost
    20·m²·n + 10·m³.

    Args:
        shape: rows and columns.
        steps: ``ns_steps`` of the parameter group.
    """
    small, large = sorted(shape)
    return steps * (4 * small**2 * large + 2 * small**3)


def own(costs: Sequence[int], world_size: int) -> Ownership:
    """Give each matrix to the rank that has the least so far, the last matrix first; of equal ranks to the lowest.

    Backward makes gradients in about that order, so that the matrices of one bucket spread over the ranks. No rank
    gets more than the mean load and one matrix (Graham's bound for any order, 1966). Where there are few matrices, that
    one is much: then the most expensive matrix goes first, if this takes a twentieth off the busiest rank.

    Args:
        costs: of each matrix, in the model's order; see `newton_schulz_flop`.
        world_size: number of ranks.

    Raises:
        ValueError: if ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"expected at least one rank, got world_size={world_size}; pass the group's size")
    backward = [*reversed(range(len(costs)))]
    in_order = _own_in(backward, costs, world_size)
    largest_first = _own_in(sorted(backward, key=lambda each: -costs[each]), costs, world_size)
    return min(
        in_order, largest_first, key=lambda made: max(made.loads) * (_WORTH if made is in_order else 1)
    )


def _own_in(order: Sequence[int], costs: Sequence[int], world_size: int) -> Ownership:
    loads = [0] * world_size
    owners = [0] * len(costs)
    for number in order:
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[number] = owner
        loads[owner] += costs[number]
    return Ownership(tuple(owners), tuple(loads))
