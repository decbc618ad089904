"""Local SGD, delayed averaging and DiLoCo, for DDP's reducer."""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import torch
import torch.distributed as dist

from crossover_ddp.gpu_mutex import GPUMutex

from .delayed import DelayedMeans
from .outer import OuterOptimizer, check_outer
from .schedule import Schedule
from .state import AveragingState, answer_bucket


class LocalSGDState(AveragingState):
    """State of `local_sgd_hook`: each rank trains on its own gradients, and parameters are averaged now and then.

    The training loop stays as it is. Its arguments choose the algorithm:

    * ``sync_every`` alone: local SGD; with ``warmup_steps`` post-local SGD.
    * ``delay=d``: delayed averaging. A snapshot leaves after step k; after step k + d the parameters get
      mean - snapshot, so that steps in between are kept, and no step waits.
    * ``outer_optimizer``: DiLoCo; with ``fragments`` and ``delay`` streaming DiLoCo.
    * ``sync_every=1``: the split hook itself, and plain DDP's gradients.

    A step is a backward pass that reaches the hook: one for several under ``no_sync()``. Whether the optimizer steps,
    or a GradScaler skips it on one rank alone, does not matter.

    Args:
        sync_every: steps from one exchange of an element to the next.
        delay: steps from the snapshot to the correction; less than ``sync_every``.
        fragments: equal slices of the flat parameters, which leave at different steps; the memory for snapshots is
            two copies of what is in flight (one with ``delay=0``).
        warmup_steps: steps at the beginning whose gradients are averaged as by DDP.
        outer_optimizer: makes an optimizer of a list of tensors, such as ``functools.partial(torch.optim.SGD,
            lr=0.7, momentum=0.9, nesterov=True)``. It steps the common parameters by their distance to the mean, each
            owner its part. It must treat elements by themselves, without looking at their values (no weight decay).
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: with ``delay=0``: give the turn to a sibling while parameters, or gradients in warm-up, travel.

    Parameters of half precision travel in it; the outer optimizer works in float32. Floating-point buffers
    (BatchNorm's statistics) are averaged, too, and never stepped.

    On failure: ``ValueError`` for arguments. ``UnsupportedConfigurationError`` from the first ``backward()`` for models
    that would wait in every step (``broadcast_buffers=True`` with buffers, ``find_unused_parameters``, SyncBatchNorm),
    and on all ranks before a step if parameters are not finite. ``ExchangeError`` before a step when a peer has died,
    in bounded time: restart the job.

    **Collective**: every rank registers the hook, with the same arguments, and makes as many steps.
    ``CROSSOVER_DISABLE=1`` makes it a plain all-reduce.

    Example::

        # before torch 2.14: broadcast_buffers=False
        model = DistributedDataParallel(network, forward_sync_buffers=False, gradient_as_bucket_view=True)
        model.register_comm_hook(LocalSGDState(sync_every=8, delay=1, fragments=8), local_sgd_hook)
    """

    def __init__(
        self,
        sync_every: int,
        delay: int = 0,
        fragments: int = 1,
        warmup_steps: int = 0,
        outer_optimizer: OuterOptimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
    ) -> None:
        schedule = Schedule(sync_every, delay, fragments, warmup_steps)
        if mutex is not None and delay:
            raise ValueError(
                f"expected delay=0 with a mutex, got delay={delay}: no step waits for an exchange then, so there is no "
                "time to give away; leave mutex out, or pass delay=0"
            )
        if outer_optimizer is not None:
            check_outer(outer_optimizer)
            if sync_every == 1:
                raise ValueError(
                    "expected sync_every >= 2 with an outer optimizer, got sync_every=1: every step averages the "
                    "gradients then, and replicas never differ; leave outer_optimizer out"
                )
        super().__init__(DelayedMeans(schedule, outer_optimizer), process_group, mutex)


def local_sgd_hook(state: LocalSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back with this rank's own gradients; see `LocalSGDState` for what is averaged when.

    Args:
        state: made once per model.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already; in warm-up steps, and with ``sync_every=1``, that of the split hook.

    On failure: nothing leaves the hook; see `LocalSGDState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: see the module and `LocalSGDState`.

    Example::

        model.register_comm_hook(LocalSGDState(sync_every=8, delay=1), local_sgd_hook)
    """
    return answer_bucket(state, bucket, LocalSGDState)
