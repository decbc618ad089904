"""The momentum of the matrices that this rank owns: in the optimizer, as torch keeps it, and nowhere else.

[Note: momentum and skipped steps] A backward pass computes the new momentum beside the old one. ``muon.step()`` makes
it the momentum by exchanging the two; a step that is skipped leaves the old one as it was. Their memory is that of
two matrices for each matrix owned, instead of one for each matrix of the model.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Muon

from crossover_ddp._exchange.muon_direction import momentum_in, put_momentum


class OwnedMomentum:
    """Keeps the momentum of owned matrices in ``muon.state``, and takes that of others out of it.

    Args:
        muon: the optimizer.
        matrices: all that have an owner, in the same order on all ranks.
        owners: rank of each.
        rank: this one.
    """

    def __init__(self, muon: Muon, matrices: Sequence[Tensor], owners: Sequence[int], rank: int) -> None:
        self._muon = muon
        self._matrices = matrices
        self._owners = owners
        self._rank = rank
        self._next: dict[int, Tensor] = {}
        self._is_whole = True
        self.drop_foreign()

    @property
    def is_whole(self) -> bool:
        """Whether ``muon.state`` holds, on this rank, the momentum of all matrices that have one."""
        return self._is_whole

    def now(self, index: int) -> Tensor:
        """Return an owned matrix's momentum; zeros before its first step."""
        kept = self.kept(index)
        if kept is None:
            return torch.zeros_like(self._matrices[index], memory_format=torch.preserve_format)
        return kept

    def next(self, index: int) -> Tensor:
        """Return where an owned matrix's new momentum is to be written."""
        if index not in self._next:
            like = self._matrices[index]
            self._next[index] = torch.empty_like(like, memory_format=torch.preserve_format)
        return self._next[index]

    def commit(self, indices: Iterable[int]) -> None:
        """Make the new momentum of these matrices, as far as they are owned, the momentum."""
        for index in indices:
            if self._owners[index] != self._rank:
                self._is_whole = False
                continue
            state = self._muon.state[self._matrices[index]]
            old = momentum_in(state)
            put_momentum(state, self._next.pop(index))
            if old is not None:
                self._next[index] = old
        self.drop_foreign()

    def drop_foreign(self) -> None:
        """Take the momentum of other ranks' matrices out of the optimizer."""
        for matrix, owner in zip(self._matrices, self._owners, strict=True):
            if owner != self._rank and self._muon.state.pop(matrix, None):
                self._is_whole = False

    def adopt(self) -> None:
        """Keep the owned part of what was loaded into the optimizer."""
        self._next.clear()
        self._is_whole = True
        self.drop_foreign()

    def kept(self, index: int) -> Tensor | None:
        """Return what the optimizer has of a matrix's momentum; None before its first step."""
        matrix = self._matrices[index]
        return momentum_in(self._muon.state[matrix]) if matrix in self._muon.state else None

    def complete(self, others: dict[int, Tensor]) -> None:
        """Put other ranks' momentum into the optimizer, until the next step."""
        for index, momentum in others.items():
            put_momentum(self._muon.state[self._matrices[index]], momentum)
        self._is_whole = True

    def memory_usage(self) -> dict[str, int]:
        """Return bytes: "momentum", and "next_momentum" beside it."""
        indices = [index for index, owner in enumerate(self._owners) if owner == self._rank]
        kept = [self.kept(index) for index in indices]
        return {
            "momentum": sum(each.nbytes for each in kept if each is not None),
            "next_momentum": sum(each.nbytes for each in self._next.values()),
        }
