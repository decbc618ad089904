"""Fixtures that several files of unit tests use."""

from tests.unit.turns.mutexes import group, make, threads

__all__ = ["group", "make", "threads"]
