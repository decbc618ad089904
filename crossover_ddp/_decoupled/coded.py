"""Decoupled training with a codec.

[Note: coded and deferred] What decoupled training gathers late are mean gradients, not parameters: each rank applies
them with its own optimizer. So the way back is coded as under any other hook: the owner encodes the mean with its
residual, and all ranks, the owner too, decode the same bytes. Replicas stay equal to the last bit, and no parameter is
ever rounded. A bucket's messages stay where they were, so no message of a step is written before the step before it is
decoded; forward sees to that anyway, since it waits for all of its parameters.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from crossover_ddp._compression.compression import Compression, state_of
from crossover_ddp._compression.planning import CANDIDATES, AnyCodec, CodecPlan, plan_from
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._exchange.step_times import StepTimes
from crossover_ddp._exchange.transfer import MakeMessages, Messages, Payload
from crossover_ddp._planning import decoupled_step_s
from crossover_ddp.errors import UnsupportedConfigurationError

from .planning import workload_of
from .shares import Share

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

    def messages(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> MakeMessages | None:
        """Return what makes the messages of ``bucket``; see `Exchange.submit`."""
        return None if self.compression is None else functools.partial(self._messages, bucket, group)

    def _messages(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, payload: Payload | None
    ) -> Messages | None:
        device = bucket.buffer().device
        if device.type != "cpu" and Exchange.of(group).sends_messages(device):
            raise UnsupportedConfigurationError(
                f"expected gradients on a device whose own backend exchanges them, got device={device} on gloo; "
                "make the process group with NCCL, or pass codec=None"
            )
        return None if self.compression is None else self.compression.messages(bucket, group, payload)

    def await_former(self, shares: Sequence[Share]) -> None:
        """Wait for a step that nobody takes, as where Join answers, see [Note: coded and deferred]."""
        if self.compression is not None:
            for share in shares:
                share.deferred.wait()

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
