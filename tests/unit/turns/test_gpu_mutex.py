"""The mutex in jobs of one rank. Each mutex here is a job; a thread waits where one has to wait."""

import contextlib
import datetime
import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from crossover_ddp._system import environment
from crossover_ddp._turns import joining
from crossover_ddp._turns import segment as turn_segment
from crossover_ddp._turns.device_order import order_on
from crossover_ddp.errors import SegmentError, TurnError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.groups import files_of, new_group
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import (
    DEVICE,
    SOON_S,
    Make,
    acquire_in,
    blocks,
    held_up,
    membership_of,
    segment_of,
    warnings,
)


def test_shared_is_whether_a_sibling_was_there_when_the_turn_began(make: Make) -> None:
    mutex = make()
    found = []
    with mutex:
        found.append(mutex.shared)
        sibling = make()
        found.append(mutex.shared)
    for leave in (sibling.close, lambda: None):
        with mutex:
            found.append(mutex.shared)
        leave()
    assert found == [False, False, True, False]


def test_acquire_that_must_not_block_returns_false_where_it_would_wait(make: Make) -> None:
    mutex = make()
    sibling = make()
    with sibling:
        assert not mutex.acquire(blocking=False)
        assert not mutex.holding
    sibling.close()
    assert mutex.acquire(blocking=False)
    assert mutex.holding
    assert mutex.stats()["turns"] == 1


