"""How the ranks of a job agree on turns: through the key-value store that made their process group.

[Note: grants through the store]
Every job has such a store, and all its ranks reach it, whatever the backend of the gradients is and whatever the
host's name resolves to. The lead rank writes a grant without waiting, under one key for each other rank. Each of these
has a thread that asks for the next grant before it exists; the store answers when it does. So a grant costs one
message to the store and one from it, while the last bucket is still being gathered; it needs no place in the
order of the job's collectives. Other stores than torch's ``TCPStore`` poll, or keep every key for ever. With
these, rank 0 opens a ``TCPStore`` beside the group's store.

[Note: one life of a store]
A store may outlive the group: after ``destroy_process_group``, or when torchrun starts ranks again, the next life finds
the keys of the one before. So rank 0 draws a number for each channel, which names the keys, and hands it to the rank
that asks for it under a number of *its* own. Whoever is answered knows that rank 0 is there; a question of an earlier
life is answered, too, and nobody reads that.

[Note: one verdict]
All ranks must know whether they agreed, or some would wait for turns that others do not take. So each round ends
with one ``compare_set`` of the store: a rank that has all answers, or has waited long enough, proposes a verdict, and
the first proposal counts for all. Our design.
"""

import collections
import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from crossover_ddp.errors import TurnError

from .group_timeout import group_timeout_s
from .rules import Grant, decode, encode

_LOOK_EVERY = 256  # turns
_UNREAD_LIMIT = 1024  # a rank that is so many turns behind has left, or will not catch up
_END_TIMEOUT_S = 1.0
_LISTENING = datetime.timedelta(days=20)  # `close` ends it, or the end of the store's connection
_ALL, _NOT_ALL = "all", "not all"
_END = "end"
_MEETING = "crossover-turns-meeting"
_MEETING_LOOK_S = 0.01
_SERVER_KEY = "server"
_LOOPBACK = "127.0.0.1"
# Kept as long as the group's store, which goes with the group: other ranks may use the server after rank 0 has closed.
_servers: "weakref.WeakKeyDictionary[dist.Store, dist.TCPStore]" = weakref.WeakKeyDictionary()


class TurnChannel:
    """Carry agreements and grants between the job's ranks.

    Args:
        process_group: the job; None for the default group.
        timeout_s: how much later than the first rank the last one may come to an agreement.

    On failure: `TurnError`, on all ranks alike if the store works.

    **Collective**: every rank of ``process_group`` constructs it, and all call `gather` equally often.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout_s
        self._grant_timeout_s = group_timeout_s(group) / 2
        self._pid = os.getpid()
        self._gathered = 0
        self._sent = 0
        self._listening = [rank for rank in range(self.size) if rank != self.rank]
        self._listener: _Listener | None = None
        self._store: dist.Store | None = None
        if self.size == 1:
            return
        try:
            shared = _get_process_group_store(group)
            is_served = isinstance(_innermost(shared), dist.TCPStore)
            own = shared.clone() if is_served else shared  # whose waiting blocks no other caller
            name = f"crossover-turns-{self._met(dist.PrefixStore(_MEETING, own))}"
            if not is_served:
                own = self._beside(dist.PrefixStore(name, own), shared)
            own.set_timeout(datetime.timedelta(seconds=timeout_s))
        except (RuntimeError, KeyError, OSError) as error:
            raise TurnError(
                f"expected a store that all ranks of the job reach, got {type(error).__name__}: {error}; "
                "turns need the store that init_process_group was given"
            ) from error
        self._store = dist.PrefixStore(name, own)

    def _met(self, store: dist.Store) -> str:
        """Return rank 0's number for this channel, the same on all ranks; see [Note: one life of a store]."""
        own = secrets.token_hex(8)
        if self.rank:
            store.set(f"asks/{self.rank}", own)
            store.wait([own], datetime.timedelta(seconds=self.timeout_s))
            number = store.get(own).decode()
            store.delete_key(own)
            store.set(f"{number}/{self.rank}", "heard")
            return number
        asked: dict[int, bytes] = {}
        missing = set(range(1, self.size))
        deadline_s = time.monotonic() + self.timeout_s
        while missing:
            for rank in sorted(missing):
                if store.check([f"asks/{rank}"]) and (question := store.get(f"asks/{rank}")) != asked.get(
                    rank
                ):
                    asked[rank] = question
                    store.set(question.decode(), own)
                if store.check([f"{own}/{rank}"]):
                    store.delete_key(f"{own}/{rank}")
                    missing.remove(rank)
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"ranks {sorted(missing)} did not come within {self.timeout_s:.0f} s")
            time.sleep(_MEETING_LOOK_S if missing else 0.0)
        return own

    def _beside(self, life: dist.Store, shared: dist.Store) -> dist.Store:
        """Return a ``TCPStore`` beside another kind of store; see [Note: grants through the store]."""
        if self.rank == 0:
            server = _servers.get(shared)
            if server is None:
                server = _servers[shared] = dist.TCPStore(
                    _LOOPBACK, 0, is_master=True, wait_for_workers=False
                )
            life.set(_SERVER_KEY, f"{socket.gethostname()} {server.port}")
        timeout = datetime.timedelta(seconds=self.timeout_s)
        life.wait([_SERVER_KEY], timeout)
        host, _, port = life.get(_SERVER_KEY).decode().partition(" ")
        address = _LOOPBACK if host == socket.gethostname() else host
        return dist.TCPStore(address, int(port), is_master=False, timeout=timeout)

    # --- agreeing --------------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by rank; JSON must be able to hold it. Collective.

        Raises `TurnError` on all ranks if one does not answer in time; see [Note: one verdict].
        """
        if self.size == 1:
            return [value]
        store = self._connected()
        number = self._gathered = self._gathered + 1
        keys = [f"gather/{number}/{rank}" for rank in range(self.size)]
        try:
            store.set(keys[self.rank], json.dumps(value))
            proposal = _ALL
            try:
                store.wait(keys, datetime.timedelta(seconds=self.timeout_s))
            except RuntimeError:
                proposal = _NOT_ALL
            verdict = store.compare_set(f"verdict/{number}", "", proposal).decode()
            answers = store.multi_get(keys) if verdict == _ALL else []
        except RuntimeError as error:
            raise TurnError(f"the job's store failed ({error}); turns need it") from error
        if not answers:
            raise TurnError(
                f"expected all {self.size} ranks to join within {self.timeout_s:.0f} s, got some that did not; "
                "make sure that all ranks register the same hook"
            )
        return [json.loads(answer) for answer in answers]

    def _connected(self) -> dist.Store:
        if self._store is None:
            raise TurnError("expected a channel that is open, got one that was closed")
        return self._store

    # --- grants ----------------------------------------------------------------------------------------------

    def send(self, grant: Grant) -> None:
        """Lead rank: send ``grant`` to all others without waiting for them."""
        self._send(self._connected(), " ".join(map(str, encode(grant))))

    def _send(self, store: Any, text: str) -> None:  # Any: torch's stubs lack multi_set
        if self._sent % _LOOK_EVERY == 0 and self._sent > _UNREAD_LIMIT:
            self._drop_ranks_behind(store)
        keys = [_grant_key(rank, self._sent) for rank in self._listening]
        if keys:
            store.multi_set(keys, [text] * len(keys))
        self._sent += 1

    def _drop_ranks_behind(self, store: Any) -> None:
        """Send no more to ranks that do not read what was sent, or the store would grow for ever."""
        for rank in list(self._listening):
            if store.check([_grant_key(rank, self._sent - _UNREAD_LIMIT)]):
                store.set(_grant_key(rank, self._sent), _END)
                self._listening.remove(rank)

    def listen(self, on_grant: Callable[[], None]) -> None:
        """Other ranks: begin to ask for grants, and call ``on_grant`` when one has arrived."""
        store = self._connected()
        listener = _Listener(store.clone(), self.rank, on_grant)
        self._listener = listener
        listener.start()

    @property
    def arrived(self) -> bool:
        """Whether a grant is there that `receive` has not returned."""
        return self._listener is not None and self._listener.arrived

    def receive(self) -> Grant:
        """Other ranks: return the next grant; raises `TurnError` after half the process group's timeout."""
        assert self._listener is not None
        return self._listener.take(self._grant_timeout_s)

    def interrupt(self) -> None:
        """End the `receive` of another thread."""
        if self._listener is not None:
            self._listener.end("the channel of turns was closed")

    def close(self, *, end_grants: bool = False) -> None:
        """Leave. Not collective; may be called again, and in a fork, where it does nothing.

        Args:
            end_grants: for the lead rank: send all others, behind the grants sent so far, that no more will come.
        """
        store, self._store = self._store, None
        listener, self._listener = self._listener, None
        if os.getpid() != self._pid or store is None:
            return
        if end_grants:
            with contextlib.suppress(RuntimeError):
                self._send(store, _END)
        if listener is not None:
            listener.stop(store)


