"""Fixtures that several files of unit tests use."""

from tests.unit.turns.joined_segments import join
from tests.unit.turns.mutexes import group, make, several_jobs_in_this_process, threads

__all__ = ["group", "join", "make", "several_jobs_in_this_process", "threads"]
