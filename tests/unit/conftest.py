"""Fixtures that several files of unit tests use."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.unit.turns.mutexes import group, join, make, several_jobs_in_this_process, threads

__all__ = ["fresh_compiler", "group", "join", "make", "several_jobs_in_this_process", "threads"]


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Where tqdm is installed torch's compiler uses it, and it starts a thread for good.
    if importlib.util.find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
