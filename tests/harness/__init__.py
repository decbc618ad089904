"""Real ranks for tests: a failure in any rank fails the test, with that rank's own traceback.

- ``in_ranks`` runs a test in every rank.
- ``run_ranks`` and ``run_jobs`` call a function in every rank.
- ``spawn_script`` starts a script as torchrun would.
- ``single_process_group`` makes a process group without another process.
- ``leaks`` finds threads, processes, variables and files that a test has left behind.
- ``documents`` reads the code that a document shows.
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
