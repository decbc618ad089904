"""Means of flat vectors, outside of a backward pass."""

import functools
from collections.abc import Callable, Sequence

import torch

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Layout, Link
from crossover_ddp._engine.trips import Trip

from .checks import check_finite
from .flat import FlatBlock

OwnPart = Callable[[torch.Tensor], None]


async def late_mean(
    values: torch.Tensor,
    layout: Layout,
    link: Link,
    *,
    owner_step: OwnPart | None = None,
    sent: torch.Tensor | None = None,
) -> None:
    """Replace ``values`` by the mean over the ranks, or by what owners make of that.

    Args:
        values: flat.
        layout: who owns which part.
        link: between the ranks.
        owner_step: changes the own part of the mean in place.
        sent: is taken off the result, see [Note: delta rule] in ``delayed.py``.
    """
    own = await link.reduce_scatter(values, layout)
    if owner_step is not None:
        await link.compute()
        owner_step(own)
    await link.all_gather(values, layout)
    if sent is not None:
        values.sub_(sent)


class Means:
    """Averages vectors in place over the ranks of one exchange.

    Args:
        exchange: of the model's process group.
        blocks: of the model.
    """

    def __init__(self, exchange: Exchange, blocks: Sequence[FlatBlock]) -> None:
        self.exchange = exchange
        self.blocks = blocks

    def own_span(self, values: torch.Tensor) -> Span:
        """Return this rank's part of a vector of this size, dtype and device."""
        layout = self.exchange.equal_layout(values)
        start = sum(layout[: self.exchange.rank])
        return Span(start, start + layout[self.exchange.rank])

    def begin(
        self, values: torch.Tensor, *, owner_step: OwnPart | None = None, sent: torch.Tensor | None = None
    ) -> Trip:
        """Begin `late_mean` of vectors that are in use until it ends; with ``sent`` others may need it longer.

        **Collective**.
        """
        way = functools.partial(
            late_mean, values, self.exchange.equal_layout(values), owner_step=owner_step, sent=sent
        )
        return self.exchange.begin(way, values.device, "parameters", deferred=sent is not None)

    def take_over(self, steps: int) -> None:
        """Replace all parameters and buffers by their mean over the ranks. **Collective**."""
        sent = []
        for block in self.blocks:
            values = torch.empty(block.numel, dtype=block.dtype, device=block.device)
            block.pack(Span(0, block.numel), values)
            sent.append((block, values, self.begin(values)))
        for block, values, trip in sent:
            trip.wait()
            check_finite(values, self.exchange.rank, steps, block.pieces(Span(0, block.numel)))
        for block, values, _ in sent:
            block.unpack(Span(0, block.numel), values)

    def gather(self, like: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return a vector whose parts are what their owners give.

        Args:
            like: on this device, and cut like a vector of this dtype.
            own: this rank's part of it; may be shorter, and is filled up with zeros.

        **Collective**.
        """
        whole = torch.zeros(like.numel(), dtype=own.dtype, device=like.device)
        start = self.own_span(like).start
        whole[start : start + own.numel()] = own
        layout = self.exchange.equal_layout(like)
        self.exchange.begin(
            lambda link: link.all_gather(whole, layout), like.device, "what owners keep"
        ).wait()
        return whole
