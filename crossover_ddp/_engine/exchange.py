"""Starts journeys, and brings back what became of them.

[Note: failed] What a journey raises is a failure: other ranks may wait for what it would have sent. The first one is
final for the group: it is thrown into every journey of this rank, and the connections are closed, so that all ranks
hear of it.
"""

import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp.errors import ExchangeError

from .endings import on_destruction
from .gloo import Gloo
from .journeys import Journey
from .links import Alone, Layout, Link, Network, equal_layout
from .native import Native
from .places import Begin, Device, Host, Place
from .spans import TracedLink, timeline_of
from .staged import Staged

Way = Callable[[Link], Coroutine[Any, Any, None]]

_END_S: Final = 0.5
_NEEDED_BY_OTHERS_S: Final = 30.0
_DESTROYED: Final = "the process group was destroyed; make a new one"


class Trip:
    """A journey under way.

    Args:
        name: of what travels, in errors.
        deferred: the program goes on without it; other ranks may need it although this one ends.
    """

    def __init__(self, name: str, *, deferred: bool) -> None:
        self.name, self.deferred = name, deferred
        self.journey: Journey | None = None
        self._arrived = threading.Event()
        self._error: ExchangeError | None = None
        self._follow: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until it has ended; on a device order what the caller does behind it. May be called again.

        On failure: ``ExchangeError``.
        """
        self._arrived.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._follow is not None:
            self._follow()

    def end(self, error: ExchangeError | None, follow: Callable[[], None]) -> None:
        """Let nobody wait any more."""
        self.journey = None  # no cycle that keeps its tensors
        self._error, self._follow = error, follow
        self._arrived.set()


class Exchange:
    """The journeys of one process group.

    Args:
        group: held weakly.
    """

    _of_group: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange]"] = (
        weakref.WeakKeyDictionary()
    )
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._pid = weakref.ref(group), os.getpid()
        self.rank, self.size = group.rank(), group.size()
        config = str(dist.get_backend_config(group))
        self._backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
        self._networks: dict[torch.device, Network] = {}
        self._timeline = timeline_of(group)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._under_way: set[Trip] = set()
        self._failure: ExchangeError | None = None
        self._leave_group = on_destruction(group, self._end)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Exchange":
        """Return the one of ``group``, which lives as long as that. Not collective."""
        with cls._registry_lock:
            found = cls._of_group.get(group)
            if found is None:
                found = cls._of_group[group] = cls(group)
            return found

    def begin(self, way: Way, device: torch.device, name: str, *, deferred: bool = False) -> Trip:
        """Begin a journey that belongs to no bucket.

        Args:
            way: makes it, given its link.
            device: of its tensors.
            name: of what travels, in errors.
            deferred: other ranks may need it although this one ends.

        **Collective**: all ranks begin the same journeys in the same order.
        """
        if os.getpid() != self._pid:
            raise ExchangeError(
                "this process is a fork of a rank; train in the rank, or start a process anew"
            )
        trip, network = Trip(name, deferred=deferred), self.network(device)
        begin, link = network.place.follow(), network.link()
        if self._timeline is not None:
            details = {
                "step": next(self._numbers),
                "bucket": -1,
                "largest_bytes": 0,
                "ready_s": time.monotonic(),
            }
            link = TracedLink(link, self._timeline, owner=0, **details)
        ended = functools.partial(self._ended, trip, network.place)
        journey = trip.journey = Journey(_after(begin, way, link), ended, network.place.side)
        with self._lock:
            self._under_way.add(trip)
            failure = self._failure
        with torch.no_grad():
            journey.go_on() if failure is None else journey.throw(failure)
        return trip

    def equal_layout(self, flat: Tensor) -> Layout:
        """Return who owns which part of a tensor of this size, dtype and device if parts are equal."""
        return equal_layout(flat, self.network(flat.device))

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return every rank's numbers by rank, as many on all ranks, once all have asked.

        Args:
            numbers: of this rank.
            device: over whose network; its index counts.

        **Collective**.
        """
        flat = torch.zeros(self.size, len(numbers), dtype=torch.float64, device=device)
        flat[self.rank] = torch.tensor(numbers, dtype=flat.dtype)
        layout = [len(numbers)] * self.size
        self.begin(lambda link: link.all_gather(flat.flatten(), layout), device, "a table of numbers").wait()
        return flat.tolist()

    def sends_messages(self, device: torch.device) -> bool:
        """Tell whether ranks exchange messages, not collectives, for tensors on ``device``."""
        return self._backends.get(device.type) == "gloo"

    def network(self, device: torch.device) -> Network:
        """Return what carries the tensors of ``device``; made when it is first asked for, on all ranks alike."""
        if (found := self._networks.get(device)) is None:
            if (group := self._group()) is None:
                raise ExchangeError(_DESTROYED)
            found = self._networks[device] = self._made(group, device)
        return found

    def _made(self, group: dist.ProcessGroup, device: torch.device) -> Network:
        by_messages = self.sends_messages(device)
        if device.type != "cuda":
            place: Place = Host()
        else:
            place = Device(device, by_host=by_messages and self.size > 1)
        if self.size == 1:
            return Alone(place)
        if not by_messages:
            return Native(group, place)
        inner = Gloo(group, place)
        return Staged(inner, place) if isinstance(place, Device) else inner

    # --- failures and ends -----------------------------------------------------------------------------------

    def _ended(self, trip: Trip, place: Place, error: BaseException | None) -> None:
        failure = None if error is None else self._fail(trip.name, error)
        with self._lock:
            self._under_way.discard(trip)
        trip.end(failure, place.mark())

    def _fail(self, name: str, cause: BaseException) -> ExchangeError:
        """Return the group's failure: an earlier one, or what is made of ``cause``."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            failure = self._failure = ExchangeError(
                f"rank {self.rank} of {self.size}: the exchange of {name} failed: {cause}; no later exchange on this "
                "process group can succeed, restart the job"
            )
            failure.__cause__ = cause
            doomed = [trip.journey for trip in self._under_way]
        for network in list(self._networks.values()):
            network.interrupt()
        for journey in doomed:
            if journey is not None:
                journey.throw(failure)
        return failure

    def close(self) -> None:
        """End the threads, after what is under way. Later journeys fail. May be called again."""
        self._leave_group()
        self._end()

    def _end(self) -> None:
        """The group, the interpreter, or who uses this exchange ends.

        A rank may leave while others still need what it has to send. A thread that gloo lets go while the interpreter
        is torn down would take the process with it, so the threads must be gone before.
        """
        if os.getpid() != self._pid:
            return
        if self._timeline is not None:
            self._timeline.flush()
        needed = any([trip.deferred for trip in list(self._under_way)])
        if not self._close_networks(_NEEDED_BY_OTHERS_S if needed else _END_S):
            self._fail("what was under way", RuntimeError("the process group was destroyed meanwhile"))
            self._close_networks(_END_S)
        with self._lock:  # what has arrived may still be used
            self._failure = self._failure or ExchangeError(_DESTROYED)

    def _close_networks(self, timeout_s: float) -> bool:
        return all([network.close(timeout_s) for network in list(self._networks.values())])


async def _after(begin: Begin, way: Way, link: Link) -> None:
    await begin()
    await way(link)
