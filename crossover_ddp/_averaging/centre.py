"""The centre of elastic averaging, each owner its part, in float32.

[Note: elastic pull] With rate α a rank takes δ = α(x - c) off its parameters, and the centre gets the sum of all ranks'
δ: what one loses the other gains. The distance of the ranks' mean to the centre shrinks by 1 - α(n + 1) if n ranks
pull, so α must be less than 2 / (n + 1). After EASGD (arXiv 1412.6651, and its authors' mpiT).
"""

from collections.abc import Sequence
from typing import Final

import torch

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.gloo import tree_sum
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Layout, Link, parts

from .replica import all_finite, gather

MOVING: Final = 0.9
"""β of EASGD: by default the ranks' rates add up to it."""


def moving_rate_for(ranks: int, given: float | None) -> float:
    """Return α; refuse one with which the centre and the ranks' mean swing ever more widely."""
    rate = MOVING / ranks if given is None else given
    if not 0 < rate < 2 / (ranks + 1):
        raise ValueError(
            f"expected 0 < moving_rate < 2 / (ranks + 1) = {2 / (ranks + 1):.4g}, got moving_rate={rate}: beyond it "
            "the distance of mean and centre grows in every round; leave it out for 0.9 / ranks"
        )
    return rate


async def pull(
    values: torch.Tensor,
    layout: Layout,
    link: Link,
    centre: torch.Tensor,
    rate: float,
    pulls: Sequence[bool],
) -> None:
    """Replace ``values`` by what pulls them towards the centre, and pull the centre; see [Note: elastic pull].

    A rank that does not pull sends its part of the centre alone.

    Args:
        values: of this rank; nothing if it does not pull.
        layout: who owns which part of the centre.
        link: between the owners.
        centre: this rank's part of it.
        rate: α.
        pulls: by rank.
    """
    is_pulling = pulls[link.rank]
    coming = [len(centre) * each for each in pulls]
    incoming = centre.new_empty(sum(coming))
    await link.all_to_all(values, layout if is_pulling else [0] * link.size, incoming, coming)
    if is_pulling:  # some links have written there
        parts(incoming, coming)[link.rank].copy_(parts(values, layout)[link.rank])
    await link.compute()
    former = _move(centre, incoming.view(sum(pulls), len(centre)), rate)
    del incoming  # before there is memory for the whole centre
    whole = centre.new_empty(sum(layout))
    parts(whole, layout)[link.rank].copy_(former)
    await link.all_gather(whole, layout)
    if is_pulling:
        values.sub_(whole).mul_(-rate)


def _move(centre: torch.Tensor, addends: torch.Tensor, rate: float) -> torch.Tensor:
    """Pull the centre, and return it as it was; NaN if values are not finite, for every rank to refuse them."""
    former, total = centre.clone(), addends[0]
    if len(addends) > 1:
        tree_sum(addends.unbind(), total)
    if not all_finite([total]):
        return former.fill_(torch.nan)  # the centre stays as it is
    centre.add_(total.sub_(former, alpha=len(addends)), alpha=rate)
    return former


class Centre:
    """The centre of each block in float32 (or wider), of which this rank has its part.

    Args:
        exchange: among the owners.
        start: the vectors that the centre begins with, the same on all ranks; own parts are copied out of them.
        rate: α.
    """

    def __init__(self, exchange: Exchange, start: Sequence[torch.Tensor], rate: float) -> None:
        self._exchange, self._rate = exchange, rate
        self._layouts = [exchange.equal_layout(vector) for vector in start]
        self._parts = [
            parts(vector, layout)[exchange.rank].clone()
            for vector, layout in zip(start, self._layouts, strict=True)
        ]

    def begin_pull(self, place: int, values: torch.Tensor, pulls: Sequence[bool]) -> Trip:
        """Begin `pull` of the block in this place. **Collective** among the owners."""
        layout, centre = self._layouts[place], self._parts[place]
        return self._exchange.begin(
            lambda link: pull(values, layout, link, centre, self._rate, pulls), centre.device, "parameters"
        )

    def gathered(self) -> list[torch.Tensor]:
        """Return the whole centre, block by block. **Collective** among the owners."""
        found = []
        for part, layout in zip(self._parts, self._layouts, strict=True):
            whole = part.new_zeros(sum(layout))
            parts(whole, layout)[self._exchange.rank].copy_(part)
            found.append(gather(self._exchange, whole, layout))
        return found
