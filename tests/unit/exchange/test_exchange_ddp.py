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


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_a_copied_model_has_silently_lost_its_hook(copies: Callable[[Any], Any], calls: list[int]) -> None:
    """Not our choice: our documentation says so, and this test says when torch changes it."""
    model = copies(hooked(nn.Linear(3, 3)))
    backward(model)
    assert calls == []
    assert "deep copy" in (reduce_scatter_all_gather_hook.__doc__ or "")
