"""Slices of the flat model: read, written and added to in place, also where a tensor has got other memory."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._averaging.replica import FlatBlock, blocks_of
from crossover_ddp._ddp.layout import Span


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 5))


def block_of(model: nn.Module) -> FlatBlock:
    (block,) = blocks_of(cast(DistributedDataParallel, SimpleNamespace(module=model)))
    return block


def flat(model: nn.Module) -> torch.Tensor:
    tensors = [*model.parameters(), *model.buffers()]
    return torch.cat([tensor.detach().flatten() for tensor in tensors if tensor.is_floating_point()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_slice_holds_the_elements_of_the_flat_model(dtype: torch.dtype) -> None:
    model = network()
    block, whole = block_of(model), flat(model)
    assert block.numel == len(whole)
    for start in range(0, block.numel, 7):
        for stop in (start, start + 1, min(start + 40, block.numel), block.numel):
            values = torch.empty(stop - start, dtype=dtype)
            block.pack(Span(start, stop), values)
            assert torch.equal(values, whole[start:stop].to(dtype))


@torch.no_grad()
def test_slices_are_written_in_place() -> None:
    model = network()
    block, expected, addresses = block_of(model), flat(model), [p.data_ptr() for p in model.parameters()]
    span = Span(50, 70)
    for _ in range(2):
        block.add(span, torch.full((20,), 2.0))
        expected[50:70] += 2
        assert torch.equal(flat(model), expected)
    block.unpack(span, torch.arange(20.0))
    expected[50:70] = torch.arange(20.0)
    assert torch.equal(flat(model), expected)
    assert [p.data_ptr() for p in model.parameters()] == addresses


@torch.no_grad()
def test_a_tensor_with_other_memory_is_noticed() -> None:
    """As ``load_state_dict(assign=True)`` has it, ``p.data = …``, or a module that replaces its buffer."""
    model = network()
    block, whole = block_of(model), Span(0, block_of(model).numel)
    block.add(whole, torch.ones(whole.numel))
    convolution, norm, linear = cast(tuple[nn.Conv2d, nn.BatchNorm2d, nn.Linear], tuple(model))
    convolution.weight.data = torch.zeros_like(convolution.weight)
    norm.running_mean = torch.full((3,), 7.0)
    linear.weight.data = linear.weight.data.clone()
    expected = flat(model) + 1
    block.add(whole, torch.ones(whole.numel))
    assert torch.equal(flat(model), expected)
    values = torch.empty(whole.numel)
    block.pack(whole, values)
    assert torch.equal(values, expected)
