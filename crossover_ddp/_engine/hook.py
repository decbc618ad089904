"""What every hook and every state of a hook has in common."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from crossover_ddp._ddp.checks import PYTHON_REDUCER, Bucket
from crossover_ddp._engine.buckets import Backward
from crossover_ddp._engine.places import GradientFuture
from crossover_ddp.errors import UnsupportedConfigurationError


def guarded(
    bucket: Bucket,
    answer: Callable[[], GradientFuture],
    *,
    refused: Callable[[], None] | None = None,
) -> GradientFuture:
    """Return ``answer()``; what it raises is raised by ``backward()`` instead.

    An exception must not leave a hook: DDP is unusable afterwards. ``refused`` is called first if there is one. Only
    where torch's python reducer calls the hook it must leave it, for nobody else would hear of it.
    """
    if isinstance(bucket, tuple):
        raise UnsupportedConfigurationError(PYTHON_REDUCER)
    try:
        return answer()
    except Exception as error:
        if refused is not None:
            refused()
        backward = Backward()
        backward.watch(is_last=True)
        return backward.refuse(bucket, error)


def check_state(state: object, kind: type, remedy: str) -> None:
    """Refuse a state that is not of ``kind``, such as another hook's; ``remedy`` says what to do instead."""
    if not isinstance(state, kind):
        raise UnsupportedConfigurationError(
            f"expected a {kind.__name__}, got state={type(state).__name__}; {remedy}"
        )


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
