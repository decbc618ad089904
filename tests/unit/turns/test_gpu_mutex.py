"""The mutex as jobs of one rank see it; each mutex here is a job, in a thread where it has to wait."""

import contextlib
import datetime
import itertools
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns import rules
from crossover_ddp._turns import segment as turn_segment
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import run_ranks
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import (
    DEVICE,
    LEASE_S,
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


def test_a_context_is_a_turn(make: Make) -> None:
    mutex = make()
    with mutex as entered:
        assert entered is mutex
        assert mutex.holding
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


def test_many_jobs_of_several_groups_share_a_device(
    make: Make, group: str, threads: ThreadPoolExecutor
) -> None:
    mutexes = [make(f"{group}-{number % 3}") for number in range(9)]
    taken = [threads.submit(take_turns, mutex, 8) for mutex in mutexes]
    spans = [span for each in taken for span in each.result(SOON_S)]
    for name in {mutex.name for mutex in mutexes}:
        own = sorted((begin_s, end_s) for begin_s, end_s, mutex in spans if mutex.name == name)
        assert len(own) == 3 * 8
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(own))


def test_groups_and_devices_do_not_wait_for_each_other(make: Make, group: str) -> None:
    make().acquire()
    for other in (make(f"{group}-other"), make(device="dev1")):
        other.acquire()
        assert other.holding
        assert not other.shared


def _acquire_as(rank: int, world_size: int, uid: int, group: str) -> tuple[float, bool, str]:
    os.seteuid(uid)
    try:
        begin_s = time.monotonic()
        mutex = GPUMutex(group, device=DEVICE, lease=LEASE_S)
        mutex.acquire()
        answer = time.monotonic() - begin_s, mutex.shared, membership_of(mutex).segment.path
        mutex.close()
        return answer
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_do_not_meet(make: Make, group: str) -> None:
    make().acquire()
    elapsed_s, shared, path = run_ranks(_acquire_as, 1, args=(65534, group), backend=None)[0]
    assert elapsed_s < SOON_S
    assert not shared
    assert path.startswith(f"{SHARED_MEMORY}/crossover_ddp-65534/{group}@")
    assert not os.path.exists(path)


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


def test_every_turn_that_does_not_end_has_a_lease(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    stuck, mutex = make(lease=0.1), make()
    for _ in range(2):
        stuck.acquire()
        mutex.acquire()
        stuck.release()
        mutex.release()
    assert mutex.stats()["leases_expired"] == 2
    assert len(warnings(caplog)) == 1


def test_a_lease_left_out_follows_the_turns_up_and_down(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DEFAULT_LEASE_S", 0.05)
    mutex, sibling = make(lease=None), make()
    assert mutex.stats()["lease_s"] == 0.05

    def published() -> float:
        slots = membership_of(sibling).segment.slots().values()
        return next(slot.lease_s for slot in slots if slot.job == mutex.job)

    for _ in range(4):
        with mutex:
            time.sleep(0.1)
    assert mutex.stats()["lease_s"] >= 0.4
    assert published() == mutex.stats()["lease_s"]
    for _ in range(16):
        with mutex:
            pass
    assert mutex.stats()["lease_s"] == published() < 0.2, "turns of long ago do not count"


def test_waiting_for_a_sibling_makes_no_lease_longer(
    make: Make, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(rules, "DEFAULT_LEASE_S", 0.1)
    mutex, sibling = make(lease=None), make()
    for _ in range(3):
        sibling.acquire()
        waiting = acquire_in(threads, mutex)
        time.sleep(0.2)
        sibling.release()
        waiting.result(SOON_S)
        mutex.release()
    assert mutex.stats()["waited_s"] > 0.4
    assert mutex.stats()["lease_s"] < 0.4


def test_a_lease_that_is_given_stays(make: Make) -> None:
    mutex = make(lease=0.01)
    for _ in range(3):
        with mutex:
            time.sleep(0.05)
    assert mutex.stats()["lease_s"] == 0.01


def test_a_stopped_job_costs_one_lease_however_many_slots_it_has(make: Make, group: str) -> None:
    """A job of eight ranks on one device draws a turn and is heard of no more."""
    segments = [turn_segment.TurnSegment(group, DEVICE) for _ in range(8)]
    for rank, segment in enumerate(segments):
        segment.join(job=9, lead=segment.machine, rank=rank, world_size=8, lease_s=0.4)
    mutex = make()
    segments[0].draw_turn()
    begin_s = time.monotonic()
    for _ in range(3):
        mutex.acquire()
        mutex.release()
    assert time.monotonic() - begin_s >= 0.4
    assert mutex.stats()["leases_expired"] == 1
    segments[0].draw_turn()
    for _ in range(3):
        mutex.acquire()
        mutex.release()
    assert mutex.stats()["leases_expired"] == 1, "nothing of it has moved since"
    segments[3].publish_started(2)
    segments[0].draw_turn()
    mutex.acquire()
    assert mutex.stats()["leases_expired"] == 2, "whoever goes on is waited for again"
    for segment in segments:
        segment.leave()
