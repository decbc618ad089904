"""Compression of gradients: codecs for any state, and `compressed_hook` for nothing else.

Each rank sends its coded gradient straight to the owner of each part. The owner adds the decoded
values in float32, in the order of ranks, encodes the mean and sends it to all. So values are
rounded twice, whatever the number of ranks. The part that a message does not hold is added to the
next gradient of the same parameter ("error feedback"). Parameters of one dimension travel exact.
Our design; codecs name their papers.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from crossover_ddp._compression.codec import (
    Codec,
    CodecChoice,
    Half,
    Int8,
    PerPair,
    SIDCo,
    Threshold,
)
from crossover_ddp._compression.compression import CodedState
from crossover_ddp._compression.planning import CodecPlan
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
    "Int8",
    "PerPair",
    "SIDCo",
    "Threshold",
    "compressed_hook",
]

logger = logging.getLogger(__name__)


class CompressedState(CodedState):
    """State of `compressed_hook`: gradients travel coded in both halves, the rest is sent later.

    The gradients differ from plain DDP's, but are the same on all ranks to the last bit. A single
    rank keeps its own gradients. The first step, after which DDP rebuilds its buckets, travels
    exact.

    Args:
        codec: for both halves, such as ``Int8()``. A pair encodes messages to owners with its
            first codec, which may be a `PerPair`, and messages to all with its second. None: no
            compression, the mean of `reduce_scatter_all_gather_hook` to the last bit. An object
            of your own is a `Codec`.
        loss_scale: the factor by which the loss is multiplied before ``backward()``, or a function
            that returns it, such as ``scaler.get_scale``. Residuals follow its changes. Default 1.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the
            default group.
        mutex: take turns with sibling jobs; the turn is released when the last bucket is encoded.
            Default: no turns.
        compare_replicas: raise ``ReplicasDifferError`` if parameters differ after 1, 2, 4, …
            steps, and every thousand. Default True.

    On failure: ``TypeError`` for an object that is no codec. ``UnsupportedConfigurationError`` from
    the first ``backward()`` for gradients of float64, and for a `PerPair` of another number of
    ranks. ``ExchangeError`` from ``backward()`` when a peer dies. A gradient with Inf or NaN makes
    its owner's part of the bucket NaN on all ranks, so that GradScaler finds it; residuals stay
    finite.

    **Collective**: all ranks make the state with the same arguments and register the hook; all
    call `drain` before the same step. ``CROSSOVER_DISABLE=1``, set before, makes the hook a plain
    all-reduce.

    Example::

        model.register_comm_hook(CompressedState(codec=Int8()), compressed_hook)
    """

    def __init__(
        self,
        codec: CodecChoice | None,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        compare_replicas: bool = True,
    ) -> None:
        super().__init__(codec, loss_scale, process_group, compare_replicas)
        self.mutex = mutex
        logger.info("%r", self)

    def __repr__(self) -> str:
        return f"CompressedState(codec={self.codec!r})"


async def compressed(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    """Average a bucket's gradients over the ranks in backward, by coded messages, see `CodedLink`.

    Each rank keeps residuals, of its own gradients and of the mean of the shard that it owns. They
    take up the part that a message does not hold. If the coroutine raises, all exchange of the
    process group ends, and ``backward()`` raises the error.
    """
    turn.release()  # this step's compute is launched: a sibling may have the device
    await bucket.computed()
    # Every rank encodes each owner's shard of its gradients plus residuals. Owners decode the
    # messages and average them.
    await link.reduce_scatter(bucket.flat, bucket.layout)
    turn.request()
    # Owners encode their mean plus its residual. All ranks decode the same messages.
    await link.all_gather(bucket.flat, bucket.layout)
    await turn.acquire()  # before DDP's Future completes: the optimizer follows


def compressed_hook(
    state: CompressedState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks, coded on the way to owners and on the way back.

    Args:
        state: made once per model, on all ranks; see `CompressedState`.
        bucket: DDP's bucket.

    Returns:
        A Future of the bucket's own buffer. On gloo a thread of the package completes it; on NCCL
        it is complete at once.

    On failure: as `reduce_scatter_all_gather_hook`; see also `CompressedState`. No error leaves the
    hook. **Collective**: DDP calls it on all ranks in the same order. Source: our design, see the
    module.
    """

    def start(exchange: Exchange) -> GradientFuture:
        return state._send(bucket, exchange, compressed, turn=state.mutex)

    remedy = "pass codec= to that state instead, and register its own hook"
    return run_hook(state, bucket, CompressedState, remedy, start)
