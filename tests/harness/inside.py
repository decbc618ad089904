"""All that tests of public names must know of the engine's private ones: ways to make it fail, or do what is rare.

Each is a context manager for this process, so ranks enter it themselves.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from crossover_ddp import DecoupledState, GPUMutex
from crossover_ddp._averaging import shared_centre
from crossover_ddp._decoupled.trial import BLOCK, WARM_UP, Trial
from crossover_ddp._engine import links
from crossover_ddp._engine.device import Device, Native
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._kfac import settings
from crossover_ddp._system.comparing import PLAIN
from crossover_ddp._turns import channel
from crossover_ddp._turns.segment import TurnSegment

TRIAL: Final = (WARM_UP, BLOCK, WARM_UP + 2 * BLOCK * min(PLAIN))
"""Backward passes of a trial of deferring: before it, of one kind in a row, to its end where
the difference is plain."""


@contextlib.contextmanager
def refuse_bucket(
    which: int | str | Callable[[dist.GradBucket], bool] = 0,
    *,
    error: Exception | None = None,
    times: int | None = None,
) -> Iterator[None]:
    """Refuse a bucket before anything of it is sent, whatever the hook.

    Args:
        which: its index, "last", "every", or a function that tells whether a bucket is it.
        error: what is raised; ``KeyError("ours")`` if none is given.
        times: so often at most; None: always.
    """
    left = float("inf") if times is None else times

    def is_it(bucket: dist.GradBucket) -> bool:
        if callable(which):
            return which(bucket)
        return which == "every" or (bucket.is_last() if which == "last" else bucket.index() == which)

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def taken(self: Any, bucket: dist.GradBucket, *args: Any, **options: Any) -> Any:
            nonlocal left
            if left > 0 and is_it(bucket):
                left -= 1
                raise error or KeyError("ours")
            return original(self, bucket, *args, **options)

        return taken

    with mock.patch.object(Exchange, "_bucket", refusing(Exchange._bucket)):
        yield


@contextlib.contextmanager
def before_last_bucket(do: Callable[[], object]) -> Iterator[None]:
    """Have something done in the hook of each last bucket, before it is sent."""
    original = Exchange.carry

    def carry(self: Exchange, bucket: dist.GradBucket, *args: Any, **options: Any) -> Any:
        if bucket.is_last():
            do()
        return original(self, bucket, *args, **options)

    with mock.patch.object(Exchange, "carry", carry):
        yield


@contextlib.contextmanager
def break_engine(error: Exception) -> Iterator[None]:
    """Let no hook reach its group's engine: what a mistake of our own would look like."""
    with mock.patch.object(Exchange, "of", mock.Mock(side_effect=error)):
        yield


@contextlib.contextmanager
def force_native() -> Iterator[None]:
    """Let gloo count as a backend with collectives of its own; it has all that is needed."""
    with mock.patch.object(Exchange, "sends_messages", lambda self, device: False):
        yield


@contextlib.contextmanager
def force_native_alone() -> Iterator[None]:
    """Let one rank on a device, which has nothing to send, take the backend's own collectives all the same."""

    def made(exchange: Exchange, group: dist.ProcessGroup, device: torch.device) -> Native:
        return Native(group, Device(device, by_host=False))

    with mock.patch.object(Exchange, "_made", made):
        yield


def pretend_times(state: DecoupledState, *, deferred_s: float, whole_s: float) -> None:
    """Let time go by the kind of step alone in the trial of a state."""
    trial = state._trial
    assert isinstance(trial, Trial)
    now_s = 0.0

    def clock() -> float:
        return now_s

    def backward_ended(*where: Any) -> None:
        nonlocal now_s
        now_s += deferred_s if trial.defers else whole_s
        type(trial).backward_ended(trial, *where)

    trial._clock = clock
    trial.backward_ended = backward_ended  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def kfac_of_no_layer() -> Iterator[None]:
    """Let `KFACState` take a model of which it treats no layer, which a user is not allowed."""
    with mock.patch.object(settings, "check_any"):
        yield


@contextlib.contextmanager
def start_near_wrap(*, left: int) -> Iterator[None]:
    """Let engines made here begin ``left`` transfers before numbers leave the range of gloo's tags, on channel 15."""
    original = links.Gloo.__init__

    def begin(self: links.Gloo, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._channel = (1 << links._CHANNEL_BITS) - 1
        self._numbers = itertools.count((links._PRIVATE_TAG << 1) // links._STAGES - left)

    with mock.patch.object(links.Gloo, "__init__", begin):
        yield


def give_up(mutex: GPUMutex, error: Exception) -> None:
    """Let a mutex end as it does when its job's store breaks."""
    mutex._give_up(error)


@contextlib.contextmanager
def shared_memory_at(base: str) -> Iterator[None]:
    """Let this process find its siblings' memory in another directory, as in a container."""
    with mock.patch.object(TurnSegment.__init__, "__kwdefaults__", {"base": base}):
        yield


@contextlib.contextmanager
def grants_kept(count: int) -> Iterator[None]:
    """Let this process keep so many turns' numbers in its job's store before it removes the oldest."""
    with mock.patch.object(channel, "_KEPT", count):
        yield


@contextlib.contextmanager
def pretend_host(name: str) -> Iterator[None]:
    """Let this process count as one of host ``name`` for ``ElasticState(mode="wild")``."""
    with mock.patch.object(shared_centre, "_host", lambda: name):
        yield
