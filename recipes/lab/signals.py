"""Signals that end a process: let them unwind the stack, and hold them back while something is cleared up."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Final

_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ATTEMPTS: Final = 100
_Handler = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def endings_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, unless they are handled or ignored (nohup)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def undisturbed() -> AbstractContextManager[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block has ended, then let them have their effect.

    The block must end by itself. A signal that comes while the block is being entered waits too.

    [Note: held back by handlers] Masking signals does not help: a signal for the whole process goes to any thread that
    does not mask it (torch has several), and Python then runs the handler in the main thread, masked or not. So the
    handlers themselves are replaced. Python runs them in the main thread only; in any other one this does nothing.
    """
    return _Undisturbed()


class _Undisturbed(AbstractContextManager[None]):
    """Replaces the handlers of signals that end a process; see `undisturbed`."""

    def __init__(self) -> None:
        self._before: dict[int, _Handler] = {}
        self._came: list[int] = []
        self._raised: BaseException | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._insist(self._hold)

    def __exit__(self, *_: object) -> None:
        self._insist(self._restore)
        self._deliver()
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _insist(self, change: Callable[[], None]) -> None:
        """Complete a change although handlers raise in the middle of it; keep what they raise for later."""
        for _ in range(_ATTEMPTS):
            try:
                return change()
            except BaseException as raised:
                self._raised = raised
        assert self._raised is not None
        raise self._raised

    def _hold(self) -> None:
        for number in _ENDINGS:
            handler = self._before.setdefault(number, signal.getsignal(number))
            # Ignored (nohup): nothing to hold back. None: a handler not from Python, which cannot be put back.
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, self._note)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)

    def _deliver(self) -> None:
        """Raise the signals that came; each takes effect even if the handler of the one before raises."""
        try:
            while self._came:
                signal.raise_signal(self._came.pop(0))
        finally:
            if self._came:
                self._deliver()
