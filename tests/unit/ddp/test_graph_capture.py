"""Hooks that are called while a CUDA graph is captured: refused after backward, whatever the hook."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from tests.harness.training import Training

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


@pytest.mark.parametrize("way", ["crossover", "wrapped", "decoupled", "kfac"])
def test_a_captured_backward_is_refused_and_on_a_cpu_nothing_is_asked_of_cuda(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Any] = []
    training = Training(way, around=lambda hook: hooks.append(hook) or hook)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = SimpleNamespace(buffer=lambda: SimpleNamespace(is_cuda=True))
    with pytest.raises(UnsupportedConfigurationError, match="while a graph is captured"):
        hooks[0](training.state, on_gpu).wait()
    training.run(2).close()
