"""Elastic averaging, together, at each rank's own pace, or wild, for DDP's reducer."""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

from typing import Final, Literal

import torch
import torch.distributed as dist

from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp.gpu_mutex import GPUMutex

from .elastic_rules import OwnPaceElastic, TogetherElastic, moving_rate_for
from .rounds import ElasticRound
from .schedule import Schedule
from .state import AveragingState, answer_bucket
from .wild_rule import WildElastic

_RULES: Final[dict[str, type[TogetherElastic] | type[OwnPaceElastic]]] = {
    "sync": TogetherElastic,
    "async": OwnPaceElastic,
    "wild": WildElastic,
}


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
        if mode not in _RULES:
            raise ValueError(f"expected mode='sync', 'async' or 'wild', got mode={mode!r}; see ElasticState")
        Schedule(sync_every)  # says what is wrong with it
        moving_rate_for(resolve_group(process_group).size(), moving_rate)
        if mutex is not None and mode != "sync":
            raise ValueError(
                f"expected mode='sync' with a mutex, got mode={mode!r}: no step waits for an exchange then, so there "
                "is no time to give away; leave mutex out, or pass mode='sync'"
            )
        self.mode = mode
        self._rule = _RULES[mode](sync_every, moving_rate)
        super().__init__(self._rule, process_group, mutex)

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
