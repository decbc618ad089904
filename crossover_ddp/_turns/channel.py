"""Carries turns between the ranks of a job, through the key-value store of their process group.

[Note: grants through the store]
Every job has such a store, and all its ranks can reach it, whatever backend exchanges the gradients
and whatever address the host's name resolves to. The lead rank writes a grant without waiting,
under one key for all ranks. Every other rank has a thread that asks for a grant as soon as the rank
wants a turn, and the store answers once the grant is there. So a grant travels while the last
bucket is still being gathered, and needs no place in the order of the job's collectives. The first
of the other ranks removes old grants. If that rank has left, the lead rank removes them. Stores
other than torch's ``TCPStore`` poll, or keep every key forever. If the group has such a store, rank
0 opens a ``TCPStore`` as well.

[Note: one life of a store]
A store may outlive the group: after ``destroy_process_group``, or when torchrun restarts ranks, the
next life finds the keys of the previous one. So rank 0 draws a random number for each channel, and
gives it to each rank that asks for it. The number is part of the channel's keys. A rank asks under
a random number of *its* own, so an answer proves that rank 0 is alive. Rank 0 may also answer a
question from an earlier life, but no rank reads that answer.

[Note: one verdict]
All ranks must know whether they agreed, or some would wait for turns that others do not take. So
each round ends with a ``compare_set`` on the store: a rank that has all answers, or has waited long
enough, proposes a verdict, and the first proposal counts for all ranks. Our design.
"""

import contextlib
import datetime
import json
import math
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any

import torch.distributed as dist

from crossover_ddp._system.stores import innermost
from crossover_ddp._system.torch_private import group_timeout_s, process_group_store
from crossover_ddp.errors import TurnError

from .rules import Grant, Mode

_PATIENCE_SHARE = 0.25
_KEPT = 1024  # grants; a rank that is this far behind has left, or will not catch up
_CHECK_EVERY = 64  # turns after which the lead rank checks that old grants were removed
_END_TIMEOUT_S = 1.0
_ALL, _NOT_ALL = "all", "not all"
_END = Grant(0, ())  # sent by the lead rank: no further grant will come
_MEETING = "crossover-turns-meeting"
_MEETING_INTERVAL_S = 0.01
_SERVER_KEY = "server"
_LOOPBACK = "127.0.0.1"
# A server is kept as long as the group's store, which is destroyed with the group: other ranks may
# use the server after rank 0 has closed its channel.
_servers: "weakref.WeakKeyDictionary[dist.Store, dist.TCPStore]" = weakref.WeakKeyDictionary()


def patience_limit_s(group: dist.ProcessGroup | None) -> float:
    """Return how many seconds a rank of the job may wait for siblings in one `acquire`.

    This is a quarter of the group's timeout, since the rank's peers wait for it in their next
    collective. For a job of one process it is infinite.
    """
    if group is None or group.size() == 1:
        return math.inf
    return _PATIENCE_SHARE * group_timeout_s(group)


class _Phase(IntEnum):
    """The phase of a channel. It only moves forward, and only `TurnChannel._enter` changes it."""

    OPEN = auto()
    """Entered by the constructor: ranks can agree, and grants travel."""
    ENDED = auto()
    """Entered by `TurnChannel.interrupt`: no further grant is received, for the reason given."""
    CLOSED = auto()
    """Entered by `TurnChannel.close`: the channel releases the store."""


