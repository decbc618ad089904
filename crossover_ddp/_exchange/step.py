"""The buckets of one backward pass, and how a failure among them reaches the training thread.

[Note: errors after backward] An exception must not leave a hook: DDP is unusable afterwards. An exception in
the Future that the hook returned surfaces as a misleading cast error. So a failing bucket is completed like
any other, and the failure is raised on the training thread after DDP's own end of backward, by a callback of
the autograd engine: ``backward()`` raises the very error. DDP queues its end of backward after our hook ran,
hence a callback that queues another one. Where nothing will look for the error (outside of a backward pass,
as in Join's shadow pass) the Future does carry the exception.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

GradientFuture = torch.futures.Future[torch.Tensor]


class Step:
    """The buckets of one backward pass, up to the one that DDP calls the last; numbered from 0 by the engine."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.deferred: list[Any] = []
        self._held: list[Any] = []
        self._is_cut_short = False
        self.entered = False
        self.last_hook_s = 0.0
        self.buckets: list[tuple[int, float]] = []  # bytes, moment of the hook
        self.compute_ended = False
        self.keeps_turn = False
        self._lock = threading.Lock()
        self._watching = 0
        self._error: Exception | None = None

    def raise_after_backward(self) -> None:
        """Have a failure raised when DDP is through with this backward pass; call it in a hook."""
        if _queue_callback(self._at_end_of_backward):
            with self._lock:
                self._watching += 1

    def leave(self, error: Exception) -> bool:
        """Leave ``error`` to be raised after backward; return False if nothing will look for it."""
        with self._lock:
            if self._watching:
                self._error = self._error or error
            return self._watching > 0

    def hold(self, transfer: Any) -> bool:
        """Keep ``transfer``'s Future open until the step's last bucket is done; return False if that was refused."""
        with self._lock:
            if not self._is_cut_short:
                self._held.append(transfer)
            return not self._is_cut_short

    def let_go(self, *, refused: bool = False) -> list[Any]:
        """Return what was held, once; ``refused``: the last bucket never goes, so hold nothing any more."""
        with self._lock:
            self._is_cut_short = refused
            held, self._held = self._held, []
        return held

    def _at_end_of_backward(self) -> None:
        if not _queue_callback(self._after_ddp):
            self._after_ddp()

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket: from then on
        # nobody watches, and a later failure goes into its Future.
        with self._lock:
            self._watching -= 1
            error, self._error = self._error, None
        if error is not None:
            raise error


def after_backward(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called when DDP is through with this backward pass; False outside of one.

    Call it in a hook. What ``callback`` raises is raised by ``backward()``.
    """

    def at_end_of_backward() -> None:
        if not _queue_callback(callback):
            callback()

    return _queue_callback(at_end_of_backward)


def _queue_callback(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
