"""In which order deferred buckets are gathered.

[Note: order of gathers] On a ring every rank passes on what it receives, so all ranks must gather the same
bucket at the same time. Which one is best depends on the moment: during backward whatever is ready, if no
reduce-scatter wants the wire; afterwards what the next forward needs first. So rank 0 decides, and its word
travels around the ring ahead of the data: eight bytes a bucket. Nobody waits for a word unless rank 0 has
still one to say: there is one for every reduce-scatter that this rank has completed.

A gather waits for reduce-scatters of its own step only. Those of a later step may need it: where rank 0 has run
out of inputs (``Join``) it answers for steps whose forward the other ranks have not begun.
"""

import threading
from collections import Counter
from typing import Final

import torch
import torch.distributed as dist

from ._collectives import MAX_RING_RANKS, Ring, ring_tag
from ._journey import Journey
from ._step import Step

_LEADER: Final = 0


class GatherOrder:
    """The next bucket to gather: rank 0 of the ring chooses, the others are told.

    Args:
        ring: whose ranks gather.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._scattering: Counter[Step] = Counter()
        self._ready: dict[int, Journey] = {}
        self._abandoned = False
        self._under_way = 0
        self._sent: tuple[torch.Tensor, dist.Work] | None = None
        self._tag = ring_tag(ring.channel, 0, gather=True, part=MAX_RING_RANKS - 2)

    def scatter_begins(self, journey: Journey) -> None:
        """Note that a bucket waits for its reduce-scatter. Called on the hook's thread."""
        with self._changed:
            self._under_way += 1
            self._scattering[journey.step] += 1

    def scatter_ends(self, journey: Journey) -> None:
        """Note that the bucket may be gathered. Called on the reducer."""
        with self._changed:
            self._scattering[journey.step] -= 1
            if not self._scattering[journey.step]:
                del self._scattering[journey.step]
            self._ready[journey.sequence] = journey
            self._changed.notify_all()

    def gathered(self) -> None:
        """Note that a bucket is whole. Called on the gatherer."""
        with self._changed:
            self._under_way -= 1

    @property
    def busy(self) -> bool:
        """Whether buckets are under way that nobody here may wait for, but other ranks may."""
        with self._changed:
            return self._under_way > 0 and not self._abandoned

    def abandon(self) -> None:
        """End every wait: the exchange has failed or ends."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def next(self) -> Journey:
        """Return the bucket to gather now, the same on all ranks. Called on the gatherer, once per bucket."""
        if self._ring.rank == _LEADER:
            journey = self._choose()
            self._tell(journey.sequence)
            return journey
        told = torch.empty(1, dtype=torch.int64)
        self._ring.receive(told, self._tag).wait()
        sequence = int(told)
        self._tell(sequence)
        return self._await(sequence)

    def _choose(self) -> Journey:
        with self._changed:
            while not (due := self._due()):
                self._wait()
            best = min(due, key=lambda journey: (journey.urgency, -journey.sequence))
            return self._ready.pop(best.sequence)

    def _due(self) -> list[Journey]:
        """Return what may be gathered now: buckets of the oldest step that has any."""
        if not self._ready:
            return []
        oldest = self._ready[min(self._ready)].step
        if self._scattering[oldest]:
            return []
        return [journey for journey in self._ready.values() if journey.step is oldest]

    def _await(self, sequence: int) -> Journey:
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

    def _tell(self, sequence: int) -> None:
        if (self._ring.rank + 1) % self._ring.size == _LEADER:
            return
        if self._sent is not None:
            self._sent[1].wait()
        word = torch.tensor([sequence])
        self._sent = word, self._ring.send(word, self._tag)
