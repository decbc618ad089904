"""Buckets of one backward pass, and how a failure among them reaches the training thread.

[Note: errors after backward] An exception must not leave a hook: DDP is unusable afterwards. An exception in the Future
that the hook returned surfaces as a misleading cast error. So a failing bucket is completed like any other, and the
failure is raised on the training thread after DDP's own end of backward, by a callback of the autograd engine:
``backward()`` raises the very error. DDP queues its end of backward after our hook ran, hence a callback that queues
another one. Where nothing will look for the error (outside of a backward pass, as in Join's shadow pass) the Future
does carry the exception.
"""

import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from .links import Layout, Link
from .places import GradientFuture, Place
from .trips import Trip

BucketWay = Callable[["Bucket", Link], Coroutine[Any, Any, None]]


class Backward:
    """The buckets of one backward pass, up to the one that DDP calls the last.

    Args:
        number: of the pass.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.ready: list[tuple[int, float]] = []  # by bucket: bytes, moment of the hook
        self.futures: list[GradientFuture] = []  # of somebody else's hook
        self._lock = threading.Lock()
        self._watching = 0
        self._error: BaseException | None = None

    def watch(self, *, is_last: bool) -> None:
        """Have a failure raised when DDP is through with this backward pass; call it in each bucket's hook.

        The first bucket's watch catches early failures; the last one's sees the end of backward even if earlier
        buckets were ready in a nested backward pass that ended before.
        """
        if (not self.ready or is_last) and _queue(self._at_end_of_backward):
            with self._lock:
                self._watching += 1

    def leave(self, error: BaseException) -> bool:
        """Leave ``error`` to be raised after backward; return False if nothing will look for it."""
        with self._lock:
            if self._watching:
                self._error = self._error or error
            return self._watching > 0

    def refuse(self, grad_bucket: dist.GradBucket, error: Exception) -> GradientFuture:
        """Answer a bucket of which nothing was sent: it completes as it is."""
        future = GradientFuture()
        if self.leave(error):
            future.set_result(grad_bucket.buffer())
        else:
            future.set_exception(error)  # type: ignore[arg-type]
        return future

    def _at_end_of_backward(self) -> None:
        if not _queue(self._after_ddp):
            self._after_ddp()

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket: from then on
        # nobody watches, and a later failure goes into its Future.
        with self._lock:
            self._watching -= 1
            error, self._error = self._error, None
        if error is not None:
            raise error


class Bucket(Trip):
    """A bucket of DDP on its way.

    Args:
        grad_bucket: DDP's.
        flat: its buffer.
        layout: equal parts.
        backward: the pass that it belongs to.
        place: where its tensors are.
    """

    def __init__(
        self, grad_bucket: dist.GradBucket, flat: Tensor, layout: Layout, backward: Backward, place: Place
    ) -> None:
        super().__init__(f"bucket {grad_bucket.index()}")
        self.index, self.last = grad_bucket.index(), grad_bucket.is_last()
        self.flat, self.layout, self.result = flat, layout, flat
        self.backward, self.place = backward, place
        self.future = place.future()
        self.done_s: float | None = None

    def exchanged(self) -> None:
        """Note that nothing travels any more, before the turn is waited for."""
        self.done_s = time.monotonic()

    def end(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Complete the Future, or leave the error to be raised after backward."""
        super().end(error, follow)
        with self.place.side():
            if error is None or self.backward.leave(error):
                self.future.set_result(self.result)
            else:
                self.future.set_exception(error)  # type: ignore[arg-type]


def after_backward(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called when DDP is through with this backward pass; False outside of one.

    Call it in a hook. What ``callback`` raises is raised by ``backward()``.
    """

    def at_end_of_backward() -> None:
        if not _queue(callback):
            callback()

    return _queue(at_end_of_backward)


def _queue(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
