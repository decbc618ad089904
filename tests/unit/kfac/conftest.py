"""A compiler that nobody has used."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Where tqdm is installed torch's compiler uses it, and it starts a thread for good.
    if importlib.util.find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
