"""How long a process group's collectives wait before they fail, and how patient a rank may be because of that.

A rank that waits for a sibling's turn keeps its peers waiting in their next collective. Torch has no public way to ask
a group for its timeout, so the options of its backends are read, where they have any. Our design.
"""

import datetime
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

UNKNOWN_TIMEOUT_S = 600.0  # the shorter one of torch's defaults (NCCL 10 minutes, gloo 30)
_PATIENCE_SHARE = 0.25


def group_timeout_s(process_group: "ProcessGroup | None") -> float:
    """Return the shortest timeout of the group's backends; `UNKNOWN_TIMEOUT_S` where none can be read.

    Args:
        process_group: None for the default group.
    """
    import torch.distributed as dist

    group: Any = process_group if process_group is not None else dist.group.WORLD
    found = [_backend_timeout_s(group, device) for device in getattr(group, "_device_types", ())]
    return min([each for each in found if each is not None], default=UNKNOWN_TIMEOUT_S)


def _backend_timeout_s(group: Any, device: Any) -> float | None:
    try:
        backend = group._get_backend(device)
    except (AttributeError, RuntimeError):  # a device type without a backend, or a group that is not torch's
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else None


def patience_limit_s(process_group: "ProcessGroup | None") -> float:
    """Return how long a rank may wait for siblings in one `acquire`: a quarter of its own group's timeout.

    Infinite for a job of one process: no peer waits for it in a collective.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return math.inf
    group: Any = process_group if process_group is not None else dist.group.WORLD
    return _PATIENCE_SHARE * group_timeout_s(group) if group.size() > 1 else math.inf
