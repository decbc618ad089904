"""Reads the timeout of a process group."""

import contextlib
from typing import Any, Final

import torch.distributed as dist

UNKNOWN_TIMEOUT_S: Final = 600.0
"""The shorter of torch's defaults: 10 minutes for NCCL, 30 for gloo."""


def group_timeout_s(group: dist.ProcessGroup | None) -> float:
    """Return the timeout of a group's collectives, in seconds.

    This is the shortest timeout of the group's backends, or `UNKNOWN_TIMEOUT_S` if no backend has
    one. Torch has no public function for it, so it is read from the backends' options.
    """
    found: list[float] = []
    for device in getattr(group, "_device_types", ()):
        # A device type may have no backend, and the group may not be torch's.
        with contextlib.suppress(AttributeError, RuntimeError):
            backend: Any = group._get_backend(device)  # type: ignore[union-attr]
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            found.append(backend.options._timeout.total_seconds())
    return min(found, default=UNKNOWN_TIMEOUT_S)
