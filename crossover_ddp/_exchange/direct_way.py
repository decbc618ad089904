"""Buckets as messages straight to their owners, for what cannot be added on its way: coded gradients on gloo.

[Note: straight to the owner] A ring adds what it passes on, so coded values would be decoded and coded again at each
stop. Here each rank sends one message to each owner, its right neighbour first, then the next one, so that no owner
gets all messages at once; a link carries as much as in a ring's reduce-scatter. What an owner makes of them goes around
the ring as ever: it is copied, not added. The reducer waits for messages; the gatherer adds, gathers and decodes.

[Note: deferred messages] Of a deferred bucket the stepper adds, so that the owner's part is known to all who ask for it
before its gather begins. The gatherer cannot do that: it may be waiting for this very bucket, which rank 0 has chosen.
"""

import functools
import time
from typing import cast

import torch
import torch.distributed as dist

from crossover_ddp._system.worker import Worker

from .collectives import HostBuffer, Ring, ring_tag
from .engine import Engine
from .gathers import GatherOrder
from .layout import Layout
from .transfer import Messages, Transfer
from .ways import arrive_half_way, gather_next


class DirectWay:
    """See the module.

    Args:
        ring: whose ranks exchange.
        order: of deferred gathers.
        reducer, gatherer: see [Note: two workers].
        stepper: see [Note: deferred messages].
    """

    def __init__(
        self, ring: Ring, order: GatherOrder, reducer: Worker, gatherer: Worker, stepper: Worker
    ) -> None:
        self._ring = ring
        self._order = order
        self._reducer = reducer
        self._gatherer = gatherer
        self._stepper = stepper

    def begin(self, engine: Engine, transfer: Transfer) -> None:
        """Launch a bucket whose messages are written. On the hook's thread."""
        messages = cast(Messages, transfer.messages)  # on gloo
        engine.end_compute(transfer)
        if transfer.deferred:
            self._order.scatter_begins(transfer)
        push = functools.partial(self._push, engine, transfer, messages)
        engine.put(self._reducer, transfer, "reduce-scatter", push)

    def _push(self, engine: Engine, transfer: Transfer, messages: Messages) -> None:
        """Exchange messages to owners. On the reducer."""
        begin_s = time.monotonic()
        sends = self._start(transfer, messages)
        sent = messages.outgoing.layout.numel, self._exact_bytes(transfer.tensor)
        engine.spans.half("reduce_scatter", begin_s, transfer, sent=sent)
        if transfer.last_turn is not None and not transfer.keeps_turn:
            transfer.last_turn.request()
        if transfer.deferred:
            transfer.gather = functools.partial(self._pull, engine, transfer, messages, sends)
            step = functools.partial(self._step_ahead, engine, transfer, messages)
            engine.put(self._stepper, transfer, "owner's step", step)
            # On the reducer: only its order is that of all ranks, also among buckets that are not deferred.
            following = functools.partial(gather_next, engine, self._order)
            engine.put(self._gatherer, transfer, "choice of the next gather", following)
        else:
            pull = functools.partial(self._step_and_pull, engine, transfer, messages, sends)
            engine.put(self._gatherer, transfer, "all-gather", pull)

    def _start(self, transfer: Transfer, messages: Messages) -> list[dist.Work]:
        """Send all messages, and wait for those to this rank; return the sends that are under way."""
        ring, group = self._ring, self._ring.group()
        if group is None:
            raise RuntimeError("the process group was destroyed while an exchange was under way")
        tag = functools.partial(ring_tag, ring.channel, transfer.sequence, gather=False)
        others = [(ring.rank + step) % ring.size for step in range(1, ring.size)]
        receives = [
            group.recv([messages.incoming.part(source)], source, tag(part=ring.rank))
            for source in reversed(others)
            if messages.incoming.layout.part(source).numel
        ]
        sends = [
            group.send([messages.outgoing.part(owner)], owner, tag(part=owner))
            for owner in others
            if messages.outgoing.layout.part(owner).numel
        ]
        for work in receives:
            work.wait()
        return sends

    def _step_ahead(self, engine: Engine, transfer: Transfer, messages: Messages) -> None:
        """Do the owner's step of a deferred bucket. On the stepper, see [Note: deferred messages]."""
        messages.step()
        part = transfer.layout.part(self._ring.rank)
        arrive_half_way(transfer, transfer.tensor[part.start : part.stop])
        self._order.scatter_ends(transfer)

    # On the gatherer.

    def _step_and_pull(
        self, engine: Engine, transfer: Transfer, messages: Messages, sends: list[dist.Work]
    ) -> None:
        begin_s = time.monotonic()
        messages.step()
        engine.end_kept_compute(transfer)
        if transfer.keeps_turn and transfer.last_turn is not None:
            transfer.last_turn.request()
        self._pull(engine, transfer, messages, sends, begin_s)

    def _pull(
        self,
        engine: Engine,
        transfer: Transfer,
        messages: Messages,
        sends: list[dist.Work],
        begin_s: float | None = None,
    ) -> None:
        """Gather and decode."""
        begin_s = time.monotonic() if begin_s is None else begin_s
        self._gather(transfer, *messages.gather)
        for work in sends:  # or the next step might write a message that is still being read
            work.wait()
        layout = messages.gather.layout
        pulled = layout.numel - layout.part((self._ring.rank + 1) % self._ring.size).numel
        back = transfer.payload.gather if transfer.payload is not None else None
        sent = pulled, self._exact_bytes(transfer.tensor if back is None else back.tensor)
        engine.spans.half("all_gather", begin_s, transfer, sent=sent)
        messages.unload()
        engine.complete(transfer)
        if transfer.deferred:
            self._order.gathered()

    def _exact_bytes(self, tensor: torch.Tensor) -> int:
        """Return what a rank sends of ``tensor`` in one half without a codec."""
        return tensor.nbytes * (self._ring.size - 1) // self._ring.size

    def _gather(self, transfer: Transfer, tensor: torch.Tensor, layout: Layout) -> None:
        gather = self._ring.all_gather(HostBuffer(tensor), layout, transfer.sequence)
        gather.start()
        gather.offer_all()
        gather.wait()
        gather.drain()
