"""Signals that end a process: let them unwind the stack, and hold them back while something is cleared up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def endings_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, unless they are handled or ignored (nohup)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [
            n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL
        ]
    for number in changed:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block has ended, then let each have its effect.

    The block must end by itself. A signal in the very moment in which handlers are replaced is not held back; what it
    leaves behind, the next lab removes.

    [Note: held back by handlers] Masking signals does not help: a signal for the whole process goes to any thread that
    does not mask it (torch has several), and Python then runs the handler in the main thread, masked or not. So the
    handlers themselves are replaced. Python runs them in the main thread only; in any other one this does nothing.
    """
    came: list[int] = []
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        # Ignored (nohup): nothing to hold back. None: a handler not from Python, which cannot be put back.
        handlers = {number: signal.getsignal(number) for number in ENDINGS}
        replaced = {n: each for n, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    for number in replaced:
        signal.signal(number, lambda number, frame: came.append(number))
    with (
        ExitStack() as effects
    ):  # each signal has its own even if the handler of the one before raises
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            for each in sorted({*came}, reverse=True):
                effects.callback(signal.raise_signal, each)
