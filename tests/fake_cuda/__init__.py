"""A CUDA device and NCCL on the CPU, for torch's CUDA build; see README.md."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Final
from unittest import mock

from .build import build, why_not

DEVICES: Final = 2

__all__ = ["DEVICES", "build", "contexts", "environment", "is_here", "late", "why_not"]


def is_here() -> bool:
    """Return whether this process runs on the fake device."""
    return "crossover_ddp/fake_cuda" in os.environ.get("LD_PRELOAD", "")


def environment(devices: int = DEVICES, **knobs: int) -> dict[str, str]:
    """Return the variables with which a process and its children start on the fake device.

    Args:
        devices: the number of devices.
        knobs: ``kernel_us=300`` sets ``FAKE_KERNEL_US``; see README.md.
    """
    libraries = build()
    names = ("cudart", "nccl", "nvrtc")
    preloaded = [str(path) for name in names for path in libraries.glob(f"lib{name}.so.*")]
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_PRELOAD": os.pathsep.join(preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), before])),
        "FAKE_DEVICES": str(devices),
        **{f"FAKE_{name.upper()}": str(value) for name, value in knobs.items()},
    }


@contextlib.contextmanager
def late(**knobs: int) -> Iterator[None]:
    """Set knobs for this process's launches in the block, for instance ``kernel_us=300``."""
    with mock.patch.dict(
        os.environ, {f"FAKE_{name.upper()}": str(value) for name, value in knobs.items()}
    ):
        yield


def contexts() -> list[int]:
    """Return the devices on which this process has a context."""
    mask = ctypes.CDLL(None).fake_contexts()
    return [device for device in range(mask.bit_length()) if mask >> device & 1]
