"""The mutex as jobs of one rank see it; each mutex here is a job, in a thread where it has to wait."""

import contextlib
import datetime
import gc
import itertools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from crossover_ddp import _turn_segment, gpu_mutex
from crossover_ddp._turn_segment import SHARED_MEMORY
from crossover_ddp.errors import SegmentError, TurnError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import run_ranks

DEVICE = "dev0"
LEASE_S = 20.0  # longer than any test: a turn that overlaps another one was not forgiven
SOON_S = 5.0  # far less than the lease, and enough on a busy machine

Make = Callable[..., GPUMutex]


@pytest.fixture
def group() -> str:
    return f"{os.environ['CROSSOVER_GROUP']}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make(group: str) -> Iterator[Make]:
    """Make mutexes of one group on one device, unless told otherwise; all are closed at the end."""
    made: list[GPUMutex] = []

    def making(name: str | None = group, **arguments: Any) -> GPUMutex:
        made.append(GPUMutex(name, **{"device": DEVICE, "lease": LEASE_S, **arguments}))
        return made[-1]

    yield making
    for mutex in made:
        mutex.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


def files_of(group: str) -> list[Path]:
    return list(Path(SHARED_MEMORY).glob(f"crossover_ddp-{os.geteuid()}/{group}*"))


def segment_of(group: str) -> Path:
    return next(path for path in files_of(group) if path.suffix == ".turns")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def acquire_in(threads: ThreadPoolExecutor, mutex: GPUMutex) -> "Future[float]":
    """Acquire in a thread; the result is when that was done."""

    def acquiring() -> float:
        mutex.acquire()
        return time.monotonic()

    return threads.submit(acquiring)


def blocks(future: "Future[float]") -> bool:
    with contextlib.suppress(TimeoutError):
        future.result(0.1)
    return not future.done()


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
    taken = [threads.submit(take_turns, mutex, 40) for mutex in mutexes]
    spans = sorted((span for each in taken for span in each.result(30.0)), key=lambda span: span[0])
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
        assert mutex.stats()["turn"] == turn
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


def test_acquiring_ahead_twice_is_one_turn(make: Make) -> None:
    mutex = make()
    with mutex:
        pass
    mutex.acquire(ahead=True)
    mutex.acquire(ahead=True)
    mutex.acquire()
    assert mutex.stats()["turns"] == 2
    mutex.release()
    assert mutex.stats()["turn"] == 2


def test_a_turn_taken_ahead_is_waited_for_like_any_other(make: Make, threads: ThreadPoolExecutor) -> None:
    mutex = make()
    with mutex:
        pass
    mutex.acquire(ahead=True)
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
    spans = [span for each in taken for span in each.result(30.0)]
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
        answer = time.monotonic() - begin_s, mutex.shared, mutex._segment.path if mutex._segment else ""
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
    assert path.startswith(f"{SHARED_MEMORY}/crossover_ddp-65534/{group}-")
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
    assert time.monotonic() - begin_s < 0.3, "a turn once forgiven is not waited for again"
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


def test_a_lease_left_out_grows_with_the_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_mutex, "DEFAULT_LEASE_S", 0.05)
    mutex, sibling = make(lease=None), make()
    assert mutex.stats()["lease_s"] == 0.05
    mutex.acquire()
    time.sleep(0.1)
    mutex.release()
    assert mutex.stats()["lease_s"] >= 0.4
    assert sibling._segment is not None
    seen = next(slot for slot in sibling._segment.slots().values() if slot.job == mutex.job)
    assert seen.lease_s == mutex.stats()["lease_s"]
    longest_s = mutex.stats()["lease_s"]
    with mutex:
        pass
    assert mutex.stats()["lease_s"] == longest_s, "a short turn takes nothing away"


def test_a_lease_that_is_given_stays(make: Make) -> None:
    mutex = make(lease=0.01)
    with mutex:
        time.sleep(0.05)
    assert mutex.stats()["lease_s"] == 0.01


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


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65])
def test_bad_group_names_are_bad_arguments(name: str, make: Make) -> None:
    with pytest.raises(ValueError, match="expected a group name of 1-64 letters"):
        make(name)


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
    mutex.acquire(ahead=True)
    assert mutex.stats()["turns"] == 0 or not disabled
    assert isinstance(repr(mutex), str)


def test_siblings_that_share_only_some_devices_are_refused(make: Make, group: str) -> None:
    """Here by hand; tests/multiprocess does it with real ranks."""
    make().acquire()
    segment = _turn_segment.TurnSegment(group, DEVICE)
    segment.join(job=9, devices=_turn_segment.digest("dev0\ndev1"), rank=0, world_size=2, lease_s=1.0)
    with pytest.raises(
        TurnError, match=r"expected siblings to use the same set of devices, got a job \(process"
    ):
        make()
    assert len(segment.members()) == 2, "the refused job has left"
    segment.leave()


def test_what_is_not_a_segment_is_refused_by_name(make: Make, group: str) -> None:
    segment = _turn_segment.TurnSegment(group, DEVICE)
    segment.forget()
    os.truncate(segment.path, 10)
    try:
        with pytest.raises(SegmentError, match=r"rank 0 cannot take turns: expected a segment of") as caught:
            make()
        assert segment.path in str(caught.value)
        assert os.path.getsize(segment.path) == 10
    finally:
        os.unlink(segment.path)


# --- leaving ------------------------------------------------------------------------------------------------------


def test_closing_from_another_thread_ends_a_wait(make: Make, threads: ThreadPoolExecutor) -> None:
    holder, mutex = make(), make()
    holder.acquire()
    waiting = acquire_in(threads, mutex)
    assert blocks(waiting)
    assert mutex.stats()["siblings"] is None, "not known while another thread waits"
    begin_s = time.monotonic()
    mutex.close()
    waiting.result(SOON_S)
    assert time.monotonic() - begin_s < 2.0
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
    meddle(group)
    begin_s = time.monotonic()
    for _ in range(3):
        mutex.request()
        mutex.acquire()
        mutex.release()
    assert time.monotonic() - begin_s < SOON_S
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
    assert len(warnings(caplog)) == 2, "one of each"


# --- telling ------------------------------------------------------------------------------------------------------


def test_stats_have_these_keys(make: Make, group: str) -> None:
    mutex = make()
    make()
    stats = mutex.stats()
    assert set(stats) == {
        "group",
        "device",
        "job",
        "turn",
        "turns",
        "holding",
        "siblings",
        "held_s",
        "waited_s",
        "lease_s",
        "leases_expired",
        "handovers",
        "handover_median_s",
        "handover_p99_s",
        "disabled_because",
    }
    assert (stats["group"], stats["device"], stats["siblings"]) == (group, DEVICE, 1)
    assert stats["handover_median_s"] is None


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


def test_repr_tells_the_state(make: Make, group: str) -> None:
    mutex = make()
    assert repr(mutex) == f"GPUMutex(name={group!r}, device='dev0', between turns)"
    with mutex:
        assert "holds a turn" in repr(mutex)


def test_waiting_takes_no_cpu_time(make: Make, threads: ThreadPoolExecutor) -> None:
    holder, mutex = make(), make()
    holder.acquire()
    spent: list[float] = []

    def wait() -> None:
        begin_s = time.thread_time()
        mutex.acquire()
        spent.append(time.thread_time() - begin_s)

    waiting = threads.submit(wait)
    time.sleep(0.5)
    holder.release()
    waiting.result(SOON_S)
    assert spent[0] < 0.05


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
