"""How the mutex is named, left, and given up; see also test_gpu_mutex.py."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
    held_up,
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


def test_closing_ends_the_own_wait_gives_the_turn_back_and_leaves_nothing(
    make: Make, group: str, threads: ThreadPoolExecutor
) -> None:
    holder, mutex, sibling = make(), make(), make()
    holder.acquire()
    with held_up(threads, mutex):
        mutex.close()  # from another thread
    assert not mutex.holding
    assert mutex.disabled_because == "closed"
    with held_up(threads, sibling):
        holder.close()
    holder.close()
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
    with held_up(threads, sibling):
        mutex.release()


# --- giving up ----------------------------------------------------------------------------------------------------


def log_of(group: str) -> Path:
    return segment_of(group).with_suffix(".log")


@pytest.mark.parametrize(
    "meddle",
    [
        lambda group: os.truncate(segment_of(group), 100),
        lambda group: [path.unlink() for path in files_of(group)],
        lambda group: os.truncate(log_of(group), 0),
        lambda group: log_of(group).unlink(),
    ],
)
@pytest.mark.parametrize("holding", [False, True])
def test_a_mutex_whose_files_break_gives_up_with_one_warning(
    meddle: Callable[[str], object], holding: bool, make: Make, group: str, caplog: pytest.LogCaptureFixture
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
    os.truncate(segment_of(group), 100)
    holder.release()
    holder.close()
    assert waiting.result(SOON_S)
    assert eventually(lambda: len(warnings(caplog)) == 2), "one of each"


# --- telling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ns", [0, 10**14, -(10**14)])
def test_stats_tell_of_times_but_not_between_different_clocks(
    make: Make, threads: ThreadPoolExecutor, ahead_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between containers with time namespaces of their own."""
    mutex, sibling = make(), make()
    sibling.acquire()
    real_ns = time.monotonic_ns
    with held_up(threads, mutex), monkeypatch.context() as other_clock:
        other_clock.setattr(turn_segment, "time", SimpleNamespace(monotonic_ns=lambda: real_ns() + ahead_ns))
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
        mutex.acquire()
        mutex.release()
    mutex.close()
    over.set()
    asking.result(SOON_S)
    assert mutex.stats()["turns"] == 200