class _Listener:
    """A thread that always asks for the next grant, so that the grant has arrived when it is needed."""

    def __init__(self, store: dist.Store, rank: int, on_grant: Callable[[], None]) -> None:
        store.set_timeout(_LISTENING)
        self._asking = store
        self._rank = rank
        self._on_grant = on_grant
        self._changed = threading.Condition()
        self._grants: collections.deque[Grant] = collections.deque()
        self._ended: str | None = None
        self._received = 0
        self._thread = threading.Thread(target=self._listen, name="crossover-turns", daemon=True)

    @property
    def arrived(self) -> bool:
        """Whether `take` would return a grant at once."""
        with self._changed:
            return bool(self._grants)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def take(self, timeout_s: float) -> Grant:
        """Return the next grant, within ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._grants and self._ended is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise TurnError(
                        f"expected the job's next turn from its lead rank within {timeout_s:.0f} s, got none; "
                        "it is stopped, or does not train"
                    )
            if not self._grants:
                raise TurnError(self._ended)
            return self._grants.popleft()

    def stop(self, telling: dist.Store) -> None:
        """End the thread; ``telling`` is a connection that the thread does not block."""
        self.end("the channel of turns was closed")
        with contextlib.suppress(RuntimeError):
            for number in (self._received, self._received + 1):  # one of them is what the thread waits for
                telling.set(_grant_key(self._rank, number), _END)
        if self._thread is not threading.current_thread():
            self._thread.join(_END_TIMEOUT_S)

    def end(self, reason: str) -> None:
        """End the wait of `take`; grants that have arrived can still be taken."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def _listen(self) -> None:
        try:
            while self._ended is None:
                self._receive_one()
        except Exception as error:  # the store's process has ended, mostly with the job; `take` raises it
            self.end(f"the job's store failed ({type(error).__name__}: {error}); turns need it")

    def _receive_one(self) -> None:
        key = _grant_key(self._rank, self._received)
        text = self._asking.get(key).decode()
        self._asking.delete_key(key)
        if text == _END:
            self.end("the job's lead rank takes no more turns, or this rank was too many turns behind")
            return
        with self._changed:
            self._received += 1
            self._grants.append(decode([*map(int, text.split())]))
            self._changed.notify_all()
        self._on_grant()


def _grant_key(rank: int, number: int) -> str:
    return f"grant/{rank}/{number}"


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
