"""What is recorded of a step, on a clock of the test's own."""

import pytest

from crossover_ddp._decoupled import clock
from crossover_ddp._decoupled.clock import StepTimes, cpu_s_of, workload_of


class Clock:
    """Seconds pass only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s * 0.75

    def thread_time(self) -> float:
        return self.now_s * 0.5

    def __call__(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Clock:
    after = Clock()
    monkeypatch.setattr(clock, "time", after)
    return after


def one_step(times: StepTimes, after: Clock, wait_s: float = 0.5) -> None:
    """Forward 3 s, backward 4 s; bucket 1 is read after 1 s, bucket 0 after 2 s of compute."""
    times.begin()
    for place in (1, 0):
        asked_s = after(1.0)
        waited_s = after(wait_s)
        after(0.25)
        times.updated(place, asked_s, waited_s)
    after(1.0)
    times.forward_ends()
    for _ in range(2):
        after(2.0)
        times.bucket_ready(1000)
    times.end()


def test_waiting_and_updating_are_no_compute(after: Clock) -> None:
    times = StepTimes()
    for wait_s in (0.0, 0.5, 9.0):
        one_step(times, after, wait_s)
    work = workload_of(times)
    assert work is not None
    assert (work.forward_s, work.backward_s) == pytest.approx((3.0, 4.0))
    assert [bucket.needed_s for bucket in work.buckets] == pytest.approx([2.0, 1.0])
    assert [bucket.ready_s for bucket in work.buckets] == pytest.approx([2.0, 4.0])
    assert [bucket.update_s for bucket in work.buckets] == pytest.approx([0.25, 0.25])
    assert [bucket.size_bytes for bucket in work.buckets] == [1000, 1000]


def test_other_threads_work_is_shared_out_to_halves_of_buckets(after: Clock) -> None:
    times = StepTimes()
    assert cpu_s_of(times) == 0.0
    one_step(times, after, 0.5)
    seconds_of_step, halves = 8.5, 4
    assert cpu_s_of(times) == pytest.approx(seconds_of_step * 0.25 / halves)
