"""Decoupled training whose buckets are K-FAC's.

[Note: K-FAC decoupled] Owners precondition as soon as a bucket is reduced. What forward needs first is gathered first.
But nothing may be applied before the KL clip is known, which scales every direction by one number made of all layers:
each bucket's journey waits for it. So the training is that of `kfac_hook`, to the last bit. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.turns import Turn

from .coded import Coding
from .deferrable import Deferrable
from .round import parameters_of
from .shares import Share, views_of
from .training import DecoupledTraining, copies_gradients


class PreconditionedTraining(DecoupledTraining):
    """One model and one optimizer, and what preconditions the gradients; see `DecoupledTraining`.

    Args:
        optimizers: the user's.
        turn: taken before forward, if there is one.
        coding: of no codec.
        kfac: the state that preconditions.
        state: that the model's hook is registered with.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        turn: Turn | None,
        coding: Coding,
        kfac: Deferrable,
        state: object,
    ) -> None:
        kfac.defer(state, self.flush)
        self._kfac = kfac
        super().__init__(optimizers, turn, coding, always=True)

    def clip(
        self, group: dist.ProcessGroup, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip whole gradients: no rank has its own part of them before the KL clip is known."""
        self.updates.round.collect(self.optimizers, self._known)
        self.updates.make_round_whole()
        return nn.utils.clip_grad_norm_(
            parameters_of(self.optimizers), max_norm, norm_type, error_if_nonfinite
        )

    def _take(
        self, state: object, process_group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        self._kfac.enter(bucket)  # before anybody waits for the backward pass before
        return super()._take(state, process_group, bucket)

    def _checked_parameters(self, bucket: dist.GradBucket, state: object) -> list[torch.Tensor]:
        try:
            return super()._checked_parameters(bucket, state)
        except Exception:
            self._kfac.refuse(bucket)
            raise

    def _defer(
        self,
        bucket: dist.GradBucket,
        parameters: list[torch.Tensor],
        process_group: dist.ProcessGroup,
        state: object,
    ) -> Share:
        taken = self._kfac.exchange(process_group, bucket, state=state, turn=self._turn, hands_back=True)
        views = views_of(taken.flat, parameters) if copies_gradients(self.model()) else None
        return Share(taken, parameters, bucket.buffer(), len(self.updates.round.shares), views)

    def _average(
        self,
        bucket: dist.GradBucket,
        process_group: dist.ProcessGroup,
        state: object,
        turn: Turn | None = None,
        *,
        late: bool = False,
    ) -> Bucket:
        return self._kfac.exchange(process_group, bucket, state=state, turn=turn)
