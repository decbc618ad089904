"""A bucket whose parameters have owners: the owner updates them, and everybody else receives them updated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from crossover_ddp._exchange.step import GradientFuture
from crossover_ddp._exchange.transfer import Sharded
from crossover_ddp.errors import UnsupportedConfigurationError

from .partial_optimizer import PartialOptimizer, Update
from .shares import Share

TOUCHED: Final = (
    "expected the gradients that backward() left, got gradients that were changed (by "
    "torch.nn.utils.clip_grad_norm_, GradScaler, p.grad.mul_): with owners='layers' they are zero, and only a "
    "parameter's owner has its mean; use state.clip_grad_norm_ to clip, and bfloat16 instead of a GradScaler"
)


@dataclass(eq=False, slots=True)
class OwnedShare(Share):
    """A bucket of one step; see `Share`.

    Args:
        pieces: of each parameter in the buffer that travels: of its mean gradient, then of its new values.
        owner_of: rank by the parameter's id.
        rank: this one.
    """

    pieces: Sequence[torch.Tensor] = field(default_factory=list)
    owner_of: Mapping[int, int] = field(default_factory=dict)
    rank: int = 0
    gathered: GradientFuture | None = None

    def travelling(self) -> Sharded:
        """Return what owners have filled, for the gather."""
        return Sharded(self.deferred.tensor, self.deferred.layout)

    def own_updates(self) -> list[Update]:
        """Wait for the mean, scale it, and return what this rank is to update.

        The mean goes where plain DDP would leave it: sums over matrices may depend on where these begin in memory.
        """
        own = self.deferred.own_part()
        if self.factor is not None:
            own.mul_(self.factor)
            self.factor = None
        mine = [(update, piece) for update, piece in self._updated() if self._is_own(update)]
        for update, piece in mine:
            update.gradient.data.copy_(piece)  # counts no version
        return [update for update, _ in mine]

    def fill_in(self) -> None:
        """Put the new values of owned parameters into what travels, and zeros where their gradients were."""
        for update, piece in self._updated():
            if self._is_own(update):
                piece.copy_(update.parameter)
                update.gradient.data.zero_()

    def others(self) -> list[torch.Tensor]:
        """Return the parameters that other ranks update in this step."""
        return [update.parameter for update in self.updates if not self._is_own(update)]

    def _updated(self) -> Iterator[tuple[Update, torch.Tensor]]:
        piece_of = {id(p): piece for p, piece in zip(self.parameters, self.pieces, strict=True)}
        for update in self.updates:
            yield update, piece_of[id(update.parameter)]

    def _is_own(self, update: Update) -> bool:
        return self.owner_of[id(update.parameter)] == self.rank

    # --- as of `Share` ---------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed; theirs are zeros, see `Share`."""
        try:
            Share.check_gradients(self)
        except UnsupportedConfigurationError:
            raise UnsupportedConfigurationError(TOUCHED) from None

    def wait(self) -> None:
        """Wait for the new values."""
        assert self.gathered is not None
        self.gathered.wait()

    def apply(self, partial: PartialOptimizer) -> None:
        """Take over what other ranks have updated."""
        taken = [(update.parameter, piece) for update, piece in self._updated() if not self._is_own(update)]
        if taken:
            torch._foreach_copy_([parameter for parameter, _ in taken], [piece for _, piece in taken])

    def land(self) -> None:
        """Leave gradients as they are: nobody but the owner has the mean."""

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the mean gradients that this rank owns."""
        self.deferred.own_part()
        for update, piece in self._updated():
            if self._is_own(update):
                yield piece
