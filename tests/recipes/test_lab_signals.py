"""Signals wait while something is cleared up, also in a process that has more than one thread."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from lab.signals import ENDINGS, undisturbed


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """Handlers of the three signals that note them and raise, as Ctrl-C does."""
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        raise InterruptedError(number)

    before = {number: signal.signal(number, handler) for number in ENDINGS}
    yield numbers
    for number, each in before.items():
        signal.signal(number, each)


def test_each_signal_that_came_has_its_effect_behind_the_outer_block(noted: list[int]) -> None:
    before = [signal.getsignal(number) for number in ENDINGS]
    ended = threading.Event()
    # The kernel gives a signal for the process to the main thread if that does not mask it, else to this one.
    other = threading.Thread(target=ended.wait)
    other.start()
    with pytest.raises(InterruptedError), undisturbed():
        with undisturbed():
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        assert noted == []
    ended.set()
    other.join()
    assert sorted(noted) == sorted(ENDINGS)
    assert [signal.getsignal(number) for number in ENDINGS] == before


def test_an_error_of_the_block_is_not_lost(noted: list[int]) -> None:
    with pytest.raises(InterruptedError) as raised, undisturbed():
        signal.raise_signal(signal.SIGINT)
        _ = 1 / 0
    assert isinstance(raised.value.__context__, ZeroDivisionError)


def test_what_is_ignored_stays_ignored(noted: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with undisturbed():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
