"""Communication hooks for DistributedDataParallel: register one with ``ddp_model.register_comm_hook``.

The module begins with its two journeys: the coroutines that carry a bucket. The hooks and their state
follow.

[Note: one process, one job] A turn belongs to a job, that is to all its ranks, whatever process groups
its models use. So all hooks of a process share one mutex, whose ranks are those of the default process
group. A model on a group of some of these ranks cannot give the job's turn away, since the other ranks
would not: its exchange runs inside the turn. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from crossover_ddp._compression.codec import CodecChoice
from crossover_ddp._compression.compression import CodedState
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._ddp.groups import on_destruction
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, after_backward
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.journeys import GradientFuture
from crossover_ddp._engine.links import Link
from crossover_ddp._system import environment
from crossover_ddp._system.cuda_driver import MPS_ENABLED, WORK_QUEUES, cuda_driver

from .decoupled_hooks import DecoupledState, decoupled_hook
from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex

__all__ = [
    "CrossoverState",
    "DecoupledState",
    "crossover_hook",
    "crossover_wrapper",
    "decoupled_hook",
    "reduce_scatter_all_gather_hook",
]

logger = logging.getLogger(__name__)

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]

# --- the journeys ---------------------------------------------------------------------------------


async def crossover(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    """Average a bucket's gradients over the ranks in backward, and let a sibling job compute meanwhile.

    Sibling jobs take turns by a mutex: ``release()`` gives the turn away, ``request()`` joins the queue for
    the next turn, and ``acquire()`` waits for it. All three do nothing without a mutex, and in every bucket
    but the step's last one. If the coroutine raises, all exchange of the process group ends, the turn stays
    released, and ``backward()`` raises the error.
    """
    turn.release()  # this step's compute is launched: a sibling may have the device
    await bucket.computed()  # on a GPU backward's kernels may still run
    # A reduce-scatter and an all-gather. Between them the job joins the queue for its next turn, so that
    # the request travels to the other ranks while the gradients do.
    await link.all_reduce(bucket.flat, bucket.layout, halfway=turn.request)
    await turn.acquire()  # before DDP's Future completes, because the optimizer's step follows


async def wrapped(
    futures: Sequence[GradientFuture], bucket: Bucket, link: Link, turn: JourneyTurn
) -> None:
    """Wait for the collectives of another library's hook, and let a sibling job compute meanwhile.

    That hook has launched them. Nothing travels on ``link``, and so nothing marks a half-way point for a
    request: ``acquire()`` makes it. If a Future fails, all exchange of the process group ends, and
    ``backward()`` raises the error.

    Args:
        futures: of all buckets of the step; ``bucket`` is the last.
        bucket: its result is replaced by the last Future's.
        link: of the process group; nothing travels on it.
        turn: the job's.
    """
    turn.release()
    await bucket.computed()
    await link.settle()  # resume on a thread that may block, because a Future's wait() does
    for future in futures:
        bucket.result = future.wait()
    if turn.awaits_device:
        # wait() may only have queued the results on the GPU. Block until they are there.
        block_until_reached = bucket.place.reached()
        block_until_reached()
    await turn.acquire()


# --- the hooks and their state --------------------------------------------------------------------

_joining = threading.Lock()
_mutexes: "weakref.WeakKeyDictionary[dist.ProcessGroup, GPUMutex]" = weakref.WeakKeyDictionary()
_warned_partial: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()

_REMEDY: Final = "make a CrossoverState, or register the hook of that state"


def reduce_scatter_all_gather_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket by a reduce-scatter and an all-gather instead of one all-reduce.

    A drop-in for torch's ``allreduce_hook``. The gradients are those of plain DDP, to the last bit with
    one or two ranks (float32 and float64). With more ranks they are a balanced tree of sums over ranks.
    The wire traffic is that of an all-reduce. On gloo the two halves are messages straight to and from
    owners, driven by threads of this process. Two ranks on CPUs, whose sum is the same on both, leave
    both halves to gloo's all-reduce.

    Args:
        process_group: the group of the DDP model. None means the default group, as in DDP.
        bucket: given by DDP.

    Returns:
        A Future of the bucket's own buffer. On gloo one of our threads completes it, on NCCL it is
        complete at once.

    On failure: no error leaves the hook. When a peer dies or the group's timeout passes, ``backward()``
    raises ``ExchangeError`` on this rank, in bounded time, and so does every later one: restart the job.
    On NCCL the host does not wait, and torch's watchdog ends the process after the group's timeout. With
    ``TORCH_NCCL_BLOCKING_WAIT=1`` ``backward()`` raises as above, in torch 2.14 at least.
    ``ReplicasDifferError`` after 1, 2, 4, … steps and every thousand if the ranks' parameters differ,
    unless ``CROSSOVER_COMPARE_REPLICAS=0``. Buckets that cannot be exchanged (sparse gradients, other
    dtypes than float16, bfloat16, float32 and float64, the Python reducer) raise
    ``UnsupportedConfigurationError`` from ``backward()``.

    **Collective**: runs inside DDP's backward pass, on all ranks in the order of the buckets.

    A copied or pickled DDP model has no hook, as with every hook. With one of our states a warning is
    logged then.

    Example::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    """

    def start(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
        return exchange.send(bucket, crossover, state=process_group).future

    return run_hook(process_group, bucket, None, "", start)


class CrossoverState(CodedState):
    """State of `crossover_hook`: a sibling job computes while this job's gradients travel.

    ``CrossoverState()`` alone is enough. The gradients are those of plain DDP, with or without siblings;
    only the time of the job's compute changes. ``codec=`` does change gradients. Without siblings the job
    trains as with `reduce_scatter_all_gather_hook`.

    Args:
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default
            group.
        mutex: the mutex to take turns with. Default: the one of this process, on the device of the first
            bucket, in the group named by ``CROSSOVER_GROUP``. It is made in the first exchange and closed
            with the process group, and all models of the process share it. A model whose process group
            has only some of the job's ranks takes no turns; its gradients travel inside the job's turns.
        codec: compresses both halves of the exchange, with error feedback: one codec for both, or a pair
            (to owners, to all), such as ``crossover_ddp.codecs.Int8()``; see `CompressedState`. Default:
            none, and gradients are those of plain DDP.
        loss_scale: for ``codec``: the factor of the loss in ``backward()``, or a function that returns
            it, such as ``scaler.get_scale``. Default 1.
        hook_state: for `crossover_wrapper`: the state of the wrapped hook.
        compare_replicas: raise ``ReplicasDifferError`` if parameters differ after 1, 2, 4, … steps, and
            every thousand. Default True.
        trial: try in some steps whether siblings are faster side by side, and take turns only if they are
            not; the gradients are the same. If it is False in one job, or ``CROSSOVER_TRIAL=0``, all
            siblings take turns. It counts for the mutex that the first state of a process makes; a mutex
            passed by the user has its own ``trial=``.

    On failure: a job that cannot join its siblings, or whose turns fail later, trains on without turns.
    One warning says why, and `stats` repeats it as ``disabled_because``. Only a wrong ``CROSSOVER_GROUP``
    is raised, by the first ``backward()``.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` makes it a plain all-reduce.

    Example::

        model.register_comm_hook(CrossoverState(), crossover_hook)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        codec: CodecChoice | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        hook_state: Any = None,
        compare_replicas: bool = True,
        trial: bool = True,
    ) -> None:
        super().__init__(codec, loss_scale, process_group, compare_replicas)
        self.hook_state = hook_state
        # None before the job has joined its siblings, in the first exchange.
        self.mutex: GPUMutex | None = mutex
        self._has_own_mutex = mutex is not None
        self._trial = trial
        self._is_closed = False

    def stats(self) -> dict[str, Any]:
        """Return statistics, with the mutex's counters once the job has joined, see `GPUMutex.stats`.

        Not collective. The table is in docs/troubleshooting.md.
        """
        turns = {} if self.mutex is None else self.mutex.stats()
        return {**super().stats(), **turns}

    def close(self) -> None:
        """Leave the siblings, with all models of the process group. Later steps take no turns.

        Not collective. But ranks join together: before another state of the group is used, all ranks must
        have closed this one.
        """
        self._is_closed = True
        if self.mutex is not None:
            self.mutex.close()

    def _turns(self, bucket: dist.GradBucket) -> dict[str, Any]:
        """Return ``turn`` and ``join`` for `Exchange.send`."""
        if self._is_closed or not _has_turns(self):
            return {}
        if self.mutex is not None:
            return {"turn": self.mutex}
        # DDP runs the first iteration as one big bucket. It computes before the job has joined.
        return {"join": functools.partial(self._join, bucket.buffer().device)}

    def _join(self, device: torch.device) -> GPUMutex:
        """Join the siblings, on a thread of the engine. **Collective**, and may block."""
        self.mutex = _mutex_of_job(device, self._trial)
        return self.mutex

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """See `CodedState`."""
        # A mutex passed by the user already has a group.
        siblings = None if self._has_own_mutex else environment.sibling_group()
        return {**super().fingerprint(bucket), environment.GROUP: siblings}


def crossover_hook(
    state: CrossoverState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as DDP does, and give the job's turn to a sibling meanwhile.

    The turn is released when the last bucket's compute is launched (on a GPU behind its last kernel). It
    is acquired again when the exchange is complete, before the optimizer and the next forward run. The
    gradients are those of `reduce_scatter_all_gather_hook`.

    Args:
        state: made once per model; see `CrossoverState`.
        bucket: DDP's bucket.

    Returns:
        A Future of the averaged bucket. On gloo one of our threads completes it, on NCCL it is complete
        at once.

    On failure: as `reduce_scatter_all_gather_hook`; see also `CrossoverState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: the abstract of
    CrossoverScheduler (arXiv 2103.07974); order, locking and switch points are our design.
    """
    return run_hook(
        state,
        bucket,
        CrossoverState,
        _REMEDY,
        lambda exchange: state._send(bucket, exchange, crossover, **state._turns(bucket)),
    )


def crossover_wrapper(hook: Hook) -> Hook:
    """Take turns around another hook: torch's ``fp16_compress_hook``, ``powerSGD_hook``, or your own.

    The turn is released when ``hook`` has launched the last bucket's compression, and acquired again when
    all its Futures are complete. Callbacks of these Futures compute outside of the turn. Gradients are
    those of ``hook``.

    Args:
        hook: a communication hook; called with ``state.hook_state`` of the registered `CrossoverState`.

    Returns:
        A hook to register with a `CrossoverState`.

    Example::

        state = CrossoverState(hook_state=powerSGD_hook.PowerSGDState(None))
        model.register_comm_hook(state, crossover_wrapper(powerSGD_hook.powerSGD_hook))
    """

    def crossover_wrapped_hook(
        state: CrossoverState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        def start(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
            if state.codec is not None:
                raise UnsupportedConfigurationError(
                    f"expected codec=None for crossover_wrapper, got codec={state.codec!r}: the wrapped hook decides "
                    "what travels; leave codec out, or register crossover_hook"
                )
            compare = functools.partial(exchange.compare, bucket, state)
            # Not before backward has ended: the other hook may issue collectives on any thread. Join's
            # shadow passes are no backward. There it comes behind the bucket, as on ranks with a backward.
            is_later = after_backward(compare)
            try:
                future = hook(state.hook_state, bucket)
                turns = state._turns(bucket)
                return exchange.follow(future, bucket, wrapped, state=state, **turns)
            finally:
                if not is_later:
                    compare()

        def plain(*_: object) -> torch.futures.Future[torch.Tensor]:
            return hook(state.hook_state, bucket)

        return run_hook(state, bucket, CrossoverState, _REMEDY, start, compares=False, plain=plain)

    return crossover_wrapped_hook


def _has_turns(state: CrossoverState) -> bool:
    """Whether a model takes turns of its own, see [Note: one process, one job]."""
    if state.mutex is not None:
        return True
    group = resolve_group(state.process_group)
    job = resolve_group(None)
    if group.size() == job.size():
        return True
    if group not in _warned_partial and group.rank() == 0:
        logger.warning(
            "a model's process group has %d of the job's %d ranks. A turn belongs to the whole job, so "
            "this model's gradients travel inside the job's turns, and no sibling computes meanwhile",
            group.size(),
            job.size(),
        )
    _warned_partial.add(group)
    return False


def _mutex_of_job(device: torch.device | None, trial: bool) -> GPUMutex:
    """Return the mutex of all models of this process, see [Note: one process, one job]."""
    group = resolve_group(None)
    with _joining:  # two models may end their first exchanges at the same time
        mutex = _mutexes.get(group)
        # One that failed stays: another rank's may still work, and making one is collective. One that was closed
        # does not, failed or not: a rank whose peers are quicker to close may find that they have left.
        if mutex is None or mutex.closed:
            mutex = _mutexes[group] = GPUMutex.for_hook(device, group, trial)
            _warn_of_nccl(device, group)
            # A process may live on for long; at its exit the kernel's locks show siblings that it has gone.
            on_destruction(group, functools.partial(_close, weakref.ref(mutex)), at_exit=False)
        return mutex


def _warn_of_nccl(device: torch.device | None, group: dist.ProcessGroup) -> None:
    """Say that turns gain little where NCCL's kernels hold up a sibling's, or the job's own."""
    if device is None or device.type != "cuda" or group.rank():
        return
    backends = str(dist.get_backend_config(group)).split(",")
    if not any(backend.startswith("cuda:nccl") for backend in backends):
        return
    try:
        enabled = cuda_driver().attribute(device.index or 0, MPS_ENABLED)
    except (OSError, RuntimeError) as error:  # a driver of before the attribute
        logger.debug("does not know whether %s is shared by MPS: %s", device, error)
        return
    if not enabled:
        logger.warning(
            "gradients travel by NCCL on %s without MPS: its kernels and a sibling's compute never run at "
            "the same moment, so turns gain little; start nvidia-cuda-mps-control before the jobs, or use gloo",
            device,
        )
    elif WORK_QUEUES not in os.environ:
        logger.warning(
            "gradients travel by NCCL on %s under MPS, which gives each process two work queues: compute waits behind "
            "NCCL's kernels there, so turns end late and gain nothing; set %s=8 for the jobs",
            device,
            WORK_QUEUES,
        )


def _close(mutex: "weakref.ref[GPUMutex]") -> None:
    if (alive := mutex()) is not None:
        alive.close()