class TurnChannel:
    """Carry agreements and grants between the job's ranks.

    Args:
        group: the job's process group. None for a job that consists of this process alone.
        timeout_s: how much later than the first rank the last rank may join an agreement.

    On failure: `TurnError`, on all ranks alike if the store works.

    **Collective**: every rank of ``group`` constructs a channel, and all ranks call `gather`
    equally often.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.timeout_s = timeout_s
        # The rank that sends grants. It is set before any grant is sent or received.
        self.lead = 0
        self._grant_timeout_s = group_timeout_s(group) / 2
        self._pid = os.getpid()
        self._phase = _Phase.OPEN
        # Why no further grant will come. It is set when `_phase` leaves OPEN.
        self._end_reason = ""
        # How many agreements this rank took part in, and how many grants were sent, arrived, and
        # were returned by `receive`.
        self._gathered = 0
        self._sent = 0
        self._arrived = 0
        self._received = 0
        # For the listener: True asks for a grant, False ends it.
        self._asks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Grants that have arrived, in order. None follows the last one.
        self._grants: queue.SimpleQueue[Grant | None] = queue.SimpleQueue()
        self._listener: threading.Thread | None = None
        # The store; None in a job of one rank, and once the channel is closed.
        self._store = self._connect(group) if group is not None and self.size > 1 else None

    def _connect(self, group: dist.ProcessGroup) -> dist.Store:
        try:
            shared = process_group_store(group)
            is_served = isinstance(innermost(shared), dist.TCPStore)
            # Use a clone, since a wait on a store blocks its other users.
            own = shared.clone() if is_served else shared
            name = f"crossover-turns-{self._meet(dist.PrefixStore(_MEETING, own))}"
            if not is_served:
                own = self._open_tcp_store(dist.PrefixStore(name, own), shared)
            own.set_timeout(datetime.timedelta(seconds=self.timeout_s))
        except (RuntimeError, KeyError, OSError) as error:
            raise TurnError(
                f"the ranks cannot meet in the job's store ({type(error).__name__}: {error}); "
                "turns need the store that init_process_group() was given"
            ) from error
        return dist.PrefixStore(name, own)

    def _meet(self, store: dist.Store) -> str:
        """Return the number that rank 0 draws for this channel; see [Note: one life of a store]."""
        own = secrets.token_hex(8)
        if self.rank:
            store.set(f"asks/{self.rank}", own)
            store.wait([own], datetime.timedelta(seconds=self.timeout_s))
            number = store.get(own).decode()
            store.delete_key(own)
            store.set(f"{number}/{self.rank}", "heard")
            return number
        answered: dict[int, bytes] = {}
        missing = set(range(1, self.size))
        deadline_s = time.monotonic() + self.timeout_s
        while missing:
            for rank in sorted(missing):
                question = store.get(f"asks/{rank}") if store.check([f"asks/{rank}"]) else None
                if question is not None and question != answered.get(rank):
                    answered[rank] = question
                    store.set(question.decode(), own)
                if store.check([f"{own}/{rank}"]):
                    store.delete_key(f"{own}/{rank}")
                    missing.remove(rank)
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"ranks {sorted(missing)} did not come within {self.timeout_s:.0f} s"
                )
            time.sleep(_MEETING_INTERVAL_S if missing else 0.0)
        return own

    def _open_tcp_store(self, life: dist.Store, shared: dist.Store) -> dist.Store:
        """Return a ``TCPStore`` to use in place of ``shared``, which is a store of another kind.

        See [Note: grants through the store].

        Args:
            life: ``shared``, with this channel's prefix for the keys.
            shared: the store of the process group.
        """
        if self.rank == 0:
            if shared not in _servers:
                server = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
                _servers[shared] = server
            life.set(_SERVER_KEY, f"{socket.gethostname()} {_servers[shared].port}")
        timeout = datetime.timedelta(seconds=self.timeout_s)
        life.wait([_SERVER_KEY], timeout)
        host, _, port = life.get(_SERVER_KEY).decode().partition(" ")
        address = _LOOPBACK if host == socket.gethostname() else host
        return dist.TCPStore(address, int(port), is_master=False, timeout=timeout)

    # --- agreeing -------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` in the order of ranks. Collective.

        Raises `TurnError` on all ranks if one does not answer in time; see [Note: one verdict].

        Args:
            value: anything that can be encoded as JSON.
        """
        if self.size == 1:
            return [value]
        store = self._connected()
        self._gathered += 1
        keys = [f"gather/{self._gathered}/{rank}" for rank in range(self.size)]
        try:
            store.set(keys[self.rank], json.dumps(value))
            proposal = _ALL
            try:
                store.wait(keys, datetime.timedelta(seconds=self.timeout_s))
            except RuntimeError:
                proposal = _NOT_ALL
            verdict = store.compare_set(f"verdict/{self._gathered}", "", proposal).decode()
            answers = store.multi_get(keys) if verdict == _ALL else []
        except RuntimeError as error:
            raise TurnError(f"the job's store failed ({error}); turns need it") from error
        if not answers:
            raise TurnError(
                f"not all {self.size} ranks joined within {self.timeout_s:.0f} s; make sure that "
                "all ranks register the same hook"
            )
        return [json.loads(answer) for answer in answers]

    def _connected(self) -> dist.Store:
        if self._store is None:
            raise TurnError("the channel of turns was closed")
        return self._store

    # --- grants ---------------------------------------------------------------------------------

    def send(self, grant: Grant) -> None:
        """Send ``grant`` to all ranks, including this one, without waiting. For the lead rank."""
        if self.size > 1:
            store = self._connected()
            store.set(f"grant/{self._sent}", json.dumps(grant))
            # The rank that removes grants may have left. Checking this means waiting for the
            # store's answer, so it is done rarely.
            old = self._sent - _KEPT - _CHECK_EVERY
            if not self._sent % _CHECK_EVERY and old > 0 and store.check([f"grant/{old - 1}"]):
                for number in range(old - _CHECK_EVERY, old):
                    store.delete_key(f"grant/{number}")
        self._sent += 1
        self._arrive(grant)

    def _arrive(self, grant: Grant) -> None:
        self._grants.put(grant)
        self._arrived += 1

    def listen(self, on_grant: Callable[[], None]) -> None:
        """Start the thread that asks for grants. For ranks other than the lead rank.

        Args:
            on_grant: called on that thread whenever a grant has arrived.
        """
        # A wait on a store blocks its other users, so the thread has a clone. The clone's timeout
        # is longer than that of `receive`, which therefore gives up first.
        store = self._connected().clone()
        store.set_timeout(datetime.timedelta(seconds=2 * self._grant_timeout_s))
        self._listener = threading.Thread(
            target=self._listen, args=(store, on_grant), name="crossover-turns", daemon=True
        )
        self._listener.start()

    def ask(self) -> None:
        """Ask for the next grant. Call this once before each `receive`. It never blocks.

        For ranks other than the lead rank.
        """
        self._asks.put(True)

    @property
    def arrived(self) -> bool:
        """Whether a grant has arrived that `receive` has not returned yet."""
        return self._received < self._arrived

    def receive(self) -> Grant:
        """Wait for the next grant and return it.

        Raises `TurnError` if none arrives within half of the process group's timeout, or if the
        channel has ended.
        """
        try:
            grant = self._grants.get(timeout=self._grant_timeout_s)
        except queue.Empty:
            raise TurnError(
                f"the job's lead rank drew no turn within {self._grant_timeout_s:.0f} s: it is "
                "stopped, or does not train"
            ) from None
        if grant is None:
            raise TurnError(self._end_reason)
        self._received += 1
        return grant

    # --- ending ---------------------------------------------------------------------------------

    def _enter(self, phase: _Phase, reason: str) -> None:
        """Move forward to a phase. The first reason is kept.

        This takes no lock, since a signal handler or Python's collector may run `interrupt`. So a
        late ENDED may replace CLOSED. Then a second `close` runs, which has no further effect.
        """
        if phase > self._phase:
            self._end_reason = self._end_reason or reason
            self._phase = phase

    def interrupt(self, reason: str = "the channel of turns was closed") -> None:
        """Make `receive` raise, on any thread, once it has returned the grants that have arrived.

        Args:
            reason: the message of the error.
        """
        self._enter(_Phase.ENDED, reason)
        self._grants.put(None)

    def close(self, *, end_grants: bool = False) -> None:
        """Close the channel. Not collective. It is safe to call this more than once.

        In a forked child it does nothing.

        Args:
            end_grants: also announce to all other ranks, after the grants sent so far, that no
                further grant will come. For the lead rank; default False.
        """
        if os.getpid() != self._pid or self._phase is _Phase.CLOSED:
            return
        if end_grants and self.size > 1:
            with contextlib.suppress(RuntimeError):
                self.send(_END)
        self.interrupt()
        self._enter(_Phase.CLOSED, self._end_reason)
        self._asks.put(False)
        # The listener may be waiting for a grant that the lead rank is about to send, or for the
        # end.
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join(_END_TIMEOUT_S)
        self._store = None

    def _listen(self, store: dist.Store, on_grant: Callable[[], None]) -> None:
        """Ask for grants one after the other, so that they have arrived when they are needed."""
        removes_grants = self.rank == (0 if self.lead else 1)  # the first rank that listens
        try:
            while self._asks.get() and self._phase is _Phase.OPEN:
                turn, after, mode, steps = json.loads(store.get(f"grant/{self._arrived}"))
                if turn == _END.turn:
                    return self.interrupt("the job's lead rank takes no more turns")
                turns_before = tuple((job, last) for job, last in after)
                self._arrive(Grant(turn, turns_before, Mode(mode), steps))
                on_grant()
                if removes_grants and self._arrived > _KEPT:
                    store.delete_key(f"grant/{self._arrived - _KEPT - 1}")
        except Exception as error:
            # Usually the job is ending, and the process that serves the store has ended already.
            # `receive` raises the error.
            problem = f"{type(error).__name__}: {error}"
            self.interrupt(f"the job's store failed ({problem}); turns need it")
