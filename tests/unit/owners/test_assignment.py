"""Who owns what, by its cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.muon import newton_schulz_flop


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_a_part_of_one(costs: list[int], world_size: int) -> None:
    made = assign(costs, world_size)
    for rank in range(world_size):
        assert made.loads[rank] == sum(
            cost for cost, owner in zip(costs, made.owners, strict=True) if owner == rank
        )
    assert world_size * max(made.loads) <= sum(costs) + max(costs, default=0) * (world_size - 1)


def test_equal_ones_of_a_bucket_spread_over_the_ranks() -> None:
    assert assign([5] * 6, 3).owners == (2, 1, 0, 2, 1, 0)
    assert assign([1, 1, 2, 3], 2).owners == (0, 1, 1, 0)
    assert assign([], 2).busiest_share == 0
    with pytest.raises(ValueError, match="expected at least one rank"):
        assign([1], 0)


def test_the_cost_is_that_of_the_products() -> None:
    assert newton_schulz_flop((3, 7)) == newton_schulz_flop((7, 3)) == 20 * 9 * 7 + 10 * 27
    assert newton_schulz_flop((3, 7), steps=1) * 5 == newton_schulz_flop((3, 7))
