"""The buckets of one backward pass, from the hook until ``step()`` or `flush` takes them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from crossover_ddp.errors import UnsupportedConfigurationError

from .shares import Share


class Round:
    """What backward has left, and whether DDP's buckets stay as they are from now on."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.is_open = False
        self.is_broken = False
        self.is_settled = False
        self.shape: tuple[object, ...] = ()
        self.number = 0
        self._last_index = -1

    @property
    def is_whole(self) -> bool:
        """Whether backward has ended, and nothing was refused."""
        return bool(self.shares) and not self.is_open and not self.is_broken

    @property
    def is_written(self) -> bool:
        """Whether somebody has written parameters since backward, whose gradients ``step()`` has not taken."""
        return self.is_whole and any([share.is_written for share in self.shares])

    def begins_with(self, bucket: dist.GradBucket) -> bool:
        """Note the next bucket; return whether a new backward begins with it."""
        # DDP goes through its buckets in order; the backward before may have ended at any of them.
        begins = not self.is_open or bucket.index() <= self._last_index
        self._last_index, self.is_open = bucket.index(), not bucket.is_last()
        return begins

    def begin(self) -> None:
        """Forget the backward before."""
        self.shares, self.is_broken = [], False

    def end(self, rebuilt_after: int) -> bool:
        """Note the end of backward; return whether the buckets are those of the one before.

        Args:
            rebuilt_after: the backward after which DDP rebuilds its buckets; gathers may wait for forward only then.
        """
        shape = tuple([(share.bucket.flat.numel(), *map(id, share.parameters)) for share in self.shares])
        for share in self.shares:
            share.note_parameters()
        self.number += 1
        same, self.shape = shape == self.shape, shape
        self.is_settled = same and self.number > rebuilt_after
        return same

    def collect(self, optimizers: Sequence[Optimizer], known: set[int]) -> None:
        """Collect the step's gradients; refuse what would not give the result of plain DDP.

        Args:
            optimizers: whose step it is.
            known: ids of the model's parameters.
        """
        if self.is_open or self.is_broken:
            raise UnsupportedConfigurationError(
                "expected a whole backward() before step() and clip_grad_norm_(), got one that ended with an "
                "exception; call them after the next backward()"
            )
        if not self.shares:
            return
        for share in self.shares:
            share.collect()
        strangers = [p for p in parameters_of(optimizers) if p.grad is not None and id(p) not in known]
        if strangers:
            raise UnsupportedConfigurationError(
                f"expected an optimizer of one DDP model, got gradients of {len(strangers)} other parameters in it; "
                "give them an optimizer of their own"
            )


def parameters_of(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return all parameters of ``optimizers``, past the guards of their groups."""
    return [p for each in optimizers for group in each.param_groups for p in list.__iter__(group["params"])]
