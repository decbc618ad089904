"""Turns on a GPU that runs late: real mutexes and segments, every way of ordering, deaths, name spaces, captures."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._system.environment import DEVICE_ORDER
from crossover_ddp._turns import gpu_order
from crossover_ddp._turns.device_order import EventOrder, SynchronizedOrder
from crossover_ddp._turns.semaphore_order import SemaphoreOrder
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness.groups import files_of, new_group
from tests.unit.turns.fake_gpu import SOON_S, FakeGpu, FakeProcess, FakeStream, Kernel, gpu, install
from tests.unit.turns.mutexes import group, membership_of

__all__ = ["gpu", "group"]  # fixtures

ON_DEVICE = ("events", "semaphores")
LOOK_S = 0.01


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after waits a hundred times a second, and lose patience with the device soon."""
    monkeypatch.setattr(gpu_order, "_LOOK_S", LOOK_S)
    monkeypatch.setattr(gpu_order, "_SETTLE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(gpu_order, "_DRAIN_TIMEOUT_S", 0.1)


def join(gpu: FakeGpu, group: str, way: str, name_space: str = "host") -> FakeProcess:
    process = FakeProcess(gpu, name_space)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE_ORDER, way)
        process.join(group)
    return process


def take_turn_while_the_device_runs(gpu: FakeGpu, process: FakeProcess) -> Kernel:
    """Take a turn; siblings may publish theirs only after the kernels have finished."""
    done: list[Kernel] = []
    taking = threading.Thread(target=lambda: done.extend(process.take_turn()), daemon=True)
    taking.start()
    deadline_s = time.monotonic() + SOON_S
    while taking.is_alive():
        assert time.monotonic() < deadline_s, "the turn never came"
        for other in {id(s.owner): s.owner for s in gpu.streams.values()}.values():
            if other is not process:
                gpu.run(other)
        taking.join(0.001)
    return done[0]


def eventually(condition: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.002)
    return False


# --- order --------------------------------------------------------------------------------------------------------


def test_the_way_is_the_one_that_was_asked_for(gpu: FakeGpu, group: str) -> None:
    found = {}
    for way in (*ON_DEVICE, "host"):
        mutex = join(gpu, group, way).mutex
        assert mutex is not None
        found[way] = type(membership_of(mutex).order)
        assert mutex.stats()["ordered_by"] == way
    assert found == {"events": EventOrder, "semaphores": SemaphoreOrder, "host": SynchronizedOrder}


def test_an_unknown_way_is_refused(gpu: FakeGpu, group: str) -> None:
    with pytest.raises(ValueError, match="one of host, semaphores, events, got 'event'"):
        join(gpu, group, "event")
    assert files_of(group) == []


@pytest.mark.parametrize("way", ON_DEVICE)
def test_hosts_run_ahead_and_the_device_keeps_the_order(gpu: FakeGpu, group: str, way: str) -> None:
    jobs = [join(gpu, group, way) for _ in range(3)]
    for _ in range(5):
        for job in jobs:
            job.take_turn(kernels=2)
    assert not any(kernel.begun for kernel in gpu.kernels), "a host has waited for the device"
    gpu.run(jobs[2])  # the last one's queue first: it waits for the others
    assert not any(kernel.begun for kernel in gpu.kernels)
    gpu.run()
    assert all(kernel.ended for kernel in gpu.kernels)
    assert gpu.violations == []


def test_the_oracle_sees_a_device_that_does_not_wait(
    gpu: FakeGpu, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (join(gpu, group, "events") for _ in range(2))
    monkeypatch.setattr(FakeStream, "wait_event", lambda self, event: None)
    first.take_turn()
    second.take_turn()
    gpu.run(second)
    assert gpu.violations == ["turn 2 began before turn 1 ended"]


class Script(NamedTuple):
    """What hosts and device do one after the other: a job takes a turn, or one of its streams comes some steps on."""

    way: str
    jobs: int
    steps: list[tuple[int, int, int]]
    """(job, stream, device's steps); 0 steps: the job takes a turn."""


scripts = st.builds(
    Script,
    way=st.sampled_from(ON_DEVICE),
    jobs=st.integers(2, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 5)), max_size=30),
)


