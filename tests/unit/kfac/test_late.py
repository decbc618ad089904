"""Groups of late factors: consecutive, complete, of about the same size; and none is lost without an error."""

from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from crossover_ddp._kfac.curvature import Curvature
from crossover_ddp._kfac.factor_traffic import in_equal_groups
from crossover_ddp.errors import ExchangeError
from crossover_ddp.kfac_hooks import KFACState
from tests.harness.groups import single_process_group


@given(sizes=st.lists(st.integers(1, 1000), max_size=30), count=st.integers(1, 20))
@example(sizes=[5] * 12, count=4)
def test_groups_hold_everything_in_order_and_not_much_more_than_their_share(
    sizes: list[int], count: int
) -> None:
    groups = list(in_equal_groups(sizes, count))
    assert [place for group in groups for place in group] == list(range(len(sizes)))
    assert all(groups)
    assert len(groups) <= count or not sizes
    for group in groups:
        assert sum(sizes[place] for place in group) <= sum(sizes) / count + max(sizes)


def test_factors_that_were_lost_some_steps_ago_are_an_error_all_the_same() -> None:
    with single_process_group():
        traffic = KFACState(nn.Linear(2, 2), kl_clip=None)._preconditioner.traffic
        traffic.hold([[traffic._factor(0, "g"), traffic._factor(0, "a")]], groups=1, decay=0.9)
        with mock.patch.object(Curvature, "add", side_effect=RuntimeError("a peer has gone")):
            traffic.leave()
        traffic.leave()  # as in each later step
        with pytest.raises(ExchangeError, match="factors of K-FAC failed: a peer has gone"):
            traffic.settle()
