"""Communication hooks for DistributedDataParallel: register one with ``ddp_model.register_comm_hook``.

[Note: one process, one job]
A turn belongs to a job, all its ranks, whatever process groups its models use. So all hooks of a process share one
mutex, whose ranks are those of the default process group. A model on a group of some of these ranks cannot give the
job's turn away, since the job's other ranks would not: its exchange runs inside the turn. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from crossover_ddp._compression.codec import CodecChoice
from crossover_ddp._compression.compression import CodedState
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._ddp.groups import on_destruction
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, Turn, after_backward
from crossover_ddp._engine.exchange import Exchange, answered
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
    """Average a bucket over the ranks, and let a sibling job compute meanwhile.

    The turn's methods do nothing in other buckets than the last, and without a mutex. If the coroutine raises, all
    exchange of the process group ends and ``backward()`` raises.
    """
    turn.release()  # this step's compute is launched: a sibling may have the device
    await bucket.computed()  # on a GPU the gradients are there only now
    # A reduce-scatter and an all-gather. The turn's number travels with the gather.
    await link.all_reduce(bucket.flat, bucket.layout, halfway=turn.request)
    await turn.acquire()  # before DDP's Future completes: the optimizer follows


async def wrapped(
    futures: Sequence[GradientFuture], bucket: Bucket, link: Link, turn: JourneyTurn
) -> None:
    """Wait for the Futures of another library's hook, and let a sibling job compute meanwhile.

    Args:
        futures: of all buckets of the step; ``bucket`` is the last.
        bucket: its result is replaced by the last Future's.
        link: of the process group; nothing travels on it.
        turn: the job's.
    """
    turn.release()
    await bucket.computed()
    await link.settle()  # on a thread that may block
    for future in futures:
        bucket.result = future.wait()
    if turn.awaits_device:
        bucket.place.reached()()
    await turn.acquire()


# --- the hooks and their state --------------------------------------------------------------------

_joining = threading.Lock()
_mutexes: "weakref.WeakKeyDictionary[dist.ProcessGroup, GPUMutex]" = weakref.WeakKeyDictionary()
_warned_partial: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()

_REMEDY: Final = "make a CrossoverState, or register the hook of that state"


def reduce_scatter_all_gather_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks by a reduce-scatter and an all-gather instead of one all-reduce.

    A drop-in for torch's ``allreduce_hook``: the gradients are those of plain DDP, to the last bit with one or two
    ranks (float32 and float64), and up to the order of additions with more: a balanced tree over ranks. Wire
    traffic is that of an all-reduce. On gloo the two halves are messages straight to and from owners, driven by threads
    of this process; two ranks on CPUs, whose sum is the same whoever adds, leave both to gloo's all-reduce.

    Args:
        process_group: the group that DDP was given; None means the default group, as DDP does.
        bucket: given by DDP.

    Returns:
        A Future of the bucket's own buffer, completed by a thread of our own on gloo, at once on NCCL.

    On failure: nothing leaves the hook. When a peer dies or the group's timeout passes, ``backward()`` raises
    ``ExchangeError``, on this rank and in bounded time, and so does every later one: restart the job. On NCCL the host
    waits for nobody: after the group's timeout torch's watchdog ends the process. With ``TORCH_NCCL_BLOCKING_WAIT=1``
    ``backward()`` raises as above, in torch 2.14 at least.
    ``ReplicasDifferError`` after 1, 2, 4, … steps and every thousand if the ranks' parameters differ, unless
    ``CROSSOVER_COMPARE_REPLICAS=0``. Buckets that cannot be exchanged (sparse gradients, other dtypes than float16,
    bfloat16, float32 and float64, the python reducer) raise ``UnsupportedConfigurationError`` from ``backward()``.

    Collective: runs inside DDP's backward pass, on all ranks in the order of the buckets.

    Note: a copied or pickled DDP model has lost its hook, whichever it was; with a state of ours a warning says so.

    Example::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    """

    def carry(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
        return exchange.carry(bucket, crossover, state=process_group).future

    return answered(process_group, bucket, None, "", carry)


class CrossoverState(CodedState):
    """State of `crossover_hook`: gives the job's turn on its devices to a sibling while gradients travel.

    ``CrossoverState()`` alone is enough. The gradients are the same as with plain DDP, with or without siblings:
    only *when* the job computes changes; ``codec=`` does change gradients. Without siblings the job goes on as with the
    split hook.

    Args:
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: the mutex to take turns with. Default: the one of this process, on the device of the first bucket, in the
            group named by ``CROSSOVER_GROUP``, made in the first exchange and closed with the process group.
            All models of the process share it. A model whose process group has only some of the job's ranks takes no
            turns of its own; its gradients travel inside the turns of the job.
        codec: compresses both halves, with error feedback; one for both, or a pair: to owners, to all. Such as
            ``crossover_ddp.codecs.Int8()``; see `CompressedState`. Default: none, gradients are those of plain DDP.
        loss_scale: for ``codec``: what the loss is multiplied by before ``backward()``, such as ``scaler.get_scale``.
        hook_state: for `crossover_wrapper`: the state of the wrapped hook.
        compare_replicas: raise ``ReplicasDifferError`` if parameters differ after 1, 2, 4, … steps, and every thousand.
        trial: let the siblings try in some of their steps whether they are faster side by side, and take turns only if
            they are not; the gradients are the same. False, or ``CROSSOVER_TRIAL=0``, in one job: all take turns. For
            the mutex that the first state of a process makes; a mutex that is given has its own ``trial=``.

    On failure: a job that cannot join its siblings, or whose turns fail later, trains on without turns, with one
    warning that says why; `stats` repeats it as ``disabled_because``. Only a wrong ``CROSSOVER_GROUP`` is raised, by
    the first ``backward()``.

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
        self._trial = trial
        self.turn: Turn = mutex if mutex is not None else JobTurn(trial)

    @property
    def mutex(self) -> GPUMutex | None:
        """The mutex, or None before the job has joined."""
        return self.turn.mutex if isinstance(self.turn, JobTurn) else cast(GPUMutex, self.turn)

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, and the mutex's counters once the job has joined, see `GPUMutex.stats`.

        Not collective. The table is in docs/troubleshooting.md.
        """
        turns = {} if self.mutex is None else self.mutex.stats()
        return {**super().stats(), **turns}

    def close(self) -> None:
        """Leave the siblings for good, with all models of the process group; steps go on without turns.

        Not collective, but before another state of the group is used all ranks must have closed this one: ranks join
        together.
        """
        cast(JobTurn | GPUMutex, self.turn).close()

    def said(self, bucket: dist.GradBucket) -> dict[str, object]:
        """See `CodedState`."""
        # Whoever passes a mutex has named its group.
        siblings = environment.sibling_group() if isinstance(self.turn, JobTurn) else None
        return {**super().said(bucket), environment.GROUP: siblings}


def crossover_hook(
    state: CrossoverState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as DDP does, and give the job's turn to a sibling meanwhile.

    The turn is given back when the last bucket's compute is launched (on a GPU behind its last kernel) and taken
    again when the exchange is complete, before the optimizer and the next forward run. Same gradients as
    `reduce_scatter_all_gather_hook`.

    Args:
        state: made once per model; see `CrossoverState`.
        bucket: DDP's bucket.

    Returns:
        A future of the averaged bucket, completed by a thread of our own on gloo, at once on NCCL.

    On failure: as `reduce_scatter_all_gather_hook`; see also `CrossoverState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: after the abstract of CrossoverScheduler
    (arXiv 2103.07974); order, locking and switch points are our design.
    """
    return answered(
        state,
        bucket,
        CrossoverState,
        _REMEDY,
        lambda exchange: state._carry(bucket, exchange, crossover, _turn_of(state, bucket)),
    )


def crossover_wrapper(hook: Hook) -> Hook:
    """Put the turn around somebody else's hook: torch's ``fp16_compress_hook``, ``powerSGD_hook``, your own.

    The turn is given back when ``hook`` has launched the last bucket's compression, and taken again when all its
    futures are complete. What a hook computes in callbacks of its futures runs outside the turn. Gradients
    are those of ``hook``.

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
        def carry(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
            if state.codec is not None:
                raise UnsupportedConfigurationError(
                    f"expected codec=None for crossover_wrapper, got codec={state.codec!r}: the wrapped hook decides "
                    "what travels; leave codec out, or register crossover_hook"
                )
            compare = functools.partial(exchange.compare, bucket, state)
            # Not before backward has ended: any thread may issue the other hook's collectives. In Join's shadow passes,
            # which are no backward, behind the bucket, as on the ranks that have one.
            is_later = after_backward(compare)
            try:
                future = hook(state.hook_state, bucket)
                turn = _turn_of(state, bucket)
                return exchange.follow(future, bucket, wrapped, turn=turn, state=state)
            finally:
                if not is_later:
                    compare()

        def plain(*_: object) -> torch.futures.Future[torch.Tensor]:
            return hook(state.hook_state, bucket)

        return answered(state, bucket, CrossoverState, _REMEDY, carry, compares=False, plain=plain)

    return crossover_wrapped_hook


def _turn_of(state: CrossoverState, bucket: dist.GradBucket) -> Turn | None:
    """Return what takes turns; None for a model of some of the job's ranks, see [Note: one process, one job]."""
    turn = state.turn
    if isinstance(turn, JobTurn) and turn.mutex is None:
        turn.device = bucket.buffer().device
        group, job = resolve_group(state.process_group), resolve_group(None)
        if group.size() < job.size():
            if group not in _warned_partial and group.rank() == 0:
                logger.warning(
                    "a model's process group has %d of the job's %d ranks: a turn is the whole job's, so this model's "
                    "gradients travel inside the job's turns, and no sibling computes meanwhile",
                    group.size(),
                    job.size(),
                )
            _warned_partial.add(group)
            return None
    return turn


class JobTurn:
    """Turns on whatever device the first bucket is on: makes the mutex in the first exchange.

    Making it is collective and may block, so it happens on a thread of the link, where all ranks come to the same
    point: by messages in `request`, with the last bucket half-way or through; by NCCL and with one rank in `take` of
    `TurnLink`. The first iteration, which DDP runs as one big bucket, computes before the job has joined.

    Args:
        trial: whether the siblings try if turns pay.
    """

    def __init__(self, trial: bool) -> None:
        self._trial = trial
        self.device: torch.device | None = None
        self.mutex: GPUMutex | None = None
        self._is_closed = False

    @property
    def awaits_device(self) -> bool:
        """See `GPUMutex.awaits_device`; the first time is before the job has joined."""
        return not self._is_closed if self.mutex is None else self.mutex.awaits_device

    @property
    def mode(self) -> str:
        """See `GPUMutex.mode`."""
        return "untried" if self.mutex is None else self.mutex.mode

    def release(self) -> None:
        """Give the turn away."""
        if self.mutex is not None:
            self.mutex.release()

    def request(self) -> None:
        """Ask for the next turn early."""
        if not self._is_closed:
            self._joined().request()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the turn again; to join may block."""
        if self._is_closed:
            return True
        return (blocking or self.mutex is not None) and self._joined().acquire(blocking=blocking)

    def close(self) -> None:
        """Leave the siblings, or never join them."""
        self._is_closed = True
        if self.mutex is not None:
            self.mutex.close()

    def _joined(self) -> GPUMutex:
        if self.mutex is None:
            self.mutex = _mutex_of_job(self.device, self._trial)
        return self.mutex


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
