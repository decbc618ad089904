"""The environment variables of this package. Each name is defined only here."""

import os
from collections.abc import Mapping
from typing import Final

GROUP: Final = "CROSSOVER_GROUP"
"""The name of the job's group. Jobs of one user are siblings if they name the same group."""
DEFAULT_GROUP: Final = "default"
DEVICE: Final = "CROSSOVER_DEVICE"
"""The name of the device that siblings share, if it is not a GPU."""
DEVICE_ORDER: Final = "CROSSOVER_DEVICE_ORDER"
"""This variable no longer has an effect. The next version will remove it."""
TRIAL: Final = "CROSSOVER_TRIAL"
"""If ``0``, hooks always take turns, even if turns make steps slower."""
DISABLE: Final = "CROSSOVER_DISABLE"
"""If set, every state behaves like plain all-reduce."""
CHECK: Final = "CROSSOVER_CHECK"
"""If set, decoupled training checks every step."""
COMPARE_REPLICAS: Final = "CROSSOVER_COMPARE_REPLICAS"
"""If ``0``, a hook without a state does not compare the ranks' parameters."""
LEVELS: Final = "CROSSOVER_LEVELS"
"""``flat``, or a number of a node for each rank, such as ``0,0,1,1``. Default: ``auto``, which finds
the ranks that share a node."""
TIMELINE: Final = "CROSSOVER_TIMELINE"
"""The directory for recordings of spans."""
RUN_JOB: Final = "CROSSOVER_RUN_JOB"
"""The mark by which `crossover-ddp run`, which sets it, finds the processes of a job."""
FOR_USERS: Final = frozenset(
    {GROUP, DEVICE, DEVICE_ORDER, TRIAL, DISABLE, CHECK, COMPARE_REPLICAS, LEVELS, TIMELINE}
)


def sibling_group() -> str:
    """Return the name of the siblings' group, from the environment or the default."""
    return os.environ.get(GROUP, DEFAULT_GROUP)


def is_set(name: str, variables: Mapping[str, str] = os.environ, default: str = "") -> bool:
    """Return whether a switch is on. An unset variable has the value ``default``.

    A switch is off if its value is empty or ``0``.
    """
    return variables.get(name, default) not in ("", "0")
