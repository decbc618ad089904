"""The mutex as jobs of one rank see it; each mutex here is a job, in a thread where it has to wait."""

import contextlib
import datetime
import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import (
    SOON_S,
    Make,
    acquire_in,
    blocks,
    membership_of,
    warnings,
)

# --- taking turns -------------------------------------------------------------------------------------------------


def take_turns(mutex: GPUMutex, count: int) -> list[tuple[float, float, GPUMutex]]:
    spans = []
    for _ in range(count):
        mutex.acquire()
        begin_s = time.monotonic()
        time.sleep(0.001)
        spans.append((begin_s, time.monotonic(), mutex))
        mutex.release()
    return spans


@pytest.mark.parametrize("count", [2, 3])
def test_jobs_that_always_want_a_turn_alternate(count: int, make: Make, threads: ThreadPoolExecutor) -> None:
    mutexes = [make() for _ in range(count)]
    together = threading.Barrier(count, timeout=SOON_S)
    taken = [
        threads.submit(lambda mutex=mutex: [together.wait(), *take_turns(mutex, 40)][1:]) for mutex in mutexes
    ]
    spans = sorted((span for each in taken for span in each.result(SOON_S)), key=lambda span: span[0])
    for (_, end_s, _), (begin_s, _, _) in itertools.pairwise(spans):
        assert begin_s >= end_s
    assert sorted(mutex.stats()["turns"] for mutex in mutexes) == [40] * count
    owners = [mutex for *_, mutex in spans]
    first = max(owners.index(mutex) for mutex in mutexes)
    last = min(len(owners) - owners[::-1].index(mutex) for mutex in mutexes)
    assert max(len(list(run)) for _, run in itertools.groupby(owners[first:last])) <= 2


def test_who_queues_first_starts_first(make: Make, threads: ThreadPoolExecutor) -> None:
    holder, first, second = make(), make(), make()
    holder.acquire()
    first.request()
    assert eventually(lambda: membership_of(first).segment.drawn() == 2)
    second.request()
    later = acquire_in(threads, second)
    earlier = acquire_in(threads, first)
    assert blocks(earlier)
    assert blocks(later)
    holder.release()
    started_s = earlier.result(SOON_S)
    assert blocks(later)
    first.release()
    assert later.result(SOON_S) > started_s


def test_a_job_alone_never_waits(make: Make) -> None:
    mutex = make()
    for turn in range(1, 6):
        mutex.acquire()
        assert mutex.holding
        mutex.release()
        assert eventually(lambda: mutex.stats()["turn"] == turn)  # noqa: B023
    assert not mutex.shared
    assert mutex.stats()["waited_s"] < SOON_S


def test_shared_tells_of_siblings(make: Make) -> None:
    mutex = make()
    with mutex:
        alone = mutex.shared
        sibling = make()
        until_next_turn = mutex.shared
    with mutex:
        together = mutex.shared
    sibling.close()
    with mutex:
        alone_again = mutex.shared
    assert (alone, until_next_turn, together, alone_again) == (False, False, True, False)


def test_acquiring_twice_is_one_turn(make: Make) -> None:
    mutex = make()
    mutex.acquire()
    mutex.acquire()
    assert mutex.stats()["turns"] == 1
    mutex.release()
    assert not mutex.holding


def test_arguments_without_effect_warn(make: Make) -> None:
    mutex = make()
    with pytest.warns(FutureWarning, match="has no effect"):
        mutex.acquire(ahead=True)
    assert mutex.holding


def test_a_turn_begun_alone_is_waited_for_like_any_other(make: Make, threads: ThreadPoolExecutor) -> None:
    mutex = make()
    mutex.acquire()
    sibling = make()
    waiting = acquire_in(threads, sibling)
    time.sleep(0.05)
    mutex.release()
    waiting.result(SOON_S)
    again = acquire_in(threads, mutex)
    assert blocks(again)
    sibling.release()
    again.result(SOON_S)


def test_requesting_and_acquiring_inside_a_turn_holds_nobody_up(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    """To wait for a turn while holding another one would wait for siblings that wait for us."""
    mutex, sibling = make(), make()
    mutex.acquire()
    waiting = acquire_in(threads, sibling)
    assert blocks(waiting)
    mutex.request()
    inside = acquire_in(threads, mutex)
    inside.result(SOON_S)
    mutex.release()
    waiting.result(SOON_S)
    again = acquire_in(threads, mutex)
    assert blocks(again)
    sibling.release()
    again.result(SOON_S)


def test_releasing_without_a_turn_is_harmless(make: Make) -> None:
    mutex = make()
    mutex.release()
    mutex.acquire()
    mutex.release()
    mutex.release()
    assert mutex.stats()["turns"] == 1
    assert not mutex.holding


def test_an_exception_gives_the_turn_back(make: Make, threads: ThreadPoolExecutor) -> None:
    mutex, sibling = make(), make()
    with contextlib.suppress(ZeroDivisionError), mutex:
        raise ZeroDivisionError
    acquire_in(threads, sibling).result(SOON_S)


def test_a_pause_gives_the_turn_away_and_takes_it_again(make: Make, threads: ThreadPoolExecutor) -> None:
    mutex, sibling = make(), make()
    mutex.acquire()
    waiting = acquire_in(threads, sibling)
    assert blocks(waiting)
    with mutex.paused():
        assert not mutex.holding
        waiting.result(SOON_S)
        sibling.release()
    assert mutex.holding


def test_a_pause_outside_a_turn_takes_none(make: Make) -> None:
    mutex = make()
    with mutex.paused():
        pass
    assert not mutex.holding
    assert mutex.stats()["turns"] == 0


# --- leases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", [0, -1, -0.1, math.nan, datetime.timedelta(0)])
def test_a_lease_must_be_positive(lease: object, make: Make) -> None:
    with pytest.raises(ValueError, match=r"expected a lease > 0 seconds, got lease=.*; leave it out"):
        make(lease=lease)


def test_a_lease_may_be_a_timedelta(make: Make) -> None:
    assert make(lease=datetime.timedelta(milliseconds=1500)).stats()["lease_s"] == 1.5


def test_a_turn_that_does_not_end_costs_its_lease_once(
    make: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, mutex = make(lease=0.3), make()
    stuck.acquire()
    begin_s = time.monotonic()
    mutex.acquire()
    assert 0.3 <= time.monotonic() - begin_s < 0.3 + SOON_S / 2
    mutex.release()
    begin_s = time.monotonic()
    for _ in range(5):
        mutex.acquire()
        mutex.release()
    assert time.monotonic() - begin_s < SOON_S, "who does not move is not waited for again"
    assert mutex.stats()["leases_expired"] == 1
    assert len(warnings(caplog)) == 1
    assert "longer than its lease of 0.3 s" in warnings(caplog)[0]

    stuck.release()  # late, but back: from now on both wait for each other again
    stuck.acquire()
    waiting = acquire_in(threads, mutex)
    assert blocks(waiting)
    stuck.release()
    waiting.result(SOON_S)
    assert mutex.stats()["leases_expired"] == 1
