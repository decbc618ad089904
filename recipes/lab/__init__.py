"""The emulated cluster: ``python recipes/lab``, or ``from lab import Cluster, Job``.

See docs/lab.md.
"""

from .analysis import bound, rate_for
from .jobs import STEADY_MEMORY, Job, JobFailedError, RunResult, RunTimeoutError
from .link import measure
from .network import LabError, why_not_shaped
from .nodes import Cluster, clean
from .records import Run, draw_run, load_logs, load_run

__all__ = [
    "STEADY_MEMORY",
    "Cluster",
    "Job",
    "JobFailedError",
    "LabError",
    "Run",
    "RunResult",
    "RunTimeoutError",
    "bound",
    "clean",
    "draw_run",
    "load_logs",
    "load_run",
    "measure",
    "rate_for",
    "why_not_shaped",
]
