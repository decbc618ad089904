"""Exchanges of flat vectors outside of a backward pass."""

from collections.abc import Callable, Sequence

import torch

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._exchange.step import GradientFuture
from crossover_ddp._exchange.transfer import Payload, Sharded

from .checks import check_finite
from .flat import FlatBlock

OwnPart = Callable[[torch.Tensor], None]


class Means:
    """Averages vectors in place over the ranks of one exchange.

    Args:
        exchange: of the model's process group.
        blocks: of the model.
    """

    def __init__(self, exchange: Exchange, blocks: Sequence[FlatBlock]) -> None:
        self.exchange = exchange
        self.blocks = blocks

    def layout(self, values: torch.Tensor) -> Layout:
        """Return who owns which part of a vector of this size and dtype."""
        return self.exchange.routes.equal_layout(values)

    def own_span(self, values: torch.Tensor) -> Span:
        """Return this rank's part of it."""
        return self.layout(values).part(self.exchange.rank)

    def begin(
        self,
        values: torch.Tensor,
        *,
        layout: Layout | None = None,
        owner_step: OwnPart | None = None,
        unload: Callable[[], None] | None = None,
    ) -> GradientFuture:
        """Begin to replace ``values`` by the mean over the ranks, or by what ``owner_step`` makes of that.

        Args:
            values: are in use until the Future completes.
            layout: who owns which part; None: equal parts.
            owner_step: changes the own part of the mean in place; on a thread of the engine.
            unload: called when all of it is there; on a thread of the engine.

        **Collective**.
        """

        def step(part: torch.Tensor) -> None:
            if owner_step is not None:
                owner_step(part)

        both_ways = Sharded(values, self.layout(values) if layout is None else layout)
        return self.exchange.average(Payload(both_ways, both_ways, step, unload or _nothing))

    def take_over(self, steps: int) -> None:
        """Replace all parameters and buffers by their mean over the ranks. **Collective**."""
        sent = []
        for block in self.blocks:
            values = torch.empty(block.numel, dtype=block.dtype, device=block.device)
            block.pack(Span(0, block.numel), values)
            sent.append((block, values, self.begin(values)))
        for block, values, future in sent:
            future.wait()
            check_finite(values, self.exchange.rank, steps, block.pieces(Span(0, block.numel)))
        for block, values, _ in sent:
            block.unpack(Span(0, block.numel), values)

    def gather(self, like: torch.Tensor, layout: Layout, fill: OwnPart) -> torch.Tensor:
        """Return a vector such as ``like`` whose parts ``fill`` writes on their owners. **Collective**."""
        whole = torch.zeros_like(like)
        self.begin(whole, layout=layout, owner_step=fill).wait()
        return whole


def _nothing() -> None:
    return None
