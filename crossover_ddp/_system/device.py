"""Find the device that a process uses, and a name for it that all processes of a machine share."""

import logging
import os

import torch

from . import environment
from .cuda_driver import cuda_driver
from .machine import machine

logger = logging.getLogger(__name__)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of an instance of one, that is the same in every process and container: its UUID."""
    try:
        return cuda_driver().name(device.index or 0)
    except (OSError, RuntimeError) as error:
        logger.debug("the driver does not name %s, torch does: %s", device, error)
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def default_device() -> torch.device:
    """Return the current GPU if this process uses one, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sibling_name(device: torch.device) -> str:
    """Return the name by which siblings know ``device``: a GPU's own, else ``CROSSOVER_DEVICE``, else the machine's.

    On some of the machine's cores it also names these: jobs that are pinned to different cores do not share a device.
    """
    if device.type == "cuda":
        return device_name(device)
    return os.environ.get(environment.DEVICE) or f"cpu-{machine()}{_cores()}"


def _cores() -> str:
    """Return the mask of the cores on which this process may run; nothing where these are all."""
    cores = os.sched_getaffinity(
        os.getpid()
    )  # of the main thread: others may be bound to one core each
    if len(cores) == os.cpu_count():
        return ""
    return f"-cores-{sum(1 << core for core in cores):x}"  # as taskset has it


def named_device(wanted: torch.device | str | int | None) -> tuple[torch.device, str]:
    """Return a torch device and the name under which its siblings know it.

    Args:
        wanted: also a GPU's index, or a name of the user's own; None for the default device.
    """
    if isinstance(wanted, str):
        try:
            found = torch.device(wanted)
        except RuntimeError:  # not one of torch's
            return torch.device("cpu"), wanted
    elif isinstance(wanted, int):
        found = torch.device("cuda", wanted)
    else:
        found = default_device() if wanted is None else wanted
    if found.type == "cuda":
        found = torch.device(
            "cuda", torch.cuda.current_device() if found.index is None else found.index
        )
    return found, sibling_name(found)
