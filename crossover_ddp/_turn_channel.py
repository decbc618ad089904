"""How the lead rank's grants reach the job's other ranks: a small gloo group of the job's own.

A group apart from the gradients' one: its messages need no place in the order of the job's collectives, and
its failure takes nothing else down. Point-to-point, so that one rank that has stopped listening
does not cut others off. Our design.
"""

import collections
import contextlib
import datetime
from typing import Any, cast

import torch
import torch.distributed as dist

from crossover_ddp._turns import Grant, decode, encode
from crossover_ddp.errors import TurnError

_TAG = 0x7C05
_UNHEARD_LIMIT = 64
_HEARD_TIMEOUT = datetime.timedelta(seconds=5)


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
        self._global_ranks = dist.get_process_group_ranks(group)
        self._group: dist.ProcessGroup | None = None
        self._sent: collections.deque[tuple[list[Any], torch.Tensor]] = collections.deque()
        self._expected: tuple[dist.Work, torch.Tensor] | None = None
        if self.size > 1:
            made = dist.new_group(self._global_ranks, backend="gloo", use_local_synchronization=True)
            self._group = cast(dist.ProcessGroup, made)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank. Collective."""
        values: list[Any] = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def send(self, grant: Grant) -> None:
        """Lead rank: tell ``grant`` to all others; waits only for those that are many turns behind."""
        if len(self._sent) == _UNHEARD_LIMIT:
            self._let_go_of_oldest()
        message = torch.tensor(encode(grant, self._numel), dtype=torch.int64)
        peers = [peer for rank, peer in enumerate(self._global_ranks) if rank != self.rank]
        works = [dist.isend(message, peer, group=self._group, tag=_TAG) for peer in peers]
        self._sent.append((works, message))

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
            work = dist.irecv(message, self._global_ranks[lead], group=self._group, tag=_TAG)
            assert work is not None
            self._expected = work, message

    def receive(self) -> Grant:
        """Other ranks: return the grant that `expect` waits for, within the group's timeout."""
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
        group, self._group = self._group, None
        with contextlib.suppress(TurnError):
            while self._sent and hear_out:
                self._let_go_of_oldest()
        self._sent.clear()
        self._expected = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
