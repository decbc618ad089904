"""Communication hooks for DistributedDataParallel.

Register a hook with ``ddp_model.register_comm_hook``. The module begins with its two journeys, the
coroutines that carry a bucket. The hooks and their state follow.

[Note: one process, one job] A turn belongs to a job, that is, to all its ranks, whichever process
groups its models use. So all hooks in a process share one mutex, whose ranks are those of the
default process group. A model whose group has only some of these ranks cannot give the job's turn
away, because the other ranks would keep it. Such a model exchanges gradients inside the turn. Our
design.
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
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._compression.compression import CodedState
from crossover_ddp._compression.planning import AnyCodec
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._ddp.groups import on_destruction, ranks_of_model
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
    """Average a bucket over the ranks in backward, and let a sibling job compute meanwhile.

    Sibling jobs take turns by a mutex: ``release()`` gives the turn away, ``request()`` joins the
    queue for the next turn, and ``acquire()`` waits for it. All three do nothing without a mutex,
    and in every bucket but the step's last one. DDP waits for all buckets before ``backward()``
    returns. On NCCL a stream waits, and the host waits only for a turn.

    If a peer dies or the timeout passes, the ``await`` under way raises. That ends all exchange of
    the process group, the turn stays released, and ``backward()`` raises the error.
    """
    turn.release()  # this step's compute is launched: a sibling may have the device
    await bucket.computed()  # on a GPU backward's kernels may still run
    # A reduce-scatter and an all-gather. Between them the job joins the queue for its next turn, so
    # that the request travels to the other ranks while the gradients do.
    await link.all_reduce(bucket.flat, bucket.layout, halfway=turn.request)
    await turn.acquire()  # before DDP's Future completes, because the optimizer's step follows


async def wrapped(
    futures: Sequence[GradientFuture], bucket: Bucket, link: Link, turn: JourneyTurn
) -> None:
    """Wait in backward for another library's hook, and let a sibling job compute meanwhile.

    That hook has launched every bucket's exchange by then, by its own means, and its Futures end
    when the results are there. Nothing travels on ``link``, so there is no half-way point to
    request the next turn, and ``acquire()`` does so. If a Future fails, all exchange of the process
    group ends, and ``backward()`` raises the error.

    Args:
        futures: the Futures of all buckets of the step.
        bucket: the last bucket of the step. Its result becomes the last Future's.
        link: a link of the process group. Nothing travels on it.
        turn: the job's turn.
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
    """Average the bucket with a reduce-scatter and an all-gather instead of one all-reduce.

    This hook is a drop-in replacement for torch's ``allreduce_hook``. With one or two ranks the
    gradients match plain DDP to the last bit (float32 and float64). With more ranks they are summed
    in a balanced tree over the ranks. The hook sends as many bytes as an all-reduce. On gloo,
    threads of this process send the two halves as messages straight to and from owners. Two ranks
    on CPUs leave both halves to gloo's all-reduce, since their sum is the same on both.

    Args:
        process_group: the DDP model's process group. None means the default group, as in DDP.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that holds the bucket's own buffer. On gloo one of our threads completes it. On
        NCCL it is complete at once.

    On failure: the hook itself raises nothing. When a peer dies or the group's timeout passes,
    ``backward()`` raises ``ExchangeError`` on this rank, in bounded time. Every later
    ``backward()`` raises it again: restart the job. On NCCL the host does not wait, and torch's
    watchdog ends the process after the group's timeout. With ``TORCH_NCCL_BLOCKING_WAIT=1``,
    ``backward()`` raises as above, at least in torch 2.14. The ranks' parameters are compared in
    steps 1, 2, 4, … and in every thousandth step, unless ``CROSSOVER_COMPARE_REPLICAS=0``; if they
    differ, ``ReplicasDifferError`` is raised. ``backward()`` raises
    ``UnsupportedConfigurationError`` for buckets that cannot be exchanged: those with sparse
    gradients, from the Python reducer, or of a dtype other than float16, bfloat16, float32 and
    float64.

    **Collective**: DDP calls it in the backward pass, on all ranks, in the order of the buckets.

    A copied or pickled DDP model loses its hook, whichever hook that is. If the hook had one of our
    states, a warning is logged.

    Example::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    """

    def start(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
        return exchange.send(bucket, crossover, state=process_group).future

    return run_hook(process_group, bucket, None, "", start)


class CrossoverState(CodedState):
    """State of `crossover_hook`: a sibling job computes while this job's gradients travel.

    ``CrossoverState()`` works without arguments. The gradients are those of plain DDP, with or
    without siblings; only the times at which the job computes change. ``codec=`` does change
    gradients. A job without siblings trains as with `reduce_scatter_all_gather_hook`.

    Args:
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        mutex: the mutex to take turns with. Default: this process's own mutex, on the first
            bucket's device, in the group named by ``CROSSOVER_GROUP``. It is created in the first
            exchange and closed with the process group, and all models in the process share it. A
            model whose process group has only some of the job's ranks takes no turns; its gradients
            travel inside the job's turns.
        codec: compress both halves of the exchange, with error feedback. Pass one codec for both
            halves, such as ``crossover_ddp.Int8()``, or a pair (to owners, to all); see
            `CompressedState`. Default: no codec, and the gradients are those of plain DDP.
        loss_scale: only with ``codec``: the factor by which the loss is multiplied before
            ``backward()``, or a function that returns it, such as ``scaler.get_scale``. Default 1.
        hook_state: only with `crossover_wrapper`: the wrapped hook's state.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.
        trial: try in some steps whether siblings are faster side by side, and take turns only if
            they are not; the gradients are the same. If one job passes False or sets
            ``CROSSOVER_TRIAL=0``, all siblings take turns. The argument applies to the mutex that
            the first state in a process creates; a mutex passed by the user has its own ``trial=``.

    On failure: a job that cannot join its siblings, or whose turns fail later, trains on without
    turns. One warning gives the reason, and `stats` has it as ``disabled_because``. Only a
    wrong ``CROSSOVER_GROUP`` raises an error, from the first ``backward()``.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` turns it into a plain
    all-reduce.

    Example::

        model.register_comm_hook(CrossoverState(), crossover_hook)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        codec: AnyCodec = None,
        loss_scale: float | Callable[[], float] = 1.0,
        hook_state: Any = None,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
        trial: bool = True,
    ) -> None:
        super().__init__(codec, loss_scale, process_group, compare_replicas, model)
        self.hook_state = hook_state
        # None before the job has joined its siblings, in the first exchange.
        self.mutex: GPUMutex | None = mutex
        self._has_own_mutex = mutex is not None
        self._trial = trial
        self._is_closed = False

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the exchange and, once the job has joined, of the mutex.

        `GPUMutex.stats` describes the mutex's counters. docs/troubleshooting.md has the whole
        table. Not collective.
        """
        turns = {} if self.mutex is None else self.mutex.stats()
        return {**super().stats(), **turns}

    def close(self) -> None:
        """Leave the siblings. Later steps take no turns, in all models that share the mutex.

        Not collective. But ranks join together: close this state on all ranks before you use
        another state of the same process group.
        """
        self._is_closed = True
        if self.mutex is not None:
            self.mutex.close()

    def _turns(self, bucket: dist.GradBucket) -> dict[str, Any]:
        """Return the ``turn`` or ``join`` argument for `Exchange.send`, if the bucket needs one."""
        if self._is_closed or not _has_turns(self):
            return {}
        if self.mutex is not None:
            return {"turn": self.mutex}
        # DDP runs the first iteration as one big bucket. Its compute runs before the job has
        # joined.
        return {"join": functools.partial(self._join, bucket.buffer().device)}

    def _join(self, device: torch.device) -> GPUMutex:
        """Join the siblings, on one of the engine's threads. **Collective**; it may block."""
        self.mutex = _mutex_of_job(device, self._trial)
        return self.mutex

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that all ranks must have in common, as in `CodedState`."""
        # A mutex passed by the user already has a group.
        siblings = None if self._has_own_mutex else environment.sibling_group()
        return {**super().fingerprint(bucket), environment.GROUP: siblings}


def crossover_hook(
    state: CrossoverState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as DDP does, and meanwhile let a sibling have the job's turn.

    The turn is released when the last bucket's compute has been launched (on a GPU, behind its last
    kernel). It is acquired again when the exchange is complete, before the optimizer and the next
    forward run. The gradients are those of `reduce_scatter_all_gather_hook`.

    Args:
        state: the model's state; create one per model, see `CrossoverState`.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that holds the averaged bucket. On gloo one of our threads completes it. On NCCL it
        is complete at once.

    On failure: like `reduce_scatter_all_gather_hook`; see also `CrossoverState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: the abstract of
    CrossoverScheduler (arXiv 2103.07974); the order, the locking and the switch points are our
    design.
    """
    return run_hook(
        state,
        bucket,
        CrossoverState,
        _REMEDY,
        lambda exchange: state._send(bucket, exchange, crossover, **state._turns(bucket)),
    )


def crossover_wrapper(hook: Hook) -> Hook:
    """Take turns around another hook, such as torch's ``powerSGD_hook`` or one of your own.

    The turn is released when ``hook`` has launched the last bucket's compression, and acquired
    again when all its Futures are complete. The Futures' callbacks compute outside the turn. The
    gradients are the ones that ``hook`` returns.

    Args:
        hook: the communication hook to wrap. It is called with the ``hook_state`` of the registered
            `CrossoverState`.

    Returns:
        A hook to register with a `CrossoverState`.

    On failure: ``backward()`` raises the error of a Future that fails, and
    ``UnsupportedConfigurationError`` if the state has a codec; see also `crossover_hook`.

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
            state.bound_model.bind(bucket, state)
            compare = functools.partial(exchange.behind.compare, exchange, bucket, state)
            # Compare only after backward has ended: the other hook may issue collectives on any
            # thread. The shadow passes of DDP's Join have no backward. There the comparison follows
            # the bucket, as it does on ranks with a backward.
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

        return run_hook(
            state,
            bucket,
            CrossoverState,
            _REMEDY,
            start,
            compares=False,
            is_wrapped=True,
            plain=plain,
        )

    return crossover_wrapped_hook


def _has_turns(state: CrossoverState) -> bool:
    """Return whether the model takes turns itself; see [Note: one process, one job]."""
    if state.mutex is not None:
        return True
    group = resolve_group(state.process_group)
    job = resolve_group(None)
    ranks = ranks_of_model(group)
    if len(ranks) == job.size():
        return True
    if group not in _warned_partial and group.rank() == 0:
        logger.warning(
            "a model is trained by %d of the job's %d ranks. A turn belongs to the whole job, so "
            "this model's gradients travel inside the job's turns, and no sibling computes meanwhile",
            len(ranks),
            job.size(),
        )
    _warned_partial.add(group)
    return False


def _mutex_of_job(device: torch.device | None, trial: bool) -> GPUMutex:
    """Return the mutex that all models in this process share; see [Note: one process, one job]."""
    group = resolve_group(None)
    with _joining:  # two models may finish their first exchanges at the same time
        mutex = _mutexes.get(group)
        # A failed mutex stays: another rank's may still work, and creating one is collective. A
        # closed one is replaced, failed or not: its peers may have closed it first, which this rank
        # sees as a failure.
        if mutex is None or mutex.closed:
            mutex = _mutexes[group] = GPUMutex.for_hook(device, group, trial)
            _warn_of_nccl(device, group)
            # The process may outlive its process group, so close the mutex with the group. At the
            # process's exit siblings find its locks released by the kernel.
            on_destruction(group, functools.partial(_close, weakref.ref(mutex)), at_exit=False)
        return mutex


def _warn_of_nccl(device: torch.device | None, group: dist.ProcessGroup) -> None:
    """Warn that turns gain little if NCCL's kernels delay a sibling's kernels or the job's own."""
    if device is None or device.type != "cuda" or group.rank():
        return
    backends = str(dist.get_backend_config(group)).split(",")
    if not any(backend.startswith("cuda:nccl") for backend in backends):
        return
    try:
        enabled = cuda_driver().attribute(device.index or 0, MPS_ENABLED)
    except (OSError, RuntimeError) as error:  # a driver older than the attribute
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
