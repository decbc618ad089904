"""The turn of this process's job, for hooks whose users gave no mutex.

[Note: one process, one job]
A turn belongs to a job, all its ranks, whatever process groups its models use. So all hooks of a process share one
mutex, whose ranks are those of the default process group. A model on a group of some of these ranks cannot give the
job's turn away, since the job's other ranks would not: its exchange runs inside the turn. Our design.
"""

import functools
import logging
import threading
import weakref
from typing import cast

import torch
import torch.distributed as dist

from ._cuda_driver import MPS_ENABLED, cuda_driver
from ._ddp_checks import resolve_group
from ._endings import on_destruction
from .gpu_mutex import GPUMutex

logger = logging.getLogger(__name__)

_joining = threading.Lock()
_mutexes: "weakref.WeakKeyDictionary[dist.ProcessGroup, GPUMutex]" = weakref.WeakKeyDictionary()
_told_partial: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


class JobTurn:
    """Turns on whatever device the first bucket is on: makes the mutex at the end of the first exchange.

    Making it is collective and may block, so it happens on the engine's worker, where all ranks come to the
    same point; the first iteration, which DDP runs as one big bucket, computes before the job has joined.

    Args:
        process_group: of the model; None for the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self._is_partial = False
        self.device: torch.device | None = None
        self.mutex: GPUMutex | None = None

    @property
    def shared(self) -> bool:
        """Whether a sibling is present, as far as is known."""
        return not self._is_partial and (self.mutex is None or self.mutex.shared)

    def release(self) -> None:
        """Give the turn away."""
        if self.mutex is not None:
            self.mutex.release()

    def request(self) -> None:
        """Ask for the next turn early."""
        if (mutex := self._joined()) is not None:
            mutex.request()

    def acquire(self, *, ahead: bool = False) -> None:
        """Take the turn again."""
        if (mutex := self._joined()) is not None:
            mutex.acquire(ahead=ahead)

    def _joined(self) -> GPUMutex | None:
        """Return the process's mutex; None for a model of some of the job's ranks."""
        if self.mutex is None and not self._is_partial:
            group = resolve_group(cast(dist.ProcessGroup, self._process_group))
            self._is_partial = group.size() < resolve_group(None).size()
            if self._is_partial:
                _tell_partial(group)
            else:
                self.mutex = _mutex_of_job(self.device)
        return self.mutex


def _mutex_of_job(device: torch.device | None) -> GPUMutex:
    """Return the mutex of all models of this process, see [Note: one process, one job]."""
    group = resolve_group(None)
    with _joining:  # two models may end their first exchanges at the same time
        mutex = _mutexes.get(group)
        # One that failed stays: another rank's may still work, and making one is collective. One that was closed
        # does not, failed or not: a rank whose peers are quicker to close may find that they have left.
        if mutex is None or mutex.closed:
            mutex = _mutexes[group] = GPUMutex.for_hook(device, group)
            _warn_without_mps(device, group)
            # A process may live on for long; at its exit the kernel tells siblings in any case.
            on_destruction(group, functools.partial(_close, weakref.ref(mutex)), at_exit=False)
        return mutex


def _warn_without_mps(device: torch.device | None, group: dist.ProcessGroup) -> None:
    """Say that turns gain little where NCCL's kernels cannot run beside a sibling's."""
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


def _tell_partial(group: dist.ProcessGroup) -> None:
    """Say once, on one rank of the group, why it takes no turns."""
    if group not in _told_partial and group.rank() == 0:
        logger.warning(
            "a model's process group has %d of the job's %d ranks: a turn is the whole job's, so this model's "
            "gradients travel inside the job's turns, and no sibling computes meanwhile",
            group.size(),
            resolve_group(None).size(),
        )
    _told_partial.add(group)


def _close(mutex: "weakref.ref[GPUMutex]") -> None:
    if (alive := mutex()) is not None:
        alive.close()
