"""Layers on the meta device get memory and initial values. Others keep theirs."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.pipeline.chain import LayerChain
from crossover_ddp.pipeline.materialize import materialize


def materialized(layers: Sequence[nn.Module], device: str) -> LayerChain:
    chain = LayerChain(*layers)
    materialize(chain, device)
    return chain


class Tied(nn.Module):
    """Two layers that share a weight, with a constructor that changes the values of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.first.bias, 3.0)
        self.get_buffer("steps").fill_(7)


class Unset(nn.Module):
    """A layer without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


def test_layers_are_those_that_the_constructors_make() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4), Tied(), nn.ReLU()]
    layers[0].get_parameter("bias").requires_grad_(False)
    chain = materialized(layers, "cpu")
    expected = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4), Tied())

    assert [*chain] == layers
    for (name, ours), theirs in zip(
        chain.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert (ours.device.type, ours.dtype, ours.shape) == ("cpu", theirs.dtype, theirs.shape)
        if "weight" not in name and "bias" not in name:
            torch.testing.assert_close(ours, theirs)
    assert [(p.requires_grad, type(p)) for p in layers[0].parameters()] == [
        (True, nn.Parameter),
        (False, nn.Parameter),
    ]
    # The bounds of nn.Linear's initial values.
    for linear in (layer for layer in chain.modules() if isinstance(layer, nn.Linear)):
        assert linear.weight.std() > 0
        assert linear.weight.abs().max() <= 0.5
    torch.testing.assert_close(layers[1].get_parameter("weight"), torch.ones(4))


def test_shared_parameters_stay_shared_and_parents_set_the_values_of_children() -> None:
    with torch.device("meta"):
        tied = Tied()
    (made,) = materialized([tied], "cpu")
    assert made is tied
    assert tied.last.weight is tied.first.weight
    assert tied.first.bias.tolist() == [3.0] * 4
    assert tied.get_buffer("steps") == 7


def test_a_parameter_that_layers_share_has_the_values_of_the_first() -> None:
    with torch.device("meta"):
        embedding, head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
    head.weight = embedding.weight
    materialized([embedding, head], "cpu")
    assert head.weight is embedding.weight
    # nn.Linear's would be at most 0.125.
    assert 0.9 < embedding.weight.std() < 1.1


def test_layers_with_values_keep_them() -> None:
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    full = nn.Sequential(nn.Linear(2, 2), Unset())
    before = {name: value.clone() for name, value in full.state_dict().items()}
    materialized([full, empty], "cpu")
    torch.testing.assert_close(dict(full.state_dict()), before, rtol=0, atol=0)
    assert not empty.weight.is_meta


def test_modules_that_cannot_be_initialized_are_named() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Unset()), Unset()]
    with pytest.raises(
        UnsupportedConfigurationError,
        match=r"to have reset_parameters\(\), got none of 1\.1 \(Unset\), 2 \(Unset\); write one",
    ):
        materialized(layers, "cpu")
    assert all(p.is_meta for layer in layers for p in layer.parameters()), "nothing was changed"
