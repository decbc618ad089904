"""How the ranks of a job agree on turns: through the key-value store that made their process group.

[Note: grants through the store]
Every job has such a store, and all its ranks reach it, whatever the backend of the gradients is and whatever the
host's name resolves to. The lead rank writes a grant without waiting, under one key for all. Each other rank
has a thread that asks for a grant as soon as the rank wants a turn; the store answers when it is there. So a grant
travels while the last bucket is still being gathered, and needs no place in the order of the job's collectives. The
first of the other ranks removes grants of long ago, or the lead rank if that one has left. Other stores than torch's
``TCPStore`` poll, or keep every key for ever. With these, rank 0 opens a ``TCPStore`` beside the group's store.

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
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from crossover_ddp._system.stores import innermost
from crossover_ddp.errors import TurnError

from .rules import Grant, Mode

UNKNOWN_TIMEOUT_S = 600.0  # the shorter one of torch's defaults (NCCL 10 minutes, gloo 30)
_PATIENCE_SHARE = 0.25
_KEPT = 1024  # grants; a rank that is so many turns behind has left, or will not catch up
_LOOK = 64  # turns between two looks of the lead rank at whether grants are removed
_END_TIMEOUT_S = 1.0
_ALL, _NOT_ALL = "all", "not all"
_END = Grant(0, ())
_MEETING = "crossover-turns-meeting"
_MEETING_LOOK_S = 0.01
_SERVER_KEY = "server"
_LOOPBACK = "127.0.0.1"
# Kept as long as the group's store, which goes with the group: other ranks may use the server after rank 0 has closed.
_servers: "weakref.WeakKeyDictionary[dist.Store, dist.TCPStore]" = weakref.WeakKeyDictionary()


def group_timeout_s(group: dist.ProcessGroup | None) -> float:
    """Return how long collectives wait: the shortest timeout of a group's backends, `UNKNOWN_TIMEOUT_S` without any.

    Torch has no public way to ask for it, so the options of the backends are read.
    """
    found: list[float] = []
    for device in getattr(group, "_device_types", ()):
        # A device type without a backend, or a group that is not torch's.
        with contextlib.suppress(AttributeError, RuntimeError):
            backend: Any = group._get_backend(device)  # type: ignore[union-attr]
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            found.append(backend.options._timeout.total_seconds())
    return min(found, default=UNKNOWN_TIMEOUT_S)


def patience_limit_s(group: dist.ProcessGroup | None) -> float:
    """Return how long a rank of the job may wait for siblings in one `acquire`: its peers wait in their collective.

    A quarter of the group's timeout; infinite for a job of one process.
    """
    return (
        math.inf if group is None or group.size() == 1 else _PATIENCE_SHARE * group_timeout_s(group)
    )


class TurnChannel:
    """Carry agreements and grants between the job's ranks.

    Args:
        group: the job; None for this process alone.
        timeout_s: how much later than the first rank the last one may come to an agreement.

    On failure: `TurnError`, on all ranks alike if the store works.

    **Collective**: every rank of ``group`` constructs it, and all call `gather` equally often.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.timeout_s = timeout_s
        self.lead = 0
        """The rank that sends grants; set before any is sent or received."""
        self._grant_timeout_s = group_timeout_s(group) / 2
        self._pid = os.getpid()
        self._gathered = self._sent = self._received = self._taken = 0
        self._asks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._grants: queue.SimpleQueue[Grant | None] = (
            queue.SimpleQueue()
        )  # None: no more will come
        self._ended = ""  # why
        self._listener: threading.Thread | None = None
        self._store = self._connect(group) if group is not None and self.size > 1 else None

    def _connect(self, group: dist.ProcessGroup) -> dist.Store:
        try:
            shared = _get_process_group_store(group)
            is_served = isinstance(innermost(shared), dist.TCPStore)
            own = shared.clone() if is_served else shared  # whose waiting blocks no other caller
            name = f"crossover-turns-{self._met(dist.PrefixStore(_MEETING, own))}"
            if not is_served:
                own = self._beside(dist.PrefixStore(name, own), shared)
            own.set_timeout(datetime.timedelta(seconds=self.timeout_s))
        except (RuntimeError, KeyError, OSError) as error:
            raise TurnError(
                f"expected a store that all ranks of the job reach, got {type(error).__name__}: {error}; "
                "turns need the store that init_process_group was given"
            ) from error
        return dist.PrefixStore(name, own)

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
                question = store.get(f"asks/{rank}") if store.check([f"asks/{rank}"]) else None
                if question is not None and question != asked.get(rank):
                    asked[rank] = question
                    store.set(question.decode(), own)
                if store.check([f"{own}/{rank}"]):
                    store.delete_key(f"{own}/{rank}")
                    missing.remove(rank)
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"ranks {sorted(missing)} did not come within {self.timeout_s:.0f} s"
                )
            time.sleep(_MEETING_LOOK_S if missing else 0.0)
        return own

    def _beside(self, life: dist.Store, shared: dist.Store) -> dist.Store:
        """Return a ``TCPStore`` beside another kind of store; see [Note: grants through the store]."""
        if self.rank == 0:
            if shared not in _servers:
                _servers[shared] = dist.TCPStore(
                    _LOOPBACK, 0, is_master=True, wait_for_workers=False
                )
            life.set(_SERVER_KEY, f"{socket.gethostname()} {_servers[shared].port}")
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
        """Lead rank: send ``grant`` to all, itself included, without waiting for them."""
        if self.size > 1:
            store, old = self._connected(), self._sent - _KEPT - _LOOK
            store.set(f"grant/{self._sent}", json.dumps(grant))
            # Seldom, since it waits for the store's answer: the rank that removes grants may have left.
            if not self._sent % _LOOK and old > 0 and store.check([f"grant/{old - 1}"]):
                for number in range(old - _LOOK, old):
                    store.delete_key(f"grant/{number}")
        self._sent += 1
        self._arrive(grant)

    def _arrive(self, grant: Grant) -> None:
        self._grants.put(grant)
        self._received += 1

    def listen(self, on_grant: Callable[[], None]) -> None:
        """Other ranks: begin to ask for grants, and call ``on_grant`` when one has arrived."""
        store = self._connected().clone()  # whose waiting blocks no other caller
        store.set_timeout(
            datetime.timedelta(seconds=2 * self._grant_timeout_s)
        )  # `receive` gives up before
        work = store, on_grant
        self._listener = threading.Thread(
            target=self._listen, args=work, name="crossover-turns", daemon=True
        )
        self._listener.start()

    def ask(self) -> None:
        """Other ranks: let the next grant come; once for each `receive` there, before it. Never blocks."""
        self._asks.put(True)

    @property
    def arrived(self) -> bool:
        """Whether a grant is there that `receive` has not returned."""
        return self._taken < self._received

    def receive(self) -> Grant:
        """Return the next grant; raises `TurnError` after half the process group's timeout."""
        try:
            grant = self._grants.get(timeout=self._grant_timeout_s)
        except queue.Empty:
            raise TurnError(
                f"expected the job's next turn from its lead rank within {self._grant_timeout_s:.0f} s, got none; "
                "it is stopped, or does not train"
            ) from None
        if grant is None:
            raise TurnError(self._ended)
        self._taken += 1
        return grant

    def interrupt(self, reason: str = "the channel of turns was closed") -> None:
        """End the `receive` of another thread, behind the grants that have arrived."""
        self._ended = self._ended or reason
        self._grants.put(None)

    def close(self, *, end_grants: bool = False) -> None:
        """Leave. Not collective; may be called again, and in a fork, where it does nothing.

        Args:
            end_grants: for the lead rank: send all others, behind the grants sent so far, that no more will come.
        """
        if os.getpid() != self._pid or self._store is None:
            return
        if end_grants:
            with contextlib.suppress(RuntimeError):
                self.send(_END)
        self.interrupt()
        self._asks.put(False)
        # It waits for nothing but a grant that the lead rank is about to send, or its last word.
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join(_END_TIMEOUT_S)
        self._store = None

    def _listen(self, store: dist.Store, on_grant: Callable[[], None]) -> None:
        """Ask for grants one after the other, so that they have arrived when they are needed."""
        try:
            while self._asks.get() and not self._ended:
                turn, after, mode, steps = json.loads(store.get(f"grant/{self._received}"))
                if turn == _END.turn:
                    return self.interrupt("the job's lead rank takes no more turns")
                self._arrive(
                    Grant(turn, tuple((job, last) for job, last in after), Mode(mode), steps)
                )
                on_grant()
                if self._received > _KEPT and self.rank == (
                    0 if self.lead else 1
                ):  # the first listener
                    store.delete_key(f"grant/{self._received - _KEPT - 1}")
        except (
            Exception
        ) as error:  # the store's process has ended, mostly with the job; `receive` raises it
            self.interrupt(
                f"the job's store failed ({type(error).__name__}: {error}); turns need it"
            )