def test_a_caller_waits_for_its_device_in_turns_and_in_trials(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    """A host that runs ahead would time a step in another mode than the device computes it in."""

    def train(mutex: GPUMutex) -> set[tuple[str, bool, bool]]:
        seen = set()
        for _ in range(200):
            mutex.acquire()
            mode = mutex.mode
            found = mutex.shared, mutex.awaits_device
            if mode == mutex.mode:  # else the thread of turns has just changed it
                seen.add((mode, *found))
            mutex.release()
        return seen

    for seen in threads.map(train, [make(trial=True), make(trial=True)]):
        assert any(mode == "trying side by side" and not shared for mode, shared, _ in seen)
        assert all(
            awaits for mode, shared, awaits in seen if shared or mode == "trying side by side"
        )
        assert not any(
            awaits for mode, shared, awaits in seen if mode == "side by side" and not shared
        )


def test_calls_outside_of_a_turn_and_old_arguments_have_no_effect(make: Make) -> None:
    mutex = make()
    mutex.release()
    with mutex.paused():
        pass
    assert mutex.stats()["turns"] == 0
    mutex.acquire()
    with pytest.warns(FutureWarning, match="has no effect"):
        mutex.acquire(ahead=True)
    assert mutex.holding
    for _ in range(2):
        mutex.release()
    assert (mutex.stats()["turns"], mutex.holding) == (1, False)


def test_siblings_wait_for_a_turn_that_began_alone(make: Make, threads: ThreadPoolExecutor) -> None:
    """Acquiring inside a turn does not wait: the siblings wait for this very turn."""
    mutex = make()
    mutex.acquire()
    # A sibling that joins before the turn has its number need not wait for it.
    assert eventually(lambda: mutex.stats()["turn"] == 1)
    sibling = make()
    with held_up(threads, sibling):
        mutex.request()
        acquire_in(threads, mutex).result(SOON_S)
        mutex.release()


def test_an_exception_in_the_body_gives_the_turn_back(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    mutex = make()
    sibling = make()
    sibling.acquire()
    with held_up(threads, mutex), contextlib.suppress(ZeroDivisionError), sibling:
        raise ZeroDivisionError


def test_a_pause_gives_the_turn_away_and_takes_it_back(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    mutex = make()
    sibling = make()
    mutex.acquire()
    waiting = acquire_in(threads, sibling)
    assert blocks(waiting)
    with mutex.paused():
        assert not mutex.holding
        waiting.result(SOON_S)
        sibling.release()
    assert mutex.holding


def test_a_lent_turn_is_given_back_under_its_later_number(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    mutex = make(trial=True, lease=SOON_S / 2)
    sibling = make(trial=True)
    mutex.acquire()
    acquire_in(threads, sibling).result(
        SOON_S
    )  # the turn is lent, as this process computes nothing
    mutex.request()
    mutex.acquire()
    sibling.release()
    assert eventually(lambda: mutex.stats()["turn"] == 3)
    mutex.release()
    acquire_in(threads, sibling).result(SOON_S)
    assert sibling.stats()["leases_expired"] == 0


def test_a_late_job_has_read_the_log_before_it_draws(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings wait for a rank that has drawn, and reading a log of days takes seconds."""
    mutex = make()
    read: list[int] = []
    draw = turn_segment.TurnSegment.draw_turn
    for _ in range(5):
        with mutex:
            pass
    assert eventually(lambda: mutex.stats()["turn"] == 5)
    late = make()

    def drawing(segment: turn_segment.TurnSegment) -> int:
        assert late._turns is not None
        read.append(late._turns._log.read_numel)
        return draw(segment)

    monkeypatch.setattr(turn_segment.TurnSegment, "draw_turn", drawing)
    with late:
        assert late.stats()["turn"] == 6
    assert read == [5]


@pytest.mark.parametrize("lease", [0, -1, -0.1, math.nan, datetime.timedelta(0)])
def test_a_lease_must_be_positive(lease: object, make: Make) -> None:
    with pytest.raises(
        ValueError, match=r"expected a lease > 0 seconds, got lease=.*; leave it out"
    ):
        make(lease=lease)
    assert make(lease=datetime.timedelta(milliseconds=1500)).stats()["lease_s"] == 1.5


def test_a_turn_that_does_not_end_costs_its_lease_once(
    make: Make, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = make(lease=0.3)
    mutex = make()
    stuck.acquire()
    begin_s = time.monotonic()
    for _ in range(6):
        with mutex:
            assert 0.3 <= time.monotonic() - begin_s < SOON_S
    assert mutex.stats()["leases_expired"] == 1, (
        "the rank waits again for a sibling that has not moved"
    )
    (warning,) = warnings(caplog)
    assert "longer than its lease of 0.3 s" in warning


def test_arguments_win_over_the_environment(
    make: Make, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", f"{group}-environment")
    monkeypatch.setenv("CROSSOVER_DEVICE", "dev-environment")
    given = make(group, device="dev-argument")
    assert (given.name, given.device) == (group, "dev-argument")
    taken = make(None, device=None)
    assert (taken.name, taken.device) == (f"{group}-environment", "dev-environment")
    monkeypatch.delenv("CROSSOVER_DEVICE")
    name, same = (make(device=device).device for device in ("cpu", torch.device("cpu")))
    assert name == same
    assert str(name).startswith("cpu-")
    monkeypatch.delenv("CROSSOVER_GROUP")
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    assert GPUMutex().name == "default"


def assert_takes_no_turns(mutex: GPUMutex, reason: str) -> None:
    with mutex, mutex.paused():
        mutex.request()
        assert not mutex.holding
    assert not mutex.shared
    stats = mutex.stats()
    assert (stats["turns"], stats["siblings"], stats["disabled_because"]) == (0, 0, reason)
    assert reason in repr(mutex)


@pytest.mark.parametrize(
    ("value", "disabled"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_turns_can_be_switched_off(
    value: str, disabled: bool, make: Make, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_DISABLE", value)
    mutex = make()
    assert bool(files_of(group)) != disabled
    if disabled:
        assert_takes_no_turns(mutex, "CROSSOVER_DISABLE is set")
    with mutex:
        assert mutex.holding != disabled


def test_close_ends_the_wait_gives_the_turn_back_and_leaves_no_files(
    make: Make, group: str, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    holder, mutex, sibling = make(), make(), make()
    holder.acquire()
    with held_up(threads, mutex):
        mutex.close()  # from another thread
    assert_takes_no_turns(mutex, "closed")
    with held_up(threads, sibling):
        holder.close()
    holder.close()
    sibling.close()
    assert not files_of(group)
    GPUMutex(group, device=DEVICE).acquire()
    gc.collect()  # a mutex that is collected leaves as well
    assert not files_of(group)
    assert warnings(caplog) == []


def test_close_under_the_fork_lock_does_not_wait_for_the_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread needs that lock to end."""
    mutex = make()
    assert mutex._turns is not None
    thread = mutex._turns._thread
    joined: list[float] = []
    with monkeypatch.context() as patch, turn_segment.no_fork:
        patch.setattr(thread, "join", joined.append)
        mutex.close()
    assert joined == []
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_a_forked_child_cannot_end_its_parents_turn_and_may_join_itself(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    mutex, sibling = make(), make()
    mutex.acquire()
    if not (child := os.fork()):
        code = 1
        try:
            mutex.release()
            mutex.close()
            with contextlib.closing(make()) as own:
                code = own.stats()["siblings"] != 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with held_up(threads, sibling):
        mutex.release()


@pytest.mark.parametrize(
    "meddle",
    [
        lambda group: os.truncate(segment_of(group), 100),
        lambda group: [path.unlink() for path in files_of(group)],
        lambda group: os.truncate(segment_of(group).with_suffix(".log"), 0),
        lambda group: segment_of(group).with_suffix(".log").unlink(),
    ],
)
@pytest.mark.parametrize("holding", [False, True])
def test_a_mutex_whose_files_break_gives_up_with_one_warning(
    meddle: Callable[[str], object],
    holding: bool,
    make: Make,
    group: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutex, descriptors = make(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with mutex:
            pass
    if holding:
        mutex.acquire()
    assert eventually(lambda: mutex.stats()["turn"] == 3 + holding)
    meddle(group)
    begin_s = time.monotonic()
    for _ in range(3):
        mutex.request()
        mutex.acquire()
        mutex.release()
    assert time.monotonic() - begin_s < SOON_S
    assert eventually(lambda: "Error" in str(mutex.stats()["disabled_because"]))
    assert (mutex.holding, mutex.shared) == (False, False)
    mutex.close()
    (warning,) = warnings(caplog)
    assert "trains on without" in warning
    assert not files_of(group)
    assert len(os.listdir("/proc/self/fd")) < descriptors


@pytest.mark.parametrize("ahead_ns", [0, 10**14, -(10**14)])
def test_stats_have_no_hand_over_between_different_clocks(
    make: Make, threads: ThreadPoolExecutor, ahead_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may have time namespaces of their own."""
    mutex, sibling = make(), make()
    sibling.acquire()
    real_ns = time.monotonic_ns
    with held_up(threads, mutex), monkeypatch.context() as other_clock:
        other_clock.setattr(
            turn_segment, "time", SimpleNamespace(monotonic_ns=lambda: real_ns() + ahead_ns)
        )
        sibling.release()
    mutex.release()
    stats = mutex.stats()
    assert sibling.stats()["held_s"] >= 0.1
    assert stats["waited_s"] >= 0.05
    assert stats["handovers"] == (ahead_ns == 0)
    assert ahead_ns or 0.0 < stats["handover_median_s"] <= stats["handover_p99_s"] < SOON_S


def test_threads_of_a_job_do_not_break_its_mutex(make: Make, threads: ThreadPoolExecutor) -> None:
    """A hook's thread releases, the training thread reads figures and another thread closes."""
    mutex = make()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            mutex.stats()
            assert repr(mutex)

    asking = threads.submit(ask)
    for _ in range(200):
        with mutex:
            pass
    mutex.close()
    over.set()
    asking.result(SOON_S)
    assert mutex.stats()["turns"] == 200


def new_order() -> mock.Mock:
    """Return the order of a device that finishes its turns when ``over`` is set.

    Real devices are tested in tests/gpu.
    """
    over = threading.Event()
    over.set()
    return mock.Mock(
        over=over, streams=lambda: (), mark=lambda _: over, wait=lambda end: end.wait(SOON_S)
    )


def end_a_turn(mutex: GPUMutex) -> threading.Event:
    """Give back a turn that the device has not finished. Return the event that finishes it."""
    order: Any = membership_of(mutex).order
    order.over.clear()
    with mutex:
        pass
    over: threading.Event = order.over
    return over


def test_close_waits_until_the_device_has_finished_the_last_turn(
    make: Make, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "order_on", lambda device: new_order())
    sibling = make()
    leaving = make()
    over = end_a_turn(leaving)
    closing = threads.submit(leaving.close)
    assert not eventually(lambda: sibling.stats()["siblings"] == 0, 0.1), "the device computes"
    over.set()
    closing.result(SOON_S)
    assert sibling.stats()["siblings"] == 0


def test_a_turn_that_cannot_be_published_as_given_back_ends_turns(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "order_on", lambda device: new_order())
    first = make()
    over = end_a_turn(first)
    error = SegmentError("the file was removed while jobs were running")
    monkeypatch.setattr(
        membership_of(first).segment, "publish_returned", mock.Mock(side_effect=error)
    )
    over.set()
    assert eventually(lambda: "removed while" in str(first.disabled_because))


def test_the_variable_that_chose_an_order_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DEVICE_ORDER, "events")
    with pytest.warns(FutureWarning, match="ordered on the host; unset it"):
        assert order_on(torch.device("cpu")) is None


def test_a_signal_handler_may_close_a_mutex_inside_a_call(make: Make) -> None:
    mutex = make()
    with mutex:
        assert mutex._turns is not None
        with mutex._turns._lock:
            mutex.close()
    assert mutex.stats()["disabled_because"] == "closed"


@pytest.mark.defect("turns-4", "strangers-22")
def test_a_second_mutex_of_a_process_is_refused_until_the_first_is_closed(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two would wait for each other. Mutexes of different groups do not meet."""
    monkeypatch.setattr(joining, "_claims", set())
    first = GPUMutex(group, device=DEVICE)
    elsewhere = GPUMutex(f"{group}-b", device=DEVICE)
    with pytest.raises(TurnError, match=r"already has a GPUMutex.*mutex=.*close\(\) it first"):
        GPUMutex(group, device=DEVICE).close()
    first.close()
    GPUMutex(group, device=DEVICE).close()
    elsewhere.close()


@pytest.mark.defect("turns-6")
def test_release_on_another_thread_does_nothing_while_acquire_waits(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    """It returns at once, and the turn that comes is the waiting thread's."""
    holder = make()
    mutex = make()
    holder.acquire()
    with held_up(threads, mutex):
        releasing = threads.submit(mutex.release)
        ended = eventually(releasing.done, SOON_S / 4)
        holder.release()
    releasing.result()
    assert ended
    assert mutex.holding


@pytest.mark.defect("strangers-33")
def test_siblings_do_not_wait_for_a_turn_whose_acquire_was_interrupted(make: Make) -> None:
    holder = make()
    mutex = make()
    holder.acquire()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        mutex.acquire()
    signal.signal(signal.SIGALRM, before)
    holder.release()
    holder.acquire()
    assert holder.stats()["leases_expired"] == mutex.stats()["leases_expired"] == 0


@pytest.mark.defect("strangers-25")
def test_the_warning_about_removed_files_has_the_remedy(
    make: Make, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns may also continue without a warning."""
    mutex = make()
    with mutex:
        for path in files_of(group):
            path.unlink(missing_ok=True)
    mutex.acquire()
    assert mutex.holding or "loginctl enable-linger" in caplog.text


def device_on(cores: set[int]) -> str | None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    mutex = GPUMutex(new_group())
    os.sched_setaffinity(0, before)
    mutex.close()
    return mutex.device


@pytest.mark.defect("turns-7", "strangers-34")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_jobs_pinned_to_different_cores_share_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With turns each would compute half of the time, although both can compute all of it."""
    monkeypatch.delenv("CROSSOVER_DEVICE", raising=False)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    devices = [device_on(cores) for cores in ({first}, {second}, {first}, os.sched_getaffinity(0))]
    assert devices[0] == devices[2]
    assert len(set(devices)) == 3
