"""The tree of virtual ranks: which leaves each rank has, and the order of additions."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._engine import links
from crossover_ddp._virtual.tree import Node, PartialSums, is_left_sibling, leaves_of, sums_of

MOST = 64
ALL = [(count, size) for count in range(1, MOST + 1) for size in range(1, count + 1)]


def paired(left: Any, right: Any) -> Any:
    """Add symbolically."""
    return left, right


def expected(count: int) -> Any:
    """Return the order in which `tree_sum` adds the leaves, as nested pairs."""
    sums: list[Any] = [*range(count)]
    while len(sums) > 1:
        last = [sums.pop()] if len(sums) % 2 else []
        sums = [*zip(sums[::2], sums[1::2], strict=True), *last]
    return sums[0]


def of_rank(rank: int, size: int, count: int) -> PartialSums[Any]:
    sums: PartialSums[Any] = PartialSums(count, paired)
    for leaf in leaves_of(rank, size, count):
        sums.push(leaf, leaf + 1, leaf)
    return sums


def test_the_order_is_known_for_five_leaves() -> None:
    assert expected(5) == (((0, 1), (2, 3)), 4)


def test_leaves_of_all_ranks_follow_each_other_and_differ_by_one_at_most() -> None:
    for count, size in ALL:
        leaves = [leaves_of(rank, size, count) for rank in range(size)]
        assert [leaf for of_one in leaves for leaf in of_one] == [*range(count)], (count, size)
        lengths = {len(of_one) for of_one in leaves}
        assert max(lengths) - min(lengths) <= 1, (count, size)


def test_partial_sums_of_a_rank_follow_each_other() -> None:
    for count, size in ALL:
        for rank in range(size):
            leaves = leaves_of(rank, size, count)
            sums = sums_of(leaves, count)
            added = [leaf for start, stop in sums for leaf in range(start, stop)]
            assert added == [*leaves], (count, size, rank)
            kept = [(node.start, node.stop) for node in of_rank(rank, size, count).nodes]
            assert kept == sums, (count, size, rank)


def test_sums_of_all_ranks_are_added_in_the_order_of_the_engine() -> None:
    for count, size in ALL:
        total: PartialSums[Any] = PartialSums(count, paired)
        for rank in range(size):
            for start, stop, value in of_rank(rank, size, count).nodes:
                total.push(start, stop, value)
        ((start, stop, value),) = total.nodes
        assert (start, stop) == (0, count), (count, size)
        assert value == expected(count), (count, size)


def most_sums(count: int, leaves: range) -> int:
    """Return the most sums that are kept at a time."""
    sums: PartialSums[Any] = PartialSums(count, paired)
    most = 0
    for leaf in leaves:
        sums.push(leaf, leaf + 1, leaf)
        most = max(most, len(sums.nodes))
    return most


def test_a_rank_keeps_few_sums() -> None:
    """A binary counter has one sum for each digit. Leaves in its middle may need twice as many."""
    for count, size in ALL:
        for rank in range(size):
            leaves = leaves_of(rank, size, count)
            share, more = divmod(count, size)
            digits = math.log2(len(leaves)) + 1
            is_counter = not rank or (not more and math.log2(share).is_integer())
            most = most_sums(count, leaves)
            assert most <= (digits if is_counter else 2 * digits), (count, size, rank)


def test_a_share_that_is_a_power_of_two_leaves_one_sum() -> None:
    for count, size in ALL:
        share, more = divmod(count, size)
        if not more and math.log2(share).is_integer():
            for rank in range(size):
                leaves = leaves_of(rank, size, count)
                assert sums_of(leaves, count) == [(leaves.start, leaves.stop)], (count, size)


@pytest.mark.parametrize(
    ("width", "start", "stop", "are_siblings"),
    [(1, 1, 2, True), (2, 2, 4, True), (2, 2, 3, False), (4, 4, 6, True), (4, 4, 5, False)],
)
def test_siblings_of_six_leaves(width: int, start: int, stop: int, are_siblings: bool) -> None:
    """The last subtree of a tree may be smaller than its left sibling."""
    assert start == width  # the leaves follow the sum
    assert is_left_sibling(Node(0, width, None), stop, 6) == are_siblings


@given(st.integers(2, MOST), st.data())
def test_floats_have_the_bits_of_the_engine(count: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, count))
    made = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scale = torch.randint(-12, 12, (count, 1), generator=made).float().exp2()
    leaves = torch.randn(count, 50, generator=made) * scale
    addends = [*leaves.clone()]
    links.tree_sum(addends, addends[0])
    total: PartialSums[torch.Tensor] = PartialSums(count, torch.Tensor.add_)
    for rank in range(size):
        own: PartialSums[torch.Tensor] = PartialSums(count, torch.Tensor.add_)
        for leaf in leaves_of(rank, size, count):
            own.push(leaf, leaf + 1, leaves[leaf].clone())
        for start, stop, value in own.nodes:
            total.push(start, stop, value)
    assert torch.equal(total.nodes[0].value, addends[0])
