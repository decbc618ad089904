"""Signals that end a process: lets them unwind the stack, or holds them back during a clean-up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def endings_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does.

    Signals that are handled or ignored (nohup) are left alone.
    """

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
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block has ended, then deliver each of them.

    The block must end by itself. A signal that arrives while the handlers are being replaced is not
    held back. The next lab cleans up after that.

    [Note: held back by handlers] Masking signals would not help. The kernel delivers a signal for
    the process to any thread that does not mask it, and torch has several threads. Python then runs
    the handler in the main thread, even if that thread masks the signal. So the handlers are
    replaced. Python runs handlers only in the main thread, so in another thread this does nothing.
    """
    came: list[int] = []
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        # Ignored signals (nohup) need not be held back. None stands for a handler that was not set
        # by Python, which could not be restored.
        handlers = {number: signal.getsignal(number) for number in ENDINGS}
        replaced = {n: each for n, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    for number in replaced:
        signal.signal(number, lambda number, frame: came.append(number))
    # The stack delivers every signal, even if the handler of the one before raises.
    with ExitStack() as effects:
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            for each in sorted({*came}, reverse=True):
                effects.callback(signal.raise_signal, each)
