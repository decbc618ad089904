"""Factors that follow behind the gradients of later steps: the same training, bit for bit, in other steps' time."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from crossover_ddp._kfac.factor_traffic import FactorTraffic, in_equal_groups
from tests.harness import in_ranks, training
from tests.multiprocess.kfac_training import Training, same

OPTIONS: dict[str, Any] = {"kl_clip": 1e-4, "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 18


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_late_factors_train_the_same(rank: int) -> None:
    """Count how many factors leave in each step; compare the gradients with those of factors in the buckets."""
    counts: list[int] = []
    leave = FactorTraffic.leave

    def count(traffic: FactorTraffic, after: Any = None, *, all_groups: bool = False) -> None:
        before = sum(map(len, traffic.late))
        leave(traffic, after, all_groups=all_groups)
        counts.append(before - sum(map(len, traffic.late)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "leave", count)
        late = Training(rank, **OPTIONS).trained(STEPS)
        in_late = counts.copy()
        patch.setattr(FactorTraffic, "can_trail", False)
        assert same(late, Training(rank, **OPTIONS).trained(STEPS))
        assert not any(counts[len(in_late) :])
    # Asked before each step. Four layers' factors of steps 4 and 12, one layer after each step, before 8 and 16.
    assert in_late == [0] * 5 + [2] * 4 + [0] * 4 + [2] * 4 + [0] * 2


@in_ranks(2)
def test_periods_may_change_and_are_not_asked_for_ahead(rank: int) -> torch.Tensor:
    steps = STEPS

    def every(step: int) -> int:
        assert step <= steps, "nobody asks for steps far ahead"
        return 3 if step < 9 else 2

    return Training(rank, **OPTIONS | {"factor_update_steps": every}).run(steps).parameters()


@in_ranks(2)
def test_models_of_one_process_train_as_each_alone(rank: int) -> None:
    """Step by step in turns, on one process group: two models with late factors, and one with deferred gathers."""
    alone, deferred = Training(rank, **OPTIONS).trained(STEPS), training.Training("decoupled", rank)
    one, other = (Training(rank, **OPTIONS) for _ in range(2))
    found: list[Any] = [[], []]
    for _ in range(STEPS):
        deferred.step()
        found[0] += one.trained(1)
        found[1] += other.trained(1)
    deferred.close()
    assert same(found[0], alone) and same(found[1], alone)
    undisturbed = training.Training("decoupled", rank).run(STEPS)
    undisturbed.close()
    assert training.same(deferred, undisturbed)


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


@in_ranks(2)
def test_after_close_no_factors_leave_any_more(rank: int) -> None:
    made = Training(rank, **OPTIONS)
    made.run(5)
    assert made.kfac.memory_usage()["buffers"] > 0
    made.kfac.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "send", None)
        made.run(4)
