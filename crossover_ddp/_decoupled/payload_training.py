"""Decoupled training whose buckets another wing's payloads carry: K-FAC.

[Note: K-FAC decoupled] Owners precondition as soon as a bucket is reduced, on a thread of their own. What the next
forward needs first is gathered first. But nothing may be applied before all ranks' messages have come: the KL clip
scales every direction by one number made of all layers. They are in the last bucket, so that is gathered before
whatever is left; then each bucket is applied when it comes. So the training is that of `kfac_hook`, to the last bit.
Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._engine.turns import Turn
from crossover_ddp._exchange.transfer import Payload

from .coded import Coding
from .payloads import Deferrable
from .round import parameters_of
from .training import DecoupledTraining


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

    def _urgency(self, bucket: dist.GradBucket, parameters: list[torch.Tensor]) -> int:
        # The last one before all others, see [Note: K-FAC decoupled].
        return -bucket.index() if bucket.is_last() else super()._urgency(bucket, parameters)

    def _payload_of(self, bucket: dist.GradBucket) -> Callable[[], Payload]:
        return functools.partial(self._payloads.payload, bucket)

    def _end_round(self) -> None:
        """Note which buckets need later ones than themselves."""
        round_ = self.updates.round
        last = round_.shares[-1].deferred.wait if round_.shares and not round_.is_broken else None
        needs, shares = self._payloads.end(last), {share.place: share for share in round_.shares}
        for place, share in shares.items():
            later = sorted(needs.get(place, ()), reverse=True)
            share.needs = [shares[each].deferred for each in later if each in shares]
        super()._end_round()
