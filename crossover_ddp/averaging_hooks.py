"""Hooks for replicas that do not wait for each other: register one with ``ddp_model.register_comm_hook``.

For links that take longer for a step's gradients than the step computes. Parameters are averaged now and then, and
the exchange runs while training goes on. After local SGD (arXiv 1805.09767), DaSGD (arXiv 2006.00441), DiLoCo
(arXiv 2311.08105), EASGD (arXiv 1412.6651) and EA-wild (HPC Asia 2020). What they do on DDP's reducer is our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

from typing import Literal

import torch
import torch.distributed as dist

from crossover_ddp._averaging.centre import moving_rate_for
from crossover_ddp._averaging.elastic import OwnPaceElastic, TogetherElastic, WildElastic
from crossover_ddp._averaging.late import LateMeans, OuterOptimizer, check_outer
from crossover_ddp._averaging.rounds import ElasticRound
from crossover_ddp._averaging.schedule import Schedule
from crossover_ddp._averaging.state import AveragingState, answer_bucket
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._tuning.model import AveragingPlan

from .gpu_mutex import GPUMutex

__all__ = ["AveragingPlan", "ElasticState", "LocalSGDState", "elastic_hook", "local_sgd_hook"]


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
        super().__init__(LateMeans(schedule, outer_optimizer), process_group, mutex)


def local_sgd_hook(state: LocalSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back with this rank's own gradients; see `LocalSGDState` for what is averaged when.

    Nothing travels here: parameters leave, are waited for and written by a hook before the model's next training
    forward, on the thread that calls it (``_averaging/state.py``). A failure is raised there, and by all that follows.

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


class ElasticState(AveragingState):
    """State of `elastic_hook`: each rank trains on its own gradients, tied to a common centre as if by a spring.

    Every ``sync_every`` steps a rank is pulled towards the centre by δ = α(x - c), and the centre towards the rank by
    the same δ. The training loop stays as it is. The modes differ in who waits for whom:

    * ``"sync"``: all ranks pull in the same step, and wait for each other. EASGD.
    * ``"async"``: nobody waits. A thread of each rank goes through rounds with those of the others, over what each
      rank has offered last; the pull is applied between two steps when it has come. A rank that is three times slower
      delays nobody, and its pulls are not lost.
    * ``"wild"``: ranks of one host pull a centre in shared memory, at the same time and without a lock; hosts pull
      their centres together as in "async". EA-wild.

    The centre is kept in float32 whatever the parameters' dtype, and so are values on the wire. In "async" each rank
    has its part of it, and so has the first rank of each host in "wild".

    Args:
        sync_every: steps between two pulls of a rank; more in "async" while the network needs longer.
        mode: see above.
        moving_rate: α. Default: 0.9 / ranks, as EASGD's authors have it. Greater ones swing; from 2 / (ranks + 1) on
            they are refused.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: with mode="sync": give the turn to a sibling while parameters travel.

    On failure: ``ValueError`` for arguments; ``UnsupportedConfigurationError`` from the first ``backward()`` for models
    that would wait in every step (see `LocalSGDState`). ``ExchangeError`` before a step when a peer has died or has
    been silent for the group's timeout: until then the others train on, and nobody trains alone for longer. A rank
    whose parameters are not finite offers nothing, with a warning; in "sync" all ranks raise.

    **Collective**: every rank registers the hook, with the same arguments. In "async" and "wild" ranks may make
    different numbers of steps between two calls of `average`; the last steps must end with one. `average` gives the
    mean of the ranks, which is what to evaluate; the centre is in `state_dict`.

    Example::

        # before torch 2.14: broadcast_buffers=False
        model = DistributedDataParallel(network, forward_sync_buffers=False, gradient_as_bucket_view=True)
        model.register_comm_hook(ElasticState(sync_every=10), elastic_hook)
    """

    def __init__(
        self,
        sync_every: int,
        mode: Literal["sync", "async", "wild"] = "async",
        moving_rate: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
    ) -> None:
        rules = {rule.mode: rule for rule in (TogetherElastic, OwnPaceElastic, WildElastic)}
        if mode not in rules:
            raise ValueError(f"expected mode='sync', 'async' or 'wild', got mode={mode!r}; see ElasticState")
        Schedule(sync_every)  # says what is wrong with it
        moving_rate_for(resolve_group(process_group).size(), moving_rate)
        if mutex is not None and mode != "sync":
            raise ValueError(
                f"expected mode='sync' with a mutex, got mode={mode!r}: no step waits for an exchange then, so there "
                "is no time to give away; leave mutex out, or pass mode='sync'"
            )
        self.mode = mode
        super().__init__(rules[mode](sync_every, moving_rate), process_group, mutex)

    def rounds(self) -> list[ElasticRound]:
        """Return the rounds of mode "async" (and of the hosts in "wild") as this rank saw them, for a replay.

        ``offered`` has for each rank the number of steps after which it offered what went into the round, or None;
        ``collected`` the number after which this rank applied its pull. Not collective.
        """
        return self._rule.log if isinstance(self._rule, OwnPaceElastic) else []


def elastic_hook(state: ElasticState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back with this rank's own gradients; see `ElasticState` for what is exchanged when.

    Args:
        state: made once per model.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already.

    On failure: nothing leaves the hook; see `ElasticState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: EASGD (arXiv 1412.6651) and its authors' code;
    EA-wild (HPC Asia 2020), by its abstract. Rounds without a server, and the centre of a host, are our design.

    Example::

        model.register_comm_hook(ElasticState(sync_every=10, mode="wild"), elastic_hook)
    """
    return answer_bucket(state, bucket, ElasticState)
