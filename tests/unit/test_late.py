"""Groups of late factors: consecutive, complete, of about the same size."""

from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._kfac.late import in_equal_groups


@given(sizes=st.lists(st.integers(1, 1000), max_size=30), count=st.integers(1, 20))
def test_groups_hold_everything_in_order(sizes: list[int], count: int) -> None:
    groups = list(in_equal_groups(sizes, count))
    assert [place for group in groups for place in group] == list(range(len(sizes)))
    assert all(len(group) for group in groups)
    assert len(groups) <= count or not sizes


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), count=st.integers(1, 20))
def test_no_group_has_more_than_its_share_and_one_more(sizes: list[int], count: int) -> None:
    for group in in_equal_groups(sizes, count):
        assert sum(sizes[place] for place in group) <= sum(sizes) / count + max(sizes)


def test_equal_sizes_make_equal_groups() -> None:
    assert [len(group) for group in in_equal_groups([5] * 12, 4)] == [3, 3, 3, 3]
    assert [len(group) for group in in_equal_groups([7], 4)] == [1]
