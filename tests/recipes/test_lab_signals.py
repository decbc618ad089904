"""Signals wait while something is cleared up, also in a process in which torch runs threads."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from lab.signals import ENDINGS, undisturbed
from tests.harness._preloaded import ForkedScript
from tests.recipes import RECIPES

# The kernel gives a signal for the process to the main thread if that does not mask it, and to another one if it does.
CLEARING_UP = """
import os, signal, sys, time
import torch
from lab.signals import undisturbed
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(4)
for _ in range(3):
    torch.randn(600, 600) @ torch.randn(600, 600)
loss = (torch.ones(3, requires_grad=True) * 2).sum()
loss.backward()
threads = len(os.listdir("/proc/self/task"))
assert threads > 1, "torch runs no thread: this shows nothing"
try:
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        with undisturbed():
            for number in map(int, sys.argv[1:]):
                os.kill(os.getpid(), number)
            time.sleep(0.5)
            print("cleared up", flush=True)
        print("not reached", flush=True)
except KeyboardInterrupt as error:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("meanwhile", "ending"),
    [
        ([signal.SIGINT] * 3, (0, "cleared up\ninterrupted\n")),
        ([signal.SIGTERM], (-signal.SIGTERM, "cleared up\n")),
    ],
)
def test_signals_wait_though_torch_has_threads(meanwhile: list[int], ending: tuple[int, str]) -> None:
    """Interrupt a process that then clears up, in which further signals for the whole process come."""
    command = [sys.executable, "-c", CLEARING_UP, *(str(int(number)) for number in meanwhile)]
    environment = {**os.environ, "PYTHONPATH": str(RECIPES)}
    process = ForkedScript(command, environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert (process.wait(60), rest) == ending


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
    with pytest.raises(InterruptedError), undisturbed():
        with undisturbed():
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.raise_signal(number)
        assert noted == []
    assert sorted(noted) == sorted(ENDINGS)
    assert [signal.getsignal(number) for number in ENDINGS] == before


def test_an_error_of_the_block_is_not_lost_and_without_a_signal_none_is_delivered(noted: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), undisturbed():
        _ = 1 / 0
    assert noted == []
    with pytest.raises(InterruptedError) as raised, undisturbed():
        signal.raise_signal(signal.SIGINT)
        _ = 1 / 0
    assert isinstance(raised.value.__context__, ZeroDivisionError)


def test_what_is_ignored_stays_ignored(noted: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with undisturbed():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
