"""In which order deferred buckets are gathered.

[Note: order of gathers] On a ring every rank passes on what it receives, so all ranks must gather the same
bucket at the same time. Which one is best depends on the moment: during backward whatever is ready, if no
reduce-scatter wants the wire; afterwards what the next forward needs first. So rank 0 decides, and its choice
travels around the ring ahead of the data: one bucket at a time during backward; the whole rest of a step, in one
message, once its last bucket is reduced and nothing can come between. A rank waits for a choice only while rank 0 still
has one to send: rank 0 names each bucket once, and each rank calls ``next`` once for every reduce-scatter that it
has completed, or, with a codec, whose messages have come.

Where the owner has a step to take in between, the bucket may be gathered after that; the wire is free before.

A gather waits for reduce-scatters of its own step only. Those of a later step may need it: where rank 0 has run
out of inputs (``Join``) it answers for steps whose forward the other ranks have not begun.
"""

import threading
from collections import Counter, deque
from typing import Final

import torch
import torch.distributed as dist

from .collectives import MAX_RING_RANKS, Ring, ring_tag
from .step import Step
from .transfer import Transfer

_LEADER: Final = 0
_MESSAGE_NUMEL: Final = 256
_NOTHING: Final = -1


class GatherOrder:
    """The next bucket to gather: rank 0 of the ring chooses, and passes its choice on.

    Args:
        ring: whose ranks gather.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._scattering: Counter[Step] = Counter()
        self._ready: dict[int, Transfer] = {}
        self._chosen: deque[int] = deque()
        self._abandoned = False
        self._under_way = 0
        self._sent: tuple[torch.Tensor, dist.Work] | None = None
        self._tag = ring_tag(ring.channel, 0, gather=True, part=MAX_RING_RANKS - 2)

    def scatter_begins(self, transfer: Transfer) -> None:
        """Note that a bucket waits for its reduce-scatter. Called on the hook's thread."""
        with self._changed:
            self._under_way += 1
            self._scattering[transfer.step] += 1

    def scatter_ends(self, transfer: Transfer, *, ready: bool = True) -> None:
        """Note that the bucket wants the wire no more, and, if ``ready``, may be gathered. Called on the reducer."""
        with self._changed:
            if ready:
                self._ready[transfer.sequence] = transfer
            self._scattering[transfer.step] -= 1
            if not self._scattering[transfer.step]:
                del self._scattering[transfer.step]
            elif self._ring.rank == _LEADER:
                return  # nothing to choose yet: a thread that wakes up in vain costs more than all the rest here
            self._changed.notify_all()

    def step_ends(self, transfer: Transfer) -> None:
        """Note that the bucket may be gathered now: its owner's step is done. Called on the stepper."""
        with self._changed:
            self._ready[transfer.sequence] = transfer
            self._changed.notify_all()

    def gathered(self) -> None:
        """Note that a bucket is whole. Called on the gatherer."""
        with self._changed:
            self._under_way -= 1

    @property
    def busy(self) -> bool:
        """Whether buckets are under way; other ranks may wait for them even if this one does not."""
        with self._changed:
            return self._under_way > 0 and not self._abandoned

    def abandon(self) -> None:
        """End every wait: the exchange has failed or ends."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def next(self) -> Transfer:
        """Return the bucket to gather now, the same on all ranks. Called on the gatherer, once per bucket."""
        if not self._chosen:
            message = self._message(self._choose()) if self._ring.rank == _LEADER else self._receive()
            self._chosen.extend(sequence for sequence in message.tolist() if sequence != _NOTHING)
            self._pass_on(message)
        return self._await(self._chosen.popleft())

    def _choose(self) -> list[Transfer]:
        """Return what is gathered next, in this order."""
        with self._changed:
            while not (due := self._due()):
                self._wait()
        due.sort(key=lambda transfer: (transfer.urgency, -transfer.sequence))
        # The last bucket is reduced last: no reduce-scatter will want the wire before the rest of the step.
        return due if any(transfer.last for transfer in due) else due[:1]

    def _due(self) -> list[Transfer]:
        """Return what may be gathered now: buckets of the oldest step that has any."""
        if not self._ready:
            return []
        oldest = self._ready[min(self._ready)].step
        if self._scattering[oldest]:
            return []
        return [transfer for transfer in self._ready.values() if transfer.step is oldest]

    def _await(self, sequence: int) -> Transfer:
        with self._changed:
            while sequence not in self._ready:
                self._wait()
            return self._ready.pop(sequence)

    def _wait(self) -> None:
        if self._abandoned:
            raise RuntimeError("the exchange was ended")
        self._changed.wait()
        if self._abandoned:
            raise RuntimeError("the exchange was ended")

    def _message(self, transfers: list[Transfer]) -> torch.Tensor:
        sequences = [transfer.sequence for transfer in transfers[:_MESSAGE_NUMEL]]
        return torch.tensor(sequences + [_NOTHING] * (_MESSAGE_NUMEL - len(sequences)))

    def _receive(self) -> torch.Tensor:
        message = torch.empty(_MESSAGE_NUMEL, dtype=torch.int64)
        self._ring.receive(message, self._tag).wait()
        return message

    def _pass_on(self, message: torch.Tensor) -> None:
        if (self._ring.rank + 1) % self._ring.size == _LEADER:
            return
        if self._sent is not None:
            self._sent[1].wait()
        self._sent = message, self._ring.send(message, self._tag)
