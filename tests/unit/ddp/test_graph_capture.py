"""Hooks that are called while a CUDA graph is captured: refused after backward, whatever the hook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    KFACState,
    UnsupportedConfigurationError,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    kfac_hook,
)
from crossover_ddp._ddp import checks as ddp_checks
from tests.harness.groups import new_group
from tests.unit.ddp.fake_bucket import FakeBucket

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]

Registered = tuple[DistributedDataParallel, Callable[[], None]]


class OnGpu:
    """A buffer as far as the check looks at it."""

    is_cuda = True


def model_with(make: Callable[[DistributedDataParallel], tuple[Any, Any]]) -> Registered:
    model = DistributedDataParallel(torch.nn.Linear(4, 2), gradient_as_bucket_view=True)
    state, hook = make(model)
    model.register_comm_hook(state, hook)
    return model, state.close


def sgd(model: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


HOOKS = {
    "crossover": lambda model: (CrossoverState(), crossover_hook),
    "wrapper": lambda model: (CrossoverState(), crossover_wrapper(default_hooks.allreduce_hook)),
    "decoupled": lambda model: (DecoupledState(sgd(model)), decoupled_hook),
    "kfac": lambda model: (KFACState(model, kl_clip=None), kfac_hook),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_captured_backward_is_refused_and_the_next_one_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())
    model, close = model_with(HOOKS[name])
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    real = ddp_checks._is_captured

    def on_gpu(bucket: Any) -> bool:
        return real(FakeBucket(OnGpu()))  # type: ignore[arg-type]

    monkeypatch.setattr(ddp_checks, "_is_captured", on_gpu)
    try:
        with pytest.raises(UnsupportedConfigurationError, match="while a graph is captured"):
            model(torch.ones(3, 4)).sum().backward()
        capturing[0] = False
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        close()


def test_nothing_is_asked_of_cuda_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise AssertionError("asked CUDA, which this machine need not have")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    ddp_checks.check_not_capturing(FakeBucket(torch.ones(3)))  # type: ignore[arg-type]
    ddp_checks.check_not_capturing((torch.ones(3), torch.ones(3)))
