"""The centre of elastic averaging, each owner its part, in float32.

[Note: elastic pull] With rate α a rank takes δ = α(x - c) off its parameters, and the centre gets the sum of all ranks'
δ: what one loses the other gains. The distance of the ranks' mean to the centre shrinks by 1 - α(n + 1) if n ranks
pull, so α must be less than 2 / (n + 1). After EASGD (arXiv 1412.6651, and its authors' mpiT).
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.trips import Trip

from .checks import all_finite
from .flat import FlatBlock, wide
from .means import Means


class CentreParts:
    """This rank's part of the centre of each block.

    Args:
        means: exchanges vectors among all owners.
        start: the vectors that the centre begins with, the same on all ranks; own parts are copied out of them.
        moving_rate: α.
    """

    def __init__(self, means: Means, start: Sequence[torch.Tensor], moving_rate: float) -> None:
        self._means = means
        self._rate = moving_rate
        self.parts = []
        for vector in start:
            own = means.own_span(vector)
            self.parts.append(vector[own.start : own.stop].clone())

    def begin_pull(self, place: int, values: torch.Tensor, pulling: int) -> Trip:
        """Begin to replace ``values`` on all ranks by the centre as it was, and to move the centre.

        Args:
            place: of the block.
            values: this rank's parameters, or zeros if it does not pull.
            pulling: number of ranks that do.

        **Collective** among the owners.
        """
        step = functools.partial(self._move, place, pulling)
        return self._means.begin(values, owner_step=step)

    def _move(self, place: int, pulling: int, mean: torch.Tensor) -> None:
        centre = self.parts[place]
        if not all_finite([mean]):
            mean.fill_(float("nan"))  # every rank sees it, and refuses it; the centre stays as it is
            return
        former = centre.clone()
        # Σ(x - c) over those that pull: the mean is over all ranks, with zeros for the others.
        moved = mean.mul(self._means.exchange.size).sub_(former, alpha=pulling)
        centre.add_(moved, alpha=self._rate)
        mean.copy_(former)


def pull_of(values: torch.Tensor, former: torch.Tensor, moving_rate: float) -> torch.Tensor:
    """Return -δ in the place of ``values``, for them to be added to the parameters."""
    return values.sub_(former).mul_(-moving_rate)


def whole(block: FlatBlock) -> Span:
    """Return the span of all of a block."""
    return Span(0, block.numel)


def packed(block: FlatBlock, device: torch.device | None = None) -> torch.Tensor:
    """Return a copy of a block in float32 (or wider), on ``device`` or its own."""
    values = torch.empty(block.numel, dtype=wide(block.dtype), device=device or block.device)
    block.pack(whole(block), values)
    return values


def gathered(
    means: Means, blocks: Sequence[FlatBlock], parts: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a vector of each block, of which each rank has its own part, by names. **Collective**."""
    found: dict[str, torch.Tensor] = {}
    for block, part in zip(blocks, parts, strict=True):
        like = torch.empty(block.numel, dtype=part.dtype, device=part.device)
        found.update(block.named(means.gather(like, part)))
    return found


def start_vectors(
    blocks: Sequence[FlatBlock], loaded: dict[str, Any] | None, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Return what the centre begins with: the parameters, or what a checkpoint says."""
    if loaded is None:
        return [packed(block, device) for block in blocks]
    return [block.unnamed(loaded["centre"], wide(block.dtype)).to(device or block.device) for block in blocks]


def check_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """Return a rule's own state, or say why it is none."""
    if set(state) != {"centre"}:
        raise ValueError(
            f"expected a state with the key 'centre', got keys {sorted(state)}; pass the state of an ElasticState"
        )
    return state
