"""When fragments leave and come back, and which intervals suit a link."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._averaging.late import Schedule
from crossover_ddp._tuning.model import AveragingPlan, Link, plan_averaging


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sync_every = draw(st.integers(2, 12))
    return Schedule(
        sync_every, draw(st.integers(0, sync_every - 1)), draw(st.integers(1, 15)), draw(st.integers(0, 5))
    )


@given(schedules())
def test_each_fragment_leaves_once_an_interval_and_is_back_before_it_leaves_again(schedule: Schedule) -> None:
    flying: dict[int, int] = {}
    left: dict[int, list[int]] = {}
    for steps in range(schedule.warmup_steps + 5 * schedule.sync_every):
        if schedule.delay:
            for fragment in schedule.arriving(steps):
                assert steps - flying.pop(fragment) == schedule.delay
        for fragment in schedule.leaving(steps):
            assert fragment not in flying, "two exchanges of one element"
            assert steps > schedule.warmup_steps
            flying[fragment] = steps
            left.setdefault(fragment, []).append(steps)
            if not schedule.delay:
                assert fragment in schedule.arriving(steps)
                del flying[fragment]
    assert set(left) == set(range(schedule.fragments))
    begin = schedule.warmup_steps + schedule.sync_every
    counts = [len(schedule.leaving(steps)) for steps in range(begin, begin + schedule.sync_every)]
    assert max(counts) - min(counts) <= 1, "they are spread over the interval"
    for times in left.values():
        assert {later - earlier for earlier, later in pairwise(times)} <= {schedule.sync_every}
        assert len(times) >= 4


@given(st.integers(0, 1000), st.integers(1, 40))
def test_slices_cover_the_vector(numel: int, fragments: int) -> None:
    spans = [Schedule(2, 0, fragments).span(numel, fragment) for fragment in range(fragments)]
    assert spans[0].start == 0 and spans[-1].stop == numel
    assert all(left.stop == right.start for left, right in pairwise(spans))
    assert max(span.numel for span in spans) - min(span.numel for span in spans) <= 1


def test_every_step_and_warm_up_are_not_local() -> None:
    assert Schedule(1).local_from == math.inf
    assert not any(Schedule(1).leaving(steps) for steps in range(5))
    assert Schedule(2, warmup_steps=3).local_from == 3


@given(st.floats(1e-3, 10), st.floats(1e3, 1e9), st.floats(0, 1e-2), st.floats(1e-11, 1e-7))
def test_a_plan_hides_the_wire(compute_s: float, size_bytes: float, alpha_s: float, beta_s: float) -> None:
    link = Link(alpha_s, beta_s)
    if 2 * link.half_s(size_bytes) > 1000 * compute_s:
        return
    plan = plan_averaging(compute_s, size_bytes, link)
    one_s = 2 * link.half_s(size_bytes / plan.fragments)
    assert plan.fragments * one_s <= plan.sync_every * compute_s, "the wire cannot keep up"
    assert one_s <= plan.delay * compute_s, "a step would wait"
    Schedule(**plan.arguments())


def test_a_plan_takes_the_shortest_interval_if_there_is_one() -> None:
    plan = plan_averaging(1.0, 3e6, Link(0.0, 0.5e-6))
    assert plan == AveragingPlan(4, 1, 4, 1.0, 1.0, 3.0)
    assert plan_averaging(1.0, 0.5e6, Link(0.0, 0.5e-6)).sync_every == 2
    # A start-up time as long as a step: everything at once.
    assert plan_averaging(1.0, 1e6, Link(1.0, 0.5e-6)).fragments == 1
    with pytest.raises(ValueError, match="within 4096 steps"):
        plan_averaging(1e-3, 1e9, Link(0.0, 1e-6))
