"""The private names of the engine that tests of public names need, in one place.

They make the engine fail, or take a rare path. Most return a context manager. Each patches its own
process only, so ranks enter it themselves.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import torch.distributed as dist

from crossover_ddp import DecoupledState, GPUMutex
from crossover_ddp._averaging import shared_centre
from crossover_ddp._ddp.refit import BucketSizes
from crossover_ddp._decoupled.race import COUNTED, DEFERRED, FIRST, WARM_UP, WHOLE, Race
from crossover_ddp._engine import links
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.networks import Networks
from crossover_ddp._engine.observe import Meter
from crossover_ddp._kfac import settings
from crossover_ddp._turns import channel
from crossover_ddp._turns.segment import TurnSegment

Patch = contextlib.AbstractContextManager[object]
RACE: Final = (WARM_UP, 1 + FIRST, WARM_UP + 1 + FIRST + 3 * (1 + COUNTED))
"""Backward passes of a race of two arms: before it, in its first block, and until a plain
decision."""


def refuse_bucket(
    which: int | str = 0, *, error: Exception | None = None, times: float = float("inf")
) -> Patch:
    """Refuse a bucket, by its index or as the "last" one, before any part of it is sent.

    Args:
        which: the index of the bucket, or "last".
        error: the error to raise; default ``KeyError("ours")``.
        times: the number of refusals, after which the engine accepts the bucket.
    """
    original = Exchange._bucket

    def taken(self: Exchange, bucket: dist.GradBucket, *args: Any, **options: Any) -> Any:
        nonlocal times
        if times > 0 and (bucket.is_last() if which == "last" else bucket.index() == which):
            times -= 1
            raise error or KeyError("ours")
        return original(self, bucket, *args, **options)

    return mock.patch.object(Exchange, "_bucket", taken)


def before_last_bucket(do: Callable[[], object]) -> Patch:
    """Call ``do`` in the hook's call for the last bucket, before the engine carries it."""
    original = Exchange.send

    def send(self: Exchange, bucket: dist.GradBucket, *args: Any, **options: Any) -> Any:
        if bucket.is_last():
            do()
        return original(self, bucket, *args, **options)

    return mock.patch.object(Exchange, "send", send)


def break_engine(error: Exception) -> Patch:
    """Fail every hook's access to its group's engine, as a bug of the package would."""
    return mock.patch.object(Exchange, "of", mock.Mock(side_effect=error))


def force_native() -> Patch:
    """Treat gloo as a backend with native collectives, of which it has all that are needed."""
    return mock.patch.object(Networks, "sends_messages", lambda self, device: False)


def pretend_times(state: DecoupledState, *, deferred_s: float, whole_s: float) -> None:
    """Replace the clock of a state's race: a step's time depends on whether it is deferred alone.

    Nothing is known of waits, so that all arms are run.
    """
    race = state._race
    assert isinstance(race, Race)
    now_s = 0.0

    def clock(device: object) -> float:
        return now_s

    def backward_ended(*where: Any) -> None:
        nonlocal now_s
        now_s += deferred_s if race.defers else whole_s
        type(race).backward_ended(race, *where)

    race._clock = clock
    race._meter = Meter()
    race._meter.is_timed = False
    race.backward_ended = backward_ended  # type: ignore[method-assign, assignment]


def refit(state: DecoupledState, sizes: BucketSizes | None, *, hooked: bool = True) -> bool:
    """Give the state's model other buckets in its next training forward."""
    return state._pending.refit(sizes, hooked=hooked)


def is_hooked(state: DecoupledState) -> bool:
    """Return whether the state's model has its hook, after a refit."""
    return not state._pending.is_plain


def defer(state: DecoupledState, defers: bool) -> None:
    """Defer all later steps that can be deferred, or none, as a race would."""
    state._race = Race((DEFERRED if defers else WHOLE,), state.meter)


def kfac_of_no_layer() -> Patch:
    """Let `KFACState` accept a model without any layer that it treats, which it refuses users."""
    return mock.patch.object(settings, "check_any")


def start_near_wrap(*, left: int) -> Patch:
    """Start engines on channel 15, ``left`` transfers before their numbers leave gloo's range."""
    original = links.Gloo.__init__

    def begin(self: links.Gloo, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._channel = (1 << links._CHANNEL_BITS) - 1
        self._numbers = itertools.count((links._PRIVATE_TAG << 1) // links._STAGES - left)

    return mock.patch.object(links.Gloo, "__init__", begin)


def give_up(mutex: GPUMutex, error: Exception) -> None:
    mutex._give_up(error)


def shared_memory_at(base: str) -> Patch:
    """Look for the siblings' shared memory in another directory, as in a container."""
    return mock.patch.object(TurnSegment.__init__, "__kwdefaults__", {"base": base})


def grants_kept(count: int) -> Patch:
    """Keep the numbers of at most ``count`` turns in the job's store."""
    return mock.patch.object(channel, "_KEPT", count)


def pretend_host(name: str) -> Patch:
    """Report this process's host as ``name`` to ``ElasticState(mode="wild")``."""
    return mock.patch.object(shared_centre, "_host", lambda: name)
