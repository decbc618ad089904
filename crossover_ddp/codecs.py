"""Gradient compression: codecs for any state, and a hook that only compresses, `compressed_hook`.

Each rank sends its coded gradient straight to the owner of each part. The owner adds the decoded
values in float32, in rank order. It encodes the mean and sends it to all ranks. So values are
rounded twice, whatever the number of ranks. The part that a message does not hold is added to the
next gradient of the same parameter ("error feedback"). Gradients of one-dimensional parameters
travel without a codec. Our design; each codec names its paper. `PowerSGD` has no such messages:
ranks average two factors of each matrix.

The module begins with `compressed`, the coroutine that carries one bucket. The state,
`CompressedState`, and the hook follow.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._compression.codec import (
    Codec,
    Half,
    Int4,
    Int8,
    PerPair,
    SIDCo,
    Threshold,
)
from crossover_ddp._compression.compression import CodedState
from crossover_ddp._compression.lossless import Lossless
from crossover_ddp._compression.low_rank import PowerSGD
from crossover_ddp._compression.planning import AnyCodec, CodecPlan
from crossover_ddp._engine.buckets import Bucket, JourneyTurn
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.journeys import GradientFuture
from crossover_ddp._engine.links import Link

from .gpu_mutex import GPUMutex

__all__ = [
    "Codec",
    "CodecPlan",
    "CompressedState",
    "Half",
    "Int4",
    "Int8",
    "Lossless",
    "PerPair",
    "PowerSGD",
    "SIDCo",
    "Threshold",
    "compressed_hook",
]

logger = logging.getLogger(__name__)


async def compressed(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    """Average a bucket's gradients over the ranks in backward, by coded messages, see `ResidualLink`.

    Each rank keeps residuals, of its own gradients and of the mean of the shard that it owns. They
    take up the part that a message does not hold. DDP waits for all buckets before ``backward()``
    returns. On NCCL a stream waits, and the host waits only for a turn.

    If a peer dies or the timeout passes, the ``await`` under way raises. That ends all exchange of
    the process group, and ``backward()`` raises the error.
    """
    turn.release()  # this step's compute is launched: a sibling may have the device
    await bucket.computed()
    # To the owners, which average the gradients, and back to all ranks. Two ranks with one codec
    # send their gradients to each other in one hop.
    await link.all_reduce(bucket.flat, bucket.layout, halfway=turn.request)
    await turn.acquire()  # before DDP's Future completes: the optimizer follows


class CompressedState(CodedState):
    """State of `compressed_hook`: both halves of the exchange carry coded gradients.

    The rest of a gradient, which a message does not hold, is sent in later steps. The gradients
    differ from plain DDP's, but are the same on all ranks to the last bit. A single rank keeps its
    own gradients. The first step is not compressed, because DDP rebuilds its buckets after it.

    Args:
        codec: a codec for both halves, such as ``Int8()``, or a pair of codecs. A pair encodes
            messages to owners with its first codec, which may be a `PerPair`, and messages to all
            ranks with its second. `PowerSGD` is used alone. Your own codecs must implement `Codec`.
            With None nothing is compressed, and the mean is that of
            `reduce_scatter_all_gather_hook` to the last bit.
        loss_scale: the factor by which the loss is multiplied before ``backward()``, or a function
            that returns it, such as ``scaler.get_scale``. Residuals are rescaled when it changes.
            Default 1.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        mutex: the mutex for taking turns with sibling jobs. The turn is released when the last
            bucket has been encoded. Default: no turns.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    On failure: the constructor raises ``TypeError`` for an object that is not a codec. The first
    ``backward()`` raises ``UnsupportedConfigurationError`` for float64 gradients, or if a `PerPair`
    was made for another number of ranks. ``backward()`` raises ``ExchangeError`` when a peer dies.
    If a gradient contains Inf or NaN, part of the bucket becomes NaN on all ranks, so
    that GradScaler finds it; residuals stay finite.

    **Collective**: all ranks create the state with the same arguments and register the hook, and
    all call `drain` before the same step. If ``CROSSOVER_DISABLE=1`` is set before that, the hook
    is a plain all-reduce.

    Example::

        model.register_comm_hook(CompressedState(codec=Int8()), compressed_hook)
    """

    def __init__(
        self,
        codec: AnyCodec,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
    ) -> None:
        super().__init__(codec, loss_scale, process_group, compare_replicas, model)
        self.mutex = mutex
        logger.info("%r", self)

    def __repr__(self) -> str:
        return f"CompressedState(codec={self.codec!r})"


def compressed_hook(
    state: CompressedState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks, and compress it on the way to the owners and back.

    Args:
        state: the model's state; create one per model, on all ranks, see `CompressedState`.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that holds the bucket's own buffer. On gloo one of the package's threads completes
        it. On NCCL it is complete at once.

    On failure: like `reduce_scatter_all_gather_hook`; see also `CompressedState`. The hook itself
    raises nothing. **Collective**: DDP calls it on all ranks in the same order. Source: our design;
    see the module's docstring.
    """

    def start(exchange: Exchange) -> GradientFuture:
        return state._send(bucket, exchange, compressed, turn=state.mutex)

    remedy = "pass codec= to that state instead, and register its own hook"
    return run_hook(state, bucket, CompressedState, remedy, start)
