"""Hooks that are called while a CUDA graph is captured: refused after backward, whatever the hook."""

from typing import Any

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp._ddp import checks as ddp_checks
from tests.harness.training import Training
from tests.unit.ddp.fake_bucket import FakeBucket

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


class OnGpu:
    """A buffer as far as the check looks at it."""

    is_cuda = True


@pytest.mark.parametrize("way", ["crossover", "wrapped", "decoupled", "kfac"])
def test_a_captured_backward_is_refused_and_the_next_one_is_not(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, capturing = Training(way), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    real = ddp_checks._is_captured

    def on_gpu(bucket: Any) -> bool:
        return real(FakeBucket(OnGpu()))  # type: ignore[arg-type]

    monkeypatch.setattr(ddp_checks, "_is_captured", on_gpu)
    try:
        with pytest.raises(UnsupportedConfigurationError, match="while a graph is captured"):
            training.backward()
        capturing[0] = False
        training.model.zero_grad()
        training.backward()
        assert all(parameter.grad is not None for parameter in training.model.parameters())
    finally:
        training.close()


def test_nothing_is_asked_of_cuda_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise AssertionError("asked CUDA, which this machine need not have")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    ddp_checks.check_not_capturing(FakeBucket(torch.ones(3)))  # type: ignore[arg-type]
    ddp_checks.check_not_capturing((torch.ones(3), torch.ones(3)))