@settings(max_examples=60, deadline=None)
@given(script=scripts)
def test_any_interleaving_of_hosts_and_device_keeps_the_order(script: Script) -> None:
    group = new_group()
    with pytest.MonkeyPatch.context() as patch, contextlib.contextmanager(install)(patch, group) as gpu:
        processes = [join(gpu, group, script.way) for _ in range(script.jobs)]
        for job, stream, steps in script.steps:
            process = processes[job % script.jobs]
            if steps == 0:
                process.take_turn()
            for _ in range(steps):
                gpu.step(process.streams[stream % len(process.streams)])
        gpu.run()
        assert gpu.violations == []
        assert all(kernel.ended for kernel in gpu.kernels), "a stream waits for something that never comes"


def test_a_record_that_is_made_again_does_not_change_a_wait(gpu: FakeGpu, group: str) -> None:
    first, second = (join(gpu, group, "events") for _ in range(2))
    first.take_turn()
    [kernel] = second.take_turn()  # turn 2 waits for turn 1
    first.take_turn()  # turn 3 is recorded with the same event
    second.take_turn()
    while not kernel.ended:
        assert any([gpu.step(first.current), gpu.step(second.current)])
    later = [each for each in gpu.kernels if each.turn == 3]
    assert not later[0].ended, "the wait for turn 1 has become one for turn 3"


@pytest.mark.parametrize("way", ON_DEVICE)
def test_nothing_is_enqueued_for_a_turn_that_is_over(gpu: FakeGpu, group: str, way: str) -> None:
    first, second = (join(gpu, group, way) for _ in range(2))
    first.take_turn()
    gpu.run()
    second.take_turn()
    assert "wait" not in [operation.what for operation in second.current.queue]


# --- streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*ON_DEVICE, "host"])
def test_a_turn_ends_with_the_streams_that_release_names(gpu: FakeGpu, group: str, way: str) -> None:
    first, second = (join(gpu, group, way) for _ in range(2))
    side = FakeStream(first)
    assert first.mutex is not None
    with gpu.role(first):
        first.mutex.acquire()
        main_kernel, side_kernel = first.launch(1), first.launch(1, side)
        first.mutex.release(streams=[side])  # type: ignore[list-item]
        after = first.launch(0)  # compute of no turn: the side stream must not hold it up
    while any([gpu.step(stream) for stream in first.streams if stream is not side]):
        pass
    assert main_kernel.ended
    assert after.ended, "the current stream waits for the side stream"
    gpu.run(second)
    taking = threading.Thread(target=second.take_turn, daemon=True)
    taking.start()
    if way != "host":
        taking.join(SOON_S)
        gpu.run(second)
    assert not any(kernel.begun for kernel in gpu.kernels if kernel.owner is second)
    gpu.run(first)
    assert side_kernel.ended
    taking.join(SOON_S)
    gpu.run()
    assert gpu.violations == []


def test_streams_that_acquire_names_begin_after_the_siblings_turn(gpu: FakeGpu, group: str) -> None:
    first, second = (join(gpu, group, "events") for _ in range(2))
    side = FakeStream(second)
    first.take_turn()
    assert second.mutex is not None
    with gpu.role(second):
        second.mutex.acquire(streams=[side])  # type: ignore[list-item]
        second.launch(2, side)
        second.mutex.release(streams=[side])  # type: ignore[list-item]
    gpu.run(second)
    gpu.run()
    assert gpu.violations == []
    assert all(kernel.ended for kernel in gpu.kernels)


def test_numbers_are_written_in_order_whatever_streams_the_turns_were_on(gpu: FakeGpu, group: str) -> None:
    first, second = (join(gpu, group, "semaphores") for _ in range(2))
    slow, fast = FakeStream(first), FakeStream(first)
    for stream in (slow, fast):
        first.current = stream
        first.take_turn()
    second.take_turn()
    while gpu.step(fast):
        pass
    gpu.run(second)
    assert not any(kernel.begun for kernel in gpu.kernels if kernel.owner is second)
    assert not gpu.stuck(second)
    assert gpu.violations == []


# --- siblings whose devices cannot wait for each other ------------------------------------------------------------


