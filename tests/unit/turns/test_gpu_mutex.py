"""The mutex as jobs of one rank see it; each mutex here is a job, in a thread where it has to wait."""

import contextlib
import datetime
import gc
import math
import os
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
from crossover_ddp.errors import SegmentError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import (
    DEVICE,
    SOON_S,
    Make,
    acquire_in,
    blocks,
    files_of,
    held_up,
    membership_of,
    segment_of,
    warnings,
)


def test_shared_tells_of_siblings_when_the_turn_began(make: Make) -> None:
    mutex, found = make(), []
    with mutex:
        found.append(mutex.shared)
        sibling = make()
        found.append(mutex.shared)
    for leave in (sibling.close, lambda: None):
        with mutex:
            found.append(mutex.shared)
        leave()
    assert found == [False, False, True, False]


def test_who_would_not_wait_for_a_sibling_is_told_so(make: Make) -> None:
    mutex, sibling = make(), make()
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
    """A host that runs ahead would count steps of one way that the device does in the other."""

    def train(mutex: GPUMutex) -> set[tuple[str, bool, bool]]:
        seen = set()
        for _ in range(200):
            mutex.acquire()
            mode, found = mutex.mode, (mutex.shared, mutex.awaits_device)
            if mode == mutex.mode:  # which another thread sets
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


def test_calls_without_effect(make: Make) -> None:
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


def test_a_turn_begun_alone_is_waited_for_and_waits_like_any_other_and_errors_and_pauses_give_it_away(
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
    with held_up(threads, mutex), contextlib.suppress(ZeroDivisionError), sibling:
        raise ZeroDivisionError
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
    mutex, sibling = make(trial=True, lease=SOON_S / 2), make(trial=True)
    mutex.acquire()
    acquire_in(threads, sibling).result(SOON_S)  # nobody computes
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
    """Siblings wait for who has drawn, and a log of days is read for seconds."""
    mutex, read, draw = make(), list[int](), turn_segment.TurnSegment.draw_turn
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
    stuck, mutex = make(lease=0.3), make()
    stuck.acquire()
    begin_s = time.monotonic()
    for _ in range(6):
        with mutex:
            assert 0.3 <= time.monotonic() - begin_s < SOON_S
    assert mutex.stats()["leases_expired"] == 1, "who does not move is not waited for again"
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


def takes_no_turns(mutex: GPUMutex, reason: str) -> None:
    with mutex, mutex.paused():
        mutex.request()
        assert not mutex.holding
    assert not mutex.shared
    assert [mutex.stats()[key] for key in ("turns", "siblings", "disabled_because")] == [
        0,
        0,
        reason,
    ]
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
        takes_no_turns(mutex, "CROSSOVER_DISABLE is set")
    with mutex:
        assert mutex.holding != disabled


def test_closing_ends_the_own_wait_gives_the_turn_back_and_leaves_nothing(
    make: Make, group: str, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    holder, mutex, sibling = make(), make(), make()
    holder.acquire()
    with held_up(threads, mutex):
        mutex.close()  # from another thread
    takes_no_turns(mutex, "closed")
    with held_up(threads, sibling):
        holder.close()
    holder.close()
    sibling.close()
    assert not files_of(group)
    GPUMutex(group, device=DEVICE).acquire()
    gc.collect()  # or it is forgotten
    assert not files_of(group)
    assert warnings(caplog) == []


def test_where_no_fork_may_be_closing_awaits_no_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread needs that lock to end."""
    mutex = make()
    assert mutex._turns is not None
    thread, joined = mutex._turns._thread, list[float]()
    with monkeypatch.context() as patch, turn_segment.no_fork:
        patch.setattr(thread, "join", joined.append)
        mutex.close()
    assert joined == []
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_a_forked_child_leaves_its_parents_turn_and_may_join(
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
def test_stats_tell_of_times_but_not_between_different_clocks(
    make: Make, threads: ThreadPoolExecutor, ahead_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between containers with time namespaces of their own."""
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
    """A hook's thread releases while the training thread asks for figures and another one closes."""
    mutex, over = make(), threading.Event()

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
    """Return the order of a device that has done a turn when the test says so; real ones are in tests/gpu."""
    over = threading.Event()
    over.set()
    return mock.Mock(
        over=over, streams=lambda: (), mark=lambda _: over, wait=lambda end: end.wait(SOON_S)
    )


def test_who_leaves_waits_for_the_device_and_who_cannot_say_so_ends_its_turns(
    make: Make, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That siblings wait for it: tests/gpu."""
    monkeypatch.setattr(joining, "order_on", lambda device: new_order())
    first, second, leaving = make(), make(), make()

    def end_a_turn(mutex: Any) -> threading.Event:
        """Give a turn back that the device has not done; return what ends it."""
        order: Any = membership_of(mutex).order
        order.over.clear()
        with mutex:
            pass
        over: threading.Event = order.over
        return over

    over = end_a_turn(leaving)
    closing = threads.submit(leaving.close)
    assert not eventually(lambda: second.stats()["siblings"] == 1, 0.1), (
        "it left before the device had ended"
    )
    over.set()
    closing.result(SOON_S)
    assert second.stats()["siblings"] == 1
    over = end_a_turn(first)
    error = SegmentError("the file was removed while jobs were running")
    monkeypatch.setattr(
        membership_of(first).segment, "publish_returned", mock.Mock(side_effect=error)
    )
    over.set()
    assert eventually(lambda: "removed while" in str(first.disabled_because))


def test_the_choice_of_an_order_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DEVICE_ORDER, "events")
    with pytest.warns(FutureWarning, match="ordered on the host; unset it"):
        assert order_on(torch.device("cpu")) is None


def test_a_signals_handler_may_close_a_mutex_inside_of_a_call(make: Make) -> None:
    mutex = make()
    with mutex:
        assert mutex._turns is not None
        with mutex._turns._lock:
            mutex.close()
    assert mutex.stats()["disabled_because"] == "closed"
