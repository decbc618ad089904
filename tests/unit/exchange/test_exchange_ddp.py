"""What DDP does around a hook, row by row of what it is known for: the right result or a clear error."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


@pytest.fixture
def calls() -> list[int]:
    """The numbers of the hook's calls."""
    seen.clear()
    return seen


seen: list[int] = []


def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    seen.append(len(seen))
    return reduce_scatter_all_gather_hook(group, bucket)


def hooked(module: nn.Module, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(module, **options)
    model.register_comm_hook(None, hook)
    return model


def backward(model: nn.Module, x: torch.Tensor | None = None) -> None:
    model(torch.ones(2, 3) if x is None else x).sum().backward()


def test_signature_is_what_ddp_demands() -> None:
    signature = inspect.signature(reduce_scatter_all_gather_hook)
    assert inspect.isfunction(reduce_scatter_all_gather_hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


@pytest.mark.parametrize("group", [-100, "world", object()])
def test_what_is_no_group_of_ours_raises_after_backward(group: object) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(group, reduce_scatter_all_gather_hook)
    with pytest.raises(
        UnsupportedConfigurationError, match="expected a process group that this process belongs"
    ):
        backward(model)


def test_the_first_step_is_one_bucket_and_the_next_ones_are_real(calls: list[int]) -> None:
    model = hooked(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), bucket_cap_mb=1e-6)
    backward(model)
    first = len(calls)
    backward(model)
    assert first < len(calls) - first


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_a_copied_model_has_silently_lost_its_hook(copies: Callable[[Any], Any], calls: list[int]) -> None:
    """Not our choice: our documentation says so, and this test says when torch changes it."""
    model = copies(hooked(nn.Linear(3, 3)))
    backward(model)
    assert calls == []
    assert "deep copy" in (reduce_scatter_all_gather_hook.__doc__ or "")


@pytest.mark.parametrize("outside", [True, False])
def test_a_compiled_model_calls_the_hook_and_has_the_same_gradients(outside: bool, calls: list[int]) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    plain = DistributedDataParallel(copy.deepcopy(module))
    backward(plain)
    if outside:
        model = torch.compile(hooked(module), backend="eager")
    else:
        model = hooked(torch.compile(module, backend="eager"))  # type: ignore[arg-type]
    backward(model)  # type: ignore[arg-type]
    assert calls
    for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert torch.equal(got.grad, expected.grad)


def test_the_python_reducer_is_refused_after_backward() -> None:
    # Its own way of patching: what pytest's monkeypatch puts back, the module no longer finds.
    with pytest.importorskip("torch._dynamo.config").patch(optimize_ddp="python_reducer"):
        model = hooked(nn.Linear(3, 3))
        with pytest.raises(UnsupportedConfigurationError, match="python_reducer"):
            backward(model)
