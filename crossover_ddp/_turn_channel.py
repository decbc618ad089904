"""How the lead rank's grants reach the job's other ranks: small gloo connections of the job's own.

Apart from the gradients' group: the messages need no place in the order of the job's collectives, and
their failure takes nothing else down. Point-to-point, so that one rank that has stopped listening
does not cut others off. Our design.

[Note: a backend without a group] ``dist.new_group`` needs every rank of the default group, or else names the group
after its ranks; made again after it was destroyed it has the same name, and a rank may find the addresses of the
group before in the store and wait there for ever. So the gloo backend is made directly, on a part of the
store that is new for each channel.
"""

import collections
import contextlib
import datetime
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from crossover_ddp._turns import Grant, decode, encode
from crossover_ddp.errors import TurnError

_TAG = 0x7C05
_UNHEARD_LIMIT = 64
_HEARD_TIMEOUT = datetime.timedelta(seconds=5)
_channel_count: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


class TurnChannel:
    """The job's ranks, for what turns need to be agreed on.

    Args:
        process_group: the job; None for the default group.
        message_numel: int64 numbers in one message.

    **Collective**: every rank of ``process_group`` constructs it, in the same order as other groups.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, message_numel: int) -> None:
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.rank = group.rank()
        self.size = group.size()
        self._numel = message_numel
        self._gloo: Any = None  # a ProcessGroupGloo, whose methods its stubs leave out
        self._sent: collections.deque[tuple[list[dist.Work], torch.Tensor]] = collections.deque()
        self._expected: tuple[dist.Work, torch.Tensor] | None = None
        if self.size > 1:
            # The same number on all ranks, since making a channel is collective.
            number = _channel_count[group] = _channel_count.get(group, 0) + 1
            store = dist.PrefixStore(f"crossover-turns-{number}", _get_process_group_store(group))
            self._gloo = dist.ProcessGroupGloo(store, self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank. Collective."""
        if self._gloo is None:
            return [value] * self.size
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([packed.numel()]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: packed.numel()] = packed
        everyone = self._all_gather(padded)
        return [
            pickle.loads(bytes(one[: int(size)].tolist())) for one, size in zip(everyone, sizes, strict=True)
        ]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._gloo.allgather([found], [tensor]).wait()
        return found

    def send(self, grant: Grant) -> None:
        """Lead rank: tell ``grant`` to all others; waits only for those that are many turns behind."""
        if len(self._sent) == _UNHEARD_LIMIT:
            self._let_go_of_oldest()
        message = torch.tensor(encode(grant, self._numel), dtype=torch.int64)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._sent.append(([self._gloo.send([message], peer, _TAG) for peer in peers], message))

    def _let_go_of_oldest(self) -> None:
        """Free a message that was taken long ago; gloo tells so only to whoever waits for it."""
        works, _ = self._sent.popleft()
        try:
            for work in works:
                work.wait(_HEARD_TIMEOUT)
        except RuntimeError as error:
            raise TurnError(
                f"expected every rank to take its turns, got {_UNHEARD_LIMIT} that some rank never took ({error})"
            ) from error

    def expect(self, lead: int) -> None:
        """Other ranks: be ready for the next grant, so that it need not wait for us."""
        if self._expected is None:
            message = torch.empty(self._numel, dtype=torch.int64)
            self._expected = self._gloo.recv([message], lead, _TAG), message

    def receive(self) -> Grant:
        """Other ranks: return the grant that `expect` waits for, within half an hour."""
        assert self._expected is not None
        work, message = self._expected
        work.wait()
        self._expected = None
        return decode(message.tolist())

    def close(self, *, hear_out: bool = False) -> None:
        """Drop the group. Not collective: whoever listens for more than was sent finds the connection closed.

        Args:
            hear_out: wait a little for ranks that have yet to take what was sent; closing would lose it.
        """
        gloo, self._gloo = self._gloo, None
        with contextlib.suppress(TurnError):
            while self._sent and hear_out:
                self._let_go_of_oldest()
        self._sent.clear()
        if gloo is not None and self._expected is not None:
            _break_off(gloo, (self.rank + 1) % self.size)
        self._expected = None


def _break_off(gloo: Any, peer: int) -> None:
    """End a `receive` that another thread sits in: a time-out closes all of a gloo context's connections."""
    with contextlib.suppress(RuntimeError):
        gloo.recv([torch.empty(1)], peer, _TAG + 1).wait(datetime.timedelta(milliseconds=1))
