"""What recorded steps say of a model's work."""

import pytest

from crossover_ddp._decoupled.clock import RecordedStep, typical


def step(wait_s: float) -> RecordedStep:
    """Forward 3 s, backward 4 s; bucket 1 is read after 1 s, bucket 0 after 2 s of compute; updates take 0.25 s."""
    first = 101.0, 101.0 + wait_s, 101.25 + wait_s
    second = first[2] + 1.0, first[2] + 1.0 + wait_s, first[2] + 1.25 + wait_s
    end_s = second[2] + 1.0
    buckets = [(1000, end_s + 2.0), (1000, end_s + 4.0)]
    return RecordedStep((100.0, end_s), [second, first], buckets)


def test_waiting_and_updating_are_no_compute() -> None:
    work = typical([step(0.0), step(0.5), step(9.0)])
    assert work is not None
    assert (work.forward_s, work.backward_s) == pytest.approx((3.0, 4.0))
    assert [bucket.needed_s for bucket in work.buckets] == pytest.approx([2.0, 1.0])
    assert [bucket.ready_s for bucket in work.buckets] == pytest.approx([2.0, 4.0])
    assert [bucket.update_s for bucket in work.buckets] == pytest.approx([0.25, 0.25])
    assert [bucket.size_bytes for bucket in work.buckets] == [1000, 1000]
    assert typical([]) is None
