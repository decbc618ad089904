"""Real ranks for tests: whatever goes wrong in any of them turns the test red, in its own words.

``in_ranks`` runs a test in every rank, ``run_ranks`` and ``run_jobs`` a function, ``spawn_script`` a script as torchrun
would, ``single_process_group`` needs no process at all. ``leaks`` finds what a test has left behind,
``documents`` the code that a document shows.
"""

from . import documents
from .groups import single_process_group
from .ranks import Job, RankError, close_pools, in_ranks, run_jobs, run_ranks
from .scripts import ScriptError, spawn_script

__all__ = [
    "Job",
    "RankError",
    "ScriptError",
    "close_pools",
    "documents",
    "in_ranks",
    "run_jobs",
    "run_ranks",
    "single_process_group",
    "spawn_script",
]
