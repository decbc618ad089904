"""What the mutex asks of a device that runs behind the host's back; the device here only takes notes."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from crossover_ddp._turns import device_order
from crossover_ddp._turns.slots import EVENT_COUNT, EVENT_HANDLE_BYTES
from crossover_ddp.errors import SegmentError, UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.unit.turns.mutexes import membership_of

SOON_S = 60.0
numbers = itertools.count()


class Order:
    """Notes the calls; ``on_follow`` stands for what happens meanwhile."""

    kind = "notes"
    on_device = True
    waits_on_host = False

    def __init__(self) -> None:
        self.number = next(numbers)
        self.problem: str | None = None
        self.on_host: list[bool] = []
        self.usable = True
        self.handles = bytes([self.number % 256]) * (EVENT_COUNT * EVENT_HANDLE_BYTES)
        self.finished: list[tuple[int, Callable[[], None]]] = []
        self.followed: list[tuple[bytes, int]] = []
        self.tell_at_once = True
        self.on_follow: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None

    def check_usable(self) -> None:
        if not self.usable:
            raise UnsupportedConfigurationError("expected no capture")

    def finish(
        self, turn: int, publish: Callable[[], None], *, on_host: bool = False, streams: Sequence[Any] = ()
    ) -> None:
        self.on_host.append(on_host)
        self.finished.append((turn, publish))
        if self.tell_at_once:
            publish()

    def admit(self, streams: Sequence[Any]) -> None:
        raise AssertionError("no streams were named")

    def follow(self, key: tuple[int, int], handles: bytes, turn: int) -> str | None:
        self.on_follow()
        self.followed.append((handles, turn))
        return self.problem

    def close(self) -> None:
        self.on_close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[GPUMutex, Order]]]:
    made: list[tuple[GPUMutex, Order]] = []
    orders: list[Order] = []

    def noted_order(device: object, event_count: int, siblings: object) -> Order:
        orders.append(Order())
        return orders[-1]

    def make_one() -> tuple[GPUMutex, Order]:
        mutex = GPUMutex(device="a-gpu", lease=SOON_S)
        made.append((mutex, orders[-1]))
        return made[-1]

    monkeypatch.setattr(device_order, "device_order", noted_order)
    yield make_one
    for mutex, _ in made:
        mutex.close()


Make = Callable[[], tuple[GPUMutex, Order]]


def take_turns(*mutexes: GPUMutex) -> None:
    for mutex in mutexes:
        mutex.acquire()
        mutex.release()


def test_the_device_waits_for_the_siblings_last_turn(make: Make) -> None:
    (first, first_order), (second, second_order) = make(), make()
    take_turns(first, second, first, second)
    assert [turn for turn, _ in first_order.finished] == [1, 3]
    assert second_order.followed == [(first_order.handles, 1), (first_order.handles, 3)]
    assert first_order.followed == [(second_order.handles, 2)]


def test_a_sibling_waits_until_the_turn_is_told_not_until_it_is_given_back(make: Make) -> None:
    (first, order), (second, _) = make(), make()
    order.tell_at_once = False
    take_turns(first)
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (second.acquire(), taken.set()))
    waiting.start()
    assert not taken.wait(0.2)
    threading.Thread(target=order.finished[0][1]).start()  # as the thread that waited for the device does
    assert taken.wait(SOON_S)
    waiting.join()
    second.release()
    assert second.stats()["leases_expired"] == 0


def test_a_sibling_that_ends_while_its_events_are_opened_is_passed_over(make: Make) -> None:
    (first, _), (second, order) = make(), make()
    take_turns(first)

    def sibling_ends() -> None:
        first.close()
        raise RuntimeError("CUDA error: invalid resource handle")

    order.on_follow = sibling_ends
    take_turns(second)
    assert second.disabled_because is None
    assert second.stats()["turns"] == 1


def test_a_device_that_fails_to_wait_ends_the_turns(make: Make) -> None:
    (first, _), (second, order) = make(), make()
    take_turns(first)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    order.on_follow = fail
    take_turns(second)
    assert "illegal memory access" in str(second.disabled_because)
    take_turns(first, first)  # and nobody waits for it
    assert first.stats()["leases_expired"] == 0


def test_a_sibling_that_the_device_cannot_wait_for_is_asked_once_to_tell_late(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (first, first_order), (second, order) = make(), make()
    order.problem = "its events cannot be opened: invalid resource handle"
    with caplog.at_level(logging.WARNING):
        take_turns(first, second, first, second, first, second)
    assert first_order.on_host == [False, True, True], "told at once although the sibling cannot wait"
    assert order.on_host == [False, False, False], "the sibling can wait, so nobody has to tell late"
    assert [record.getMessage().count("invalid resource handle") for record in caplog.records] == [1]
    assert second.disabled_because is None
    assert (first.stats()["ordered_by"], second.stats()["ordered_by"]) == ("notes", "host")


def test_a_sibling_that_was_never_able_to_wait_is_told_late_from_the_first_turn(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Order, "waits_on_host", True, raising=False)
    (first, first_order), (second, _) = make(), make()
    take_turns(first, second, first)
    assert first_order.on_host == [True, True]
    second.close()
    take_turns(first)
    assert first_order.on_host == [True, True, False], "told late although nobody needs it any more"


def test_a_sibling_that_ends_while_it_cannot_be_waited_for_changes_nothing(make: Make) -> None:
    (first, _), (second, order) = make(), make()
    take_turns(first)
    order.problem, order.on_follow = "its events cannot be opened", first.close
    take_turns(second)
    assert second.stats()["ordered_by"] == "notes"


def test_in_a_graph_capture_turns_are_refused_and_nothing_changes(make: Make) -> None:
    (first, order), (second, _) = make(), make()
    order.usable = False
    with pytest.raises(UnsupportedConfigurationError, match="no capture"):
        first.acquire()
    assert first.stats()["turns"] == 0
    order.usable = True
    take_turns(second)
    first.acquire()
    order.usable = False
    with pytest.raises(UnsupportedConfigurationError, match="no capture"):
        first.release()
    first.acquire()  # inside a turn nothing is asked of the device
    assert first.holding
    assert not order.finished
    order.usable = True
    first.release()
    assert [turn for turn, _ in order.finished] == [2], (
        "the refused calls have drawn a turn, or given one back"
    )
    assert first.disabled_because is None


def test_a_turn_that_cannot_be_told_ends_the_turns_on_whatever_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutex, order = make()
    order.tell_at_once = False
    take_turns(mutex)

    def fail(turn: int) -> None:
        raise SegmentError("expected the segment to stay, got it removed under way")

    segment = membership_of(mutex).segment
    monkeypatch.setattr(segment, "publish_returned", fail)
    telling = threading.Thread(target=order.finished[0][1])
    telling.start()
    telling.join(SOON_S)
    assert "removed under way" in str(mutex.disabled_because)


def test_a_turn_that_cannot_be_told_while_the_mutex_gives_up_holds_nobody_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives up waits for the order's thread; that may find out the same at this very moment."""
    mutex, order = make()
    order.tell_at_once = False
    take_turns(mutex)
    telling = threading.Thread(target=order.finished[0][1])

    def fail(*_: int) -> None:
        raise SegmentError("expected the segment to stay, got it removed under way")

    ended = []

    def end_the_thread() -> None:
        telling.start()
        telling.join(SOON_S)
        ended.append(not telling.is_alive())

    segment = membership_of(mutex).segment
    monkeypatch.setattr(segment, "publish_returned", fail)
    monkeypatch.setattr(segment, "draw_turn", fail)
    order.on_close = end_the_thread
    mutex.acquire()
    assert ended == [True]
    assert "removed under way" in str(mutex.disabled_because)


def test_who_leaves_lets_the_device_end_first(make: Make) -> None:
    (first, order), (second, _) = make(), make()
    siblings = []
    order.on_close = lambda: siblings.append(second.stats()["siblings"])
    first.close()
    assert siblings == [1], "the slot was given up before the device had ended"
    assert second.stats()["siblings"] == 0


def test_a_device_that_fails_at_the_end_does_not_keep_the_slot(make: Make) -> None:
    (first, order), (second, _) = make(), make()

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    order.on_close = fail
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        first.close()
    assert second.stats()["siblings"] == 0
