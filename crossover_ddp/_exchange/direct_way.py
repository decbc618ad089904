"""Buckets as messages straight to their owners, for what cannot be added on its way: coded gradients on gloo.

[Note: straight to the owner] A ring adds what it passes on, so coded values would be decoded and coded again at each
stop. Here each rank sends one message to each owner, its right neighbour first, then the next one, so that no owner
gets all messages at once; a link carries as much as in a ring's reduce-scatter. What an owner makes of them goes around
the ring as ever: it is copied, not added. The reducer waits for messages; the gatherer adds, gathers and decodes.
"""

import functools
import time

import torch
import torch.distributed as dist

from crossover_ddp._system.worker import Worker

from .collectives import HostBuffer, Ring, ring_tag
from .engine import Engine
from .layout import Layout
from .transfer import Messages, Transfer


class DirectWay:
    """See the module.

    Args:
        ring: whose ranks exchange.
        reducer, gatherer: see [Note: two workers].
    """

    def __init__(self, ring: Ring, reducer: Worker, gatherer: Worker) -> None:
        self._ring = ring
        self._reducer = reducer
        self._gatherer = gatherer

    def begin(self, engine: Engine, transfer: Transfer) -> None:
        """Launch a bucket whose messages are written. On the hook's thread."""
        assert transfer.messages is not None
        engine.end_compute(transfer)
        push = functools.partial(self._push, engine, transfer, transfer.messages)
        engine.put(self._reducer, transfer, "reduce-scatter", push)

    def _push(self, engine: Engine, transfer: Transfer, messages: Messages) -> None:
        """Exchange messages to owners. On the reducer."""
        begin_s = time.monotonic()
        sends = self._start(transfer, messages)
        engine.spans.half("reduce_scatter", begin_s, transfer)
        if transfer.last_turn is not None:
            transfer.last_turn.request()
        pull = functools.partial(self._pull, engine, transfer, messages, sends)
        engine.put(self._gatherer, transfer, "all-gather", pull)

    def _start(self, transfer: Transfer, messages: Messages) -> list[dist.Work]:
        """Send all messages, and wait for those to this rank; return the sends that are under way."""
        ring, group = self._ring, self._ring.group()
        if group is None:
            raise RuntimeError("the process group was destroyed while an exchange was under way")
        tag = functools.partial(ring_tag, ring.channel, transfer.sequence, gather=False)
        others = [(ring.rank + step) % ring.size for step in range(1, ring.size)]
        receives = [
            group.recv([messages.incoming[source]], source, tag(part=ring.rank))
            for source in reversed(others)
            if messages.incoming[source].numel()
        ]
        sends = [
            group.send([messages.outgoing[owner]], owner, tag(part=owner))
            for owner in others
            if messages.outgoing[owner].numel()
        ]
        for work in receives:
            work.wait()
        return sends

    def _pull(self, engine: Engine, transfer: Transfer, messages: Messages, sends: list[dist.Work]) -> None:
        """Do the owner's step, gather, decode. On the gatherer."""
        begin_s = time.monotonic()
        messages.step()
        self._gather(transfer, *messages.gather)
        for work in sends:  # or the next step might write a message that is still being read
            work.wait()
        engine.spans.half("all_gather", begin_s, transfer)
        messages.unload()
        engine.complete(transfer)

    def _gather(self, transfer: Transfer, tensor: torch.Tensor, layout: Layout) -> None:
        gather = self._ring.all_gather(HostBuffer(tensor), layout, transfer.sequence)
        gather.start()
        gather.offer_all()
        gather.wait()
        gather.drain()
