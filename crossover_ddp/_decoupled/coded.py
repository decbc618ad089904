"""Decoupled training with a codec.

[Note: coded and deferred] What decoupled training gathers late are mean gradients, not parameters: each rank applies
them with its own optimizer. So the way back is coded as under any other hook: the owner encodes the mean with its
residual, and all ranks, the owner too, decode the same bytes. Replicas stay equal to the last bit, and no parameter is
ever rounded. A bucket's messages stay where they were, so no message of a step is written before the step before it is
decoded; forward sees to that anyway, since it waits for all of its parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from crossover_ddp._compression.compression import Compression, around, state_of
from crossover_ddp._compression.planning import CANDIDATES, AnyCodec, CodecPlan, plan_from
from crossover_ddp._engine.exchange import Around
from crossover_ddp._tuning.model import decoupled_step_s

from .planning import workload_of
from .step_times import StepTimes

__all__ = ["CANDIDATES", "AnyCodec", "CodecPlan", "Coding"]


class Coding:
    """What a codec does for the buckets of one model; without a codec nothing.

    Args:
        codec: for both halves, or a pair: to owners, from owners.
        loss_scale: what the loss is multiplied by.
        state: that the hook is registered with.
    """

    def __init__(self, codec: AnyCodec, loss_scale: float | Callable[[], float], state: object) -> None:
        self._codec = codec
        self.compression = None if codec is None else Compression(codec, loss_scale, state)

    def around(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Around | None:
        """Return what makes the link that ``bucket`` travels on; see `Exchange.carry`."""
        return around(self.compression, bucket, group)

    def drain(self) -> None:
        """Let the next step travel exact, residuals included."""
        if self.compression is not None:
            self.compression.drain()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, if there is a codec."""
        return {} if self.compression is None else {"codec": state_of(self.compression)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        if self.compression is not None and "codec" in state:
            self.compression.load(state["codec"]["residuals"], state["codec"]["loss_scale"])

    def plan(self, times: StepTimes, group: dist.ProcessGroup, candidates: Sequence[AnyCodec]) -> CodecPlan:
        """Choose a codec for steps like the recorded deferred ones. **Collective**."""
        return plan_from(
            workload_of(times), group, present=self._codec, candidates=candidates, predict=decoupled_step_s
        )

    def stats(self) -> dict[str, Any]:
        """Return what was sent, if there is a codec."""
        return {} if self.compression is None else {"codec": self.compression.stats()}