@pytest.mark.parametrize(
    ("ways", "name_spaces"),
    [
        (("events", "events"), ("host", "container")),
        (("events", "semaphores"), ("host", "host")),
        (("semaphores", "events"), ("host", "host")),
        (("events", "host"), ("host", "host")),
        (("host", "semaphores"), ("host", "host")),
        (("host", "host"), ("host", "host")),
    ],
)
def test_siblings_that_cannot_wait_on_the_device_take_turns_on_the_host(
    gpu: FakeGpu,
    group: str,
    ways: tuple[str, str],
    name_spaces: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = [join(gpu, group, way, space) for way, space in zip(ways, name_spaces, strict=True)]
    for _ in range(2):  # each finds out at its first turn after the other's, which may overlap
        for job in jobs:
            take_turn_while_the_device_runs(gpu, job)
    gpu.run()
    gpu.violations.clear()
    for _ in range(4):
        for job in jobs:
            take_turn_while_the_device_runs(gpu, job)
            assert job.mutex is not None
            assert job.mutex.disabled_because is None
    gpu.run()
    assert gpu.violations == []
    assert all(kernel.ended for kernel in gpu.kernels)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (0 if "host" in ways else 2), "one warning for each job that cannot wait"
    if "host" not in ways:
        assert all(job.mutex.stats()["ordered_by"] == "host" for job in jobs if job.mutex)


def test_one_sibling_in_a_container_does_not_part_the_others(gpu: FakeGpu, group: str) -> None:
    jobs = [join(gpu, group, "events", space) for space in ("host", "host", "container")]
    for job in jobs * 2:
        take_turn_while_the_device_runs(gpu, job)
    gpu.run()
    gpu.violations.clear()
    for job in jobs * 3:
        take_turn_while_the_device_runs(gpu, job)
    gpu.run()
    assert gpu.violations == []
    assert [job.mutex.stats()["turns"] for job in jobs if job.mutex] == [5, 5, 5]


@pytest.mark.parametrize("way", ON_DEVICE)
def test_a_device_without_the_wanted_way_orders_on_the_host_and_says_so(
    gpu: FakeGpu, group: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.ipc_works = gpu.words_work = False
    process = join(gpu, group, way)
    assert process.mutex is not None
    assert process.mutex.stats()["ordered_by"] == "host"
    [warned] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the driver says that the device has no" in warned


# --- deaths -------------------------------------------------------------------------------------------------------


def die_after_giving_back(gpu: FakeGpu, group: str, way: str) -> tuple[FakeProcess, FakeProcess]:
    """A process is killed with kernels in its queue while its sibling's stream waits for them."""
    dying, living = (join(gpu, group, way) for _ in range(2))
    dying.take_turn()
    living.take_turn()
    dying.kill()
    return dying, living


def test_semaphores_of_the_dead_are_released(gpu: FakeGpu, group: str) -> None:
    _, living = die_after_giving_back(gpu, group, "semaphores")
    assert eventually(lambda: not gpu.stuck(living))
    living.take_turn()
    assert not gpu.stuck(living)


def test_a_queue_that_runs_dry_after_its_process_does_not_undo_the_release(gpu: FakeGpu, group: str) -> None:
    dying, living = (join(gpu, group, "semaphores") for _ in range(2))
    dying.take_turn()
    gpu.run()
    [_] = dying.take_turn()
    left = [operation for stream in dying.streams for operation in stream.queue if operation.what == "write"]
    living.take_turn()
    assert dying.mutex is not None
    word = membership_of(dying.mutex).order._word  # type: ignore[attr-defined]
    dying.kill()
    assert len(left) == 1
    assert eventually(lambda: word.read() > 1000), "nobody has released the word"
    gpu.driver.write(dying.current.cuda_stream, word.address, 1)  # an earlier number, late
    assert gpu.step(dying.current)
    assert eventually(lambda: not gpu.stuck(living))


@pytest.mark.parametrize("way", ON_DEVICE)
def test_who_lives_is_waited_for_however_long_it_takes(
    gpu: FakeGpu, group: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    slow, waiting = (join(gpu, group, way) for _ in range(2))
    slow.take_turn()
    waiting.take_turn()
    time.sleep(10 * LOOK_S)
    gpu.run(waiting)
    assert not any(kernel.begun for kernel in gpu.kernels), "somebody has ended the wait for the living"
    assert caplog.records == []
    assert not gpu.stuck(waiting)


def test_a_word_that_a_stream_may_still_read_is_not_given_up(
    gpu: FakeGpu, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_order, "_LOOK_S", 60.0)  # nobody comes to release it
    _, living = die_after_giving_back(gpu, group, "semaphores")
    born = join(gpu, group, "semaphores")
    born.take_turn()
    living.take_turn()
    assert living.mutex is not None
    assert len(membership_of(living.mutex).order._words) == 2  # type: ignore[attr-defined]
    assert gpu.stuck(living)  # the fake fails a device that reads memory that was given up
    living.kill()


def test_a_new_owner_of_the_slot_is_waited_for_although_the_old_one_was_released(
    gpu: FakeGpu, group: str
) -> None:
    _, living = die_after_giving_back(gpu, group, "semaphores")
    assert eventually(lambda: not gpu.stuck(living))
    born = join(gpu, group, "semaphores")
    for _ in range(3):
        born.take_turn()
        living.take_turn()
    gpu.run(living)
    gpu.run()
    assert gpu.violations == []
    assert not gpu.stuck(living)


def test_events_of_the_dead_are_told_with_what_to_do(
    gpu: FakeGpu, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, living = die_after_giving_back(gpu, group, "events")
    assert gpu.stuck(living), "this fake drops the queue of a killed process, so the wait cannot end"

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    assert eventually(errors)
    time.sleep(5 * LOOK_S)
    [told] = errors()
    assert "CROSSOVER_DEVICE_ORDER=host" in told
    for stream in living.streams:
        stream.queue.clear()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of the dead one's thread
def test_on_the_host_nothing_is_enqueued_for_somebody_who_may_die(gpu: FakeGpu, group: str) -> None:
    dying, living = (join(gpu, group, "host") for _ in range(2))
    dying.take_turn()
    taking = threading.Thread(target=living.take_turn, daemon=True)
    taking.start()
    taking.join(0.05)
    assert taking.is_alive(), "told before the device was done"
    dying.kill()
    taking.join(SOON_S)
    assert not gpu.stuck(living)


@pytest.mark.parametrize("way", ON_DEVICE)
def test_the_dead_are_not_waited_for_on_the_device(gpu: FakeGpu, group: str, way: str) -> None:
    dying, living = (join(gpu, group, way) for _ in range(2))
    dying.take_turn()
    dying.kill()
    living.take_turn()
    assert not gpu.stuck(living)


# --- leaving ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ON_DEVICE)
def test_who_leaves_waits_for_the_device_within_limits(
    gpu: FakeGpu, group: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    leaving, staying = (join(gpu, group, way) for _ in range(2))
    leaving.take_turn()
    assert leaving.mutex is not None
    begin_s = time.monotonic()
    leaving.mutex.close()  # the device never comes to the end within the limit
    assert time.monotonic() - begin_s >= 0.1
    assert "still busy" in caplog.text
    assert staying.mutex is not None
    assert staying.mutex.stats()["siblings"] == 0


def test_words_are_given_up_and_files_removed(gpu: FakeGpu, group: str) -> None:
    processes = [join(gpu, group, "semaphores") for _ in range(3)]
    for process in processes:
        process.take_turn()
    gpu.run()
    assert len([path for path in files_of(group) if path.suffix == ".word"]) == 3
    for process in processes:
        assert process.mutex is not None
        process.mutex.close()
    assert gpu.driver.registered == set()
    assert files_of(group) == []


def test_who_leaves_takes_its_word_along(gpu: FakeGpu, group: str) -> None:
    leaving, _ = (join(gpu, group, "semaphores") for _ in range(2))
    gpu.run()
    assert leaving.mutex is not None
    leaving.mutex.close()
    assert len([path for path in files_of(group) if path.suffix == ".word"]) == 1


def test_what_a_killed_process_left_goes_with_the_last_to_leave(gpu: FakeGpu, group: str) -> None:
    dying, living = (join(gpu, group, "semaphores") for _ in range(2))
    dying.take_turn()
    dying.kill()
    assert living.mutex is not None
    living.mutex.close()
    assert files_of(group) == []


def test_many_siblings_one_after_the_other_leave_nothing_open(gpu: FakeGpu, group: str) -> None:
    staying = join(gpu, group, "events")
    for _ in range(20):
        other = join(gpu, group, "events")
        other.take_turn()
        staying.take_turn()
        gpu.run()
        assert other.mutex is not None
        other.mutex.close()
    assert staying.mutex is not None
    assert len(membership_of(staying.mutex).order._opened) == 1  # type: ignore[attr-defined]


# --- graphs -------------------------------------------------------------------------------------------------------


def test_a_stream_that_captures_a_graph_neither_begins_nor_ends_a_turn(gpu: FakeGpu, group: str) -> None:
    process = join(gpu, group, "events")
    assert process.mutex is not None
    process.capturing = True
    with gpu.role(process), pytest.raises(UnsupportedConfigurationError, match="release after it"):
        process.mutex.acquire()
    process.capturing = False
    process.take_turn()
    assert process.mutex.stats()["turn"] == 1
    assert torch.cuda.is_current_stream_capturing() is False
