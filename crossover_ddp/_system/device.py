"""Finds the device that a process uses, and its name, which is the same in all processes."""

import logging
import os

import torch

from . import environment
from .cuda_driver import cuda_driver
from .machine import machine

logger = logging.getLogger(__name__)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU or MIG instance, with its UUID. It is the same in all processes."""
    try:
        return cuda_driver().name(device.index or 0)
    except (OSError, RuntimeError) as error:
        logger.debug("the driver has no name for %s, torch's is used: %s", device, error)
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def default_device() -> torch.device:
    """Return the current GPU if this process has initialized CUDA, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sibling_name(device: torch.device) -> str:
    """Return the name by which siblings know ``device``.

    For a GPU, the name contains its UUID. For a CPU, it is the value of ``CROSSOVER_DEVICE``. If
    that is not set, it is the name of the machine, followed by a mask of cores if the process is
    pinned to some of them, since jobs that are pinned to different cores do not share a device.
    """
    if device.type == "cuda":
        return device_name(device)
    return os.environ.get(environment.DEVICE) or f"cpu-{machine()}{_cores()}"


def _cores() -> str:
    """Return a suffix with the mask of this process's cores, or "" if it may use all cores."""
    # These are the main thread's cores. OpenMP may have bound other threads to one core each.
    cores = os.sched_getaffinity(os.getpid())
    if len(cores) == os.cpu_count():
        return ""
    return f"-cores-{sum(1 << core for core in cores):x}"  # the format of taskset


def named_device(wanted: torch.device | str | int | None) -> tuple[torch.device, str]:
    """Return a torch device and the name by which siblings know it.

    Args:
        wanted: a device, its name, or a GPU's index. Any other text is a name that the user chose
            for a device that is not a GPU. None means the default device.
    """
    if isinstance(wanted, str):
        try:
            found = torch.device(wanted)
        except RuntimeError:  # the text is not a torch device, but a name that the user chose
            return torch.device("cpu"), wanted
    elif isinstance(wanted, int):
        found = torch.device("cuda", wanted)
    else:
        found = default_device() if wanted is None else wanted
    if found.type == "cuda":
        index = torch.cuda.current_device() if found.index is None else found.index
        found = torch.device("cuda", index)
    return found, sibling_name(found)
