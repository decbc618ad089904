"""The mutex as jobs of one rank see it; each mutex here is a job, in a thread where it has to wait."""

import contextlib
import datetime
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import (
    SOON_S,
    Make,
    acquire_in,
    blocks,
    held_up,
    membership_of,
    warnings,
)

# --- taking turns -------------------------------------------------------------------------------------------------


def test_who_queues_first_starts_first(make: Make, threads: ThreadPoolExecutor) -> None:
    holder, first, second = make(), make(), make()
    holder.acquire()
    first.request()
    assert eventually(lambda: membership_of(first).segment.drawn() == 2)
    second.request()
    with held_up(threads, second) as later:
        with held_up(threads, first):
            holder.release()
        assert blocks(later)
        first.release()


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


def test_calls_without_effect(make: Make) -> None:
    """To acquire what one has, to release what one has not, to pause outside a turn, to ask for it ahead."""
    mutex = make()
    mutex.release()
    with mutex.paused():
        pass
    assert mutex.stats()["turns"] == 0
    mutex.acquire()
    with pytest.warns(FutureWarning, match="has no effect"):
        mutex.acquire(ahead=True)
    assert mutex.holding
    mutex.release()
    mutex.release()
    assert mutex.stats()["turns"] == 1
    assert not mutex.holding


def test_a_turn_begun_alone_is_waited_for_and_waits_like_any_other(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    """To ask inside a turn is for the next one: to wait for that would wait for siblings that wait for us."""
    mutex = make()
    mutex.acquire()
    sibling = make()
    with held_up(threads, sibling):
        mutex.request()
        acquire_in(threads, mutex).result(SOON_S)
        mutex.release()
    with held_up(threads, mutex):
        sibling.release()


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


# --- leases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", [0, -1, -0.1, math.nan, datetime.timedelta(0)])
def test_a_lease_must_be_positive(lease: object, make: Make) -> None:
    with pytest.raises(ValueError, match=r"expected a lease > 0 seconds, got lease=.*; leave it out"):
        make(lease=lease)
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
    with held_up(threads, mutex):
        stuck.release()
    assert mutex.stats()["leases_expired"] == 1
