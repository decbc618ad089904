"""The environment variables of this package. Each name stands here once."""

import os
from collections.abc import Mapping
from typing import Final

GROUP: Final = "CROSSOVER_GROUP"
"""Siblings are the jobs of one user that name the same group."""
DEFAULT_GROUP: Final = "default"
DEVICE: Final = "CROSSOVER_DEVICE"
"""Name of the device that siblings share, where it is not a GPU."""
DEVICE_ORDER: Final = "CROSSOVER_DEVICE_ORDER"
"""Has no effect any more. The next version removes it."""
TRIAL: Final = "CROSSOVER_TRIAL"
"""``0``: hooks always take turns, even if turns make steps slower."""
DISABLE: Final = "CROSSOVER_DISABLE"
"""Every state behaves as plain all-reduce."""
CHECK: Final = "CROSSOVER_CHECK"
"""Decoupled training checks every step."""
COMPARE_REPLICAS: Final = "CROSSOVER_COMPARE_REPLICAS"
"""``0``: a hook without a state does not compare the ranks' parameters."""
TIMELINE: Final = "CROSSOVER_TIMELINE"
"""Directory for the recordings of spans."""
RUN_JOB: Final = "CROSSOVER_RUN_JOB"
"""Set by `crossover-ddp run`: the mark by which it finds the processes of a job."""
FOR_USERS: Final = frozenset(
    {GROUP, DEVICE, DEVICE_ORDER, TRIAL, DISABLE, CHECK, COMPARE_REPLICAS, TIMELINE}
)


def sibling_group() -> str:
    """Return the name of the group of siblings from the environment."""
    return os.environ.get(GROUP, DEFAULT_GROUP)


def is_set(name: str, variables: Mapping[str, str] = os.environ, default: str = "") -> bool:
    """Return whether a switch is on: set, and neither empty nor ``0``."""
    return variables.get(name, default) not in ("", "0")
