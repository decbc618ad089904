"""What every hook and every state of a hook has in common."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch.distributed as dist

from .exchange import Exchange
from .step import GradientFuture


def guarded(
    bucket: dist.GradBucket,
    answer: Callable[[], GradientFuture],
    *,
    refused: Callable[[], None] | None = None,
) -> GradientFuture:
    """Return ``answer()``; what it raises is raised by ``backward()`` instead.

    An exception must not leave a hook: DDP is unusable afterwards. ``refused`` is called first if there is one.
    """
    try:
        return answer()
    except Exception as error:
        if refused is not None:
            refused()
        return Exchange.refuse(bucket, error)


class _Mutex(Protocol):
    def paused(self) -> contextlib.AbstractContextManager[None]: ...


class _HasMutex(Protocol):
    @property
    def mutex(self) -> _Mutex | None: ...


class Pausable:
    """A state with ``mutex``, which may be None."""

    @contextlib.contextmanager
    def paused(self: _HasMutex) -> Iterator[None]:
        """Give the turn away during the block: evaluation, a checkpoint; see `GPUMutex.paused`."""
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield
