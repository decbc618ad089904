"""Who owns what by its cost, and whose part what passes through fills up; where it lies: tests/multiprocess."""

from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.packing import fill_up


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_the_emptiest_parts_are_filled_first(filled: list[int], numel: int) -> None:
    """So what passes through fills up the parts of those who own little."""
    shares = fill_up(filled, numel)
    after = [before + share for before, share in zip(filled, shares, strict=True)]
    assert sum(shares) == numel
    assert min(shares) >= 0
    raised = [level for level, share in zip(after, shares, strict=True) if share]
    # Nobody who got something is more than one element above anybody.
    assert not raised or max(raised) <= min(after) + 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_a_part_of_one(costs: list[int], world_size: int) -> None:
    made, loads = assign(costs, world_size), [0] * world_size
    for cost, owner in zip(costs, made.owners, strict=True):
        loads[owner] += cost
    assert [*made.loads] == loads
    assert world_size * max(loads) <= sum(costs) + max(costs, default=0) * (world_size - 1)
