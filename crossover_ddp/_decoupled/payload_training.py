"""Decoupled training whose buckets another wing's payloads carry: K-FAC.

[Note: K-FAC decoupled] Owners precondition as soon as a bucket is reduced, on a thread of their own. What the next
forward needs first is gathered first. But nothing may be applied before all ranks' messages have come: the KL clip
scales every direction by one number made of all layers. They are in the last bucket, so that is gathered before
whatever is left; then each bucket is applied when it comes. So the training is that of `kfac_hook`, to the last bit.
Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.turns import Turn
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.transfer import Deferred

from .coded import Coding
from .payloads import Deferrable
from .round import parameters_of
from .shares import Share, views_of
from .training import DecoupledTraining, copies_gradients


class Late:
    """A bucket of the old engine, as one of the new."""

    def __init__(self, deferred: Deferred, future: torch.futures.Future[torch.Tensor]) -> None:
        self.future, self.buffers, self.flat = future, deferred.buffers, deferred.bucket
        self.wait_for_sum, self._deferred = deferred.own_part, deferred

    def wait(self, *, on_host: bool = False) -> None:
        """Wait until what the payload is to bring is here."""
        self._deferred.wait()
        if on_host:
            self._deferred.wait_on_host()

    def drop(self) -> None:
        """Wait for it; nobody else does."""
        self._deferred.wait()


class PayloadTraining(DecoupledTraining):
    """One model and one optimizer, and what makes the payloads; see `DecoupledTraining`.

    Args:
        optimizers: the user's.
        turn: taken before forward, if there is one.
        coding: of no codec.
        kfac: the state whose payloads travel.
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
        self._payloads = kfac.defer(state, self.flush)
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
        round_ = self.updates.round
        # Of a step that nobody takes: its memory is lent to the next one.
        for former in round_.shares if round_.is_whole else ():
            former.await_mean()
        has_ended = self._closed
        try:
            return super()._take(state, process_group, bucket)
        except Exception:
            has_ended = True
            raise
        finally:
            if has_ended and isinstance(bucket, dist.GradBucket) and bucket.is_last():
                self._payloads.end()

    def _defer(
        self,
        bucket: dist.GradBucket,
        parameters: list[torch.Tensor],
        process_group: dist.ProcessGroup,
        state: object,
    ) -> Share:
        # The last one comes back before all others, see [Note: K-FAC decoupled].
        payload = functools.partial(self._payloads.payload, bucket)
        future, late = Exchange.of(process_group).defer(
            bucket, turn=self._turn, urgency=-bucket.index(), payload=payload, state=state
        )
        taken = cast(Bucket, Late(late, future))
        views = views_of(taken.flat, parameters) if copies_gradients(self.model()) else None
        return Share(taken, parameters, bucket.buffer(), len(self.updates.round.shares), views)

    def _average(
        self,
        bucket: dist.GradBucket,
        process_group: dist.ProcessGroup,
        state: object,
        turn: Turn | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        payload = functools.partial(self._payloads.payload, bucket)
        return Exchange.of(process_group).submit(bucket, turn=turn, payload=payload, state=state)

    def _end_round(self) -> None:
        """Note which buckets need later ones than themselves."""
        round_ = self.updates.round
        last = round_.shares[-1].bucket.wait if round_.shares and not round_.is_broken else None
        needs, shares = self._payloads.end(last), {share.place: share for share in round_.shares}
        for place, share in shares.items():
            later = sorted(needs.get(place, ()), reverse=True)
            share.needs = [shares[each].bucket for each in later if each in shares]
        super()._end_round()
