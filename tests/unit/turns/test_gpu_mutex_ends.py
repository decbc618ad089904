"""How the mutex is named, left, and given up; see also test_gpu_mutex.py."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from crossover_ddp._turns import segment as turn_segment
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import (
    DEVICE,
    SOON_S,
    Make,
    acquire_in,
    blocks,
    files_of,
    segment_of,
    warnings,
)

# --- arguments and environment ------------------------------------------------------------------------------------


def test_arguments_win_over_the_environment(make: Make, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", f"{group}-environment")
    monkeypatch.setenv("CROSSOVER_DEVICE", "dev-environment")
    given = make(group, device="dev-argument")
    assert (given.name, given.device) == (group, "dev-argument")
    taken = make(None, device=None)
    assert (taken.name, taken.device) == (f"{group}-environment", "dev-environment")


def test_the_default_group_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSOVER_GROUP")
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    assert GPUMutex().name == "default"


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_is_named_after_the_machine(
    device: object, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CROSSOVER_DEVICE", raising=False)
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU, which is the default then")
    names = {make(device=device).device for _ in range(2)}
    assert len(names) == 1
    assert names.pop().startswith("cpu-")


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_turns_can_be_switched_off(
    value: str, disabled: bool, make: Make, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_DISABLE", value)
    mutex = make()
    assert (mutex.disabled_because == "CROSSOVER_DISABLE is set") == disabled
    assert bool(files_of(group)) != disabled
    with mutex:
        assert mutex.holding != disabled
        with mutex.paused():
            mutex.request()
        assert not mutex.shared
    mutex.acquire()
    assert mutex.stats()["turns"] == 0 or not disabled
    assert isinstance(repr(mutex), str)


# --- leaving ------------------------------------------------------------------------------------------------------


def test_closing_from_another_thread_ends_a_wait(make: Make, threads: ThreadPoolExecutor) -> None:
    holder, mutex = make(), make()
    holder.acquire()
    waiting = acquire_in(threads, mutex)
    assert blocks(waiting)
    assert mutex.stats()["siblings"] == 1
    begin_s = time.monotonic()
    mutex.close()
    waiting.result(SOON_S)
    assert time.monotonic() - begin_s < SOON_S
    assert not mutex.holding
    assert mutex.disabled_because == "closed"


def test_closing_gives_the_turn_back_and_leaves_nothing(
    make: Make, group: str, threads: ThreadPoolExecutor
) -> None:
    mutex, sibling = make(), make()
    mutex.acquire()
    waiting = acquire_in(threads, sibling)
    assert blocks(waiting)
    mutex.close()
    waiting.result(SOON_S)
    mutex.close()
    sibling.close()
    assert not files_of(group)


def test_a_closed_mutex_does_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    mutex = make()
    mutex.close()
    with mutex:
        assert not mutex.holding
    mutex.request()
    with mutex.paused():
        pass
    assert not mutex.shared
    assert mutex.stats()["turns"] == 0
    assert mutex.stats()["siblings"] == 0
    assert "closed" in repr(mutex)
    assert warnings(caplog) == []


def test_a_forgotten_mutex_leaves(group: str) -> None:
    mutex = GPUMutex(group, device=DEVICE)
    mutex.acquire()
    assert files_of(group)
    del mutex
    gc.collect()
    assert not files_of(group)


def test_a_forked_child_cannot_give_its_parents_turn_away(make: Make, threads: ThreadPoolExecutor) -> None:
    mutex, sibling = make(), make()
    mutex.acquire()
    child = os.fork()
    if child == 0:
        logging.disable()
        mutex.release()
        mutex.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    waiting = acquire_in(threads, sibling)
    assert blocks(waiting)
    mutex.release()
    waiting.result(SOON_S)


# --- giving up ----------------------------------------------------------------------------------------------------


def _cut(group: str) -> None:
    os.truncate(segment_of(group), 100)


def _remove(group: str) -> None:
    for path in files_of(group):
        path.unlink()


def _cut_log(group: str) -> None:
    os.truncate(segment_of(group).with_suffix(".log"), 0)


def _remove_log(group: str) -> None:
    segment_of(group).with_suffix(".log").unlink()


@pytest.mark.parametrize("meddle", [_cut, _remove, _cut_log, _remove_log])
@pytest.mark.parametrize("holding", [False, True])
def test_a_mutex_whose_files_break_gives_up_with_one_warning(
    meddle: Callable[[str], None], holding: bool, make: Make, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    mutex = make()
    for _ in range(3):
        mutex.acquire()
        mutex.release()
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
    assert eventually(lambda: mutex.disabled_because is not None)
    assert len(warnings(caplog)) == 1
    assert "trains on without" in warnings(caplog)[0]
    assert not mutex.holding
    assert not mutex.shared
    assert "Error" in str(mutex.stats()["disabled_because"])
    mutex.close()
    assert len(warnings(caplog)) == 1
    assert not files_of(group)


def test_breaking_files_end_the_wait_of_a_sibling(
    make: Make, group: str, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    holder, mutex = make(), make()
    holder.acquire()
    waiting = acquire_in(threads, mutex)
    assert blocks(waiting)
    _cut(group)
    holder.release()
    holder.close()
    assert waiting.result(SOON_S)
    assert eventually(lambda: len(warnings(caplog)) == 2), "one of each"


# --- telling ------------------------------------------------------------------------------------------------------


def test_stats_tell_of_times(make: Make, threads: ThreadPoolExecutor) -> None:
    holder, mutex = make(), make()
    holder.acquire()
    waiting = acquire_in(threads, mutex)
    time.sleep(0.1)
    holder.release()
    waiting.result(SOON_S)
    mutex.release()
    assert holder.stats()["held_s"] >= 0.1
    stats = mutex.stats()
    assert stats["waited_s"] >= 0.05
    assert stats["handovers"] == 1
    assert 0.0 < stats["handover_median_s"] <= stats["handover_p99_s"] < SOON_S


@pytest.mark.parametrize("ahead_ns", [10**14, -(10**14)])
def test_a_sibling_whose_clock_is_another_one_spoils_no_latency(
    make: Make, threads: ThreadPoolExecutor, ahead_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between containers with time namespaces of their own."""
    mutex, sibling = make(), make()
    sibling.acquire()
    taking = acquire_in(threads, mutex)
    assert blocks(taking)
    real_ns = time.monotonic_ns
    with monkeypatch.context() as other_clock:
        other_clock.setattr(turn_segment, "time", SimpleNamespace(monotonic_ns=lambda: real_ns() + ahead_ns))
        sibling.release()
    taking.result(SOON_S)
    assert mutex.stats()["handovers"] == 0
    mutex.release()


def test_threads_of_a_job_do_not_break_its_mutex(make: Make, threads: ThreadPoolExecutor) -> None:
    """A hook's thread releases while the training thread asks for figures and another one closes."""
    mutex, over = make(), threading.Event()

    def ask() -> None:
        while not over.is_set():
            mutex.stats()
            assert repr(mutex)

    asking = threads.submit(ask)
    for _ in range(200):
        mutex.acquire()
        mutex.release()
    mutex.close()
    over.set()
    asking.result(SOON_S)
    assert mutex.stats()["turns"] == 200
