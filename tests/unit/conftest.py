"""Fixtures that several files of unit tests use."""

from tests.unit.turns.mutexes import group, join, make, several_jobs_in_this_process, threads

__all__ = ["group", "join", "make", "several_jobs_in_this_process", "threads"]
