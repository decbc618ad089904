"""What every hook and every state of a hook has in common."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar

import torch.distributed as dist

from crossover_ddp._ddp.checks import PYTHON_REDUCER, Bucket
from crossover_ddp._system import environment
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .buckets import Backward
from .links import GradientFuture

_LONGEST: Final = 300
Said = TypeVar("Said")


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


class Agreement:
    """A comparison of what the ranks of a process group say, at the first bucket and after each load; then it is made.

    torch's own collective carries it, so that a rank with ``CROSSOVER_DISABLE=1`` takes part, too.
    """

    def __init__(self) -> None:
        self.made = False

    def forget(self) -> None:
        """Compare again at the next bucket."""
        self.made = False

    def make(self, group: dist.ProcessGroup, said: Callable[[], Mapping[str, object]]) -> None:
        """Raise unless all ranks say the same, once.

        Args:
            group: whose ranks compare.
            said: returns this rank's values by name, which are compared by their ``repr``; not called with
                ``CROSSOVER_DISABLE=1``.

        On failure: ``UnsupportedConfigurationError`` on all ranks; the next bucket compares again. ``ExchangeError`` if
        a peer is gone.

        **Collective**.
        """
        if not self.made:
            if group.size() > 1:
                disabled = environment.is_set(environment.DISABLE)
                compare(group, {environment.DISABLE: int(disabled), **({} if disabled else said())})
            self.made = True


def compare(group: dist.ProcessGroup, said: Mapping[str, object]) -> None:
    """Raise on all ranks of ``group`` unless all say the same; see `Agreement.make`. **Collective**."""
    everyone = told_by_all(group, {name: repr(value) for name, value in said.items()})
    for name in said:
        values = [each.get(name, "nothing") for each in everyone]
        if len({*values}) > 1:
            by_rank = ", ".join(f"{rank}: {value[:_LONGEST]}" for rank, value in enumerate(values))
            raise UnsupportedConfigurationError(
                f"expected the same {name} on all ranks, got {name} by rank {{{by_rank}}}; pass the same everywhere, "
                "and call load_state_dict on all ranks or on none"
            )


def told_by_all(group: dist.ProcessGroup, said: Said) -> list[Said]:
    """Return by rank what the ranks of ``group`` say. **Collective**.

    On failure: ``ExchangeError`` if a peer is gone.
    """
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, said, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {group.rank()} of {group.size()}: comparing with the other ranks failed: {error}; restart the job"
        ) from error
    return everyone
