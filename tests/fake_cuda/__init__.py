"""A CUDA device and NCCL on the CPU, for torch's CUDA build; see README.md."""

import os
from typing import Final

from .build import build, why_not

DEVICES: Final = 2

__all__ = ["DEVICES", "build", "environment", "is_here", "why_not"]


def is_here() -> bool:
    """Say whether this process runs on the fake device."""
    return "crossover_ddp/fake_cuda" in os.environ.get("LD_PRELOAD", "")


def environment(devices: int = DEVICES, **knobs: int) -> dict[str, str]:
    """Return the variables with which a process, and its children, start on the fake device.

    Args:
        devices: How many devices it has.
        knobs: ``kernel_us=300`` sets ``FAKE_KERNEL_US``; see README.md.
    """
    libraries = build()
    runtime = next(libraries.glob("libcudart.so.*"))
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_PRELOAD": f"{runtime}:{libraries / 'libnccl.so.2'}",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), before])),
        "FAKE_DEVICES": str(devices),
        **{f"FAKE_{name.upper()}": str(value) for name, value in knobs.items()},
    }
