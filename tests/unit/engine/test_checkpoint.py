"""Checkpoints of one rank: which optimizers are in it, and which dictionaries are taken back."""

from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp import CrossoverState, MuonState, crossover_hook, muon_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness.networks import mlp
from tests.harness.training import hooked

pytestmark = pytest.mark.usefixtures("process_group")


def crossover() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    state, network = CrossoverState(), mlp(4, 4, seed=1)
    model = hooked(network, crossover_hook, state)
    return state, model, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def test_one_optimizer_has_its_own_place_and_several_a_list() -> None:
    state, model, optimizer = crossover()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    one, many, none = (state.checkpoint(given) for given in (optimizer, [optimizer], ()))
    assert one["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert [each["param_groups"] for each in many["optimizer"]] == [one["optimizer"]["param_groups"]]
    assert none["optimizer"] == []
    for given, saved in ((optimizer, one), ([optimizer], many), ((), none), (optimizer, {**one, "epoch": 1})):
        state.restore(saved, given)


def test_optimizers_that_the_state_does_not_know_are_not_left_out() -> None:
    state, _model, _ = crossover()
    with pytest.raises(
        UnsupportedConfigurationError, match=r"got none of 2 of them \(.*weight.*\); pass optimizer="
    ):
        state.checkpoint()
    network = mlp(4, 4, seed=1)
    muon = torch.optim.Muon([each for each in network.parameters() if each.ndim == 2])
    other = MuonState(muon)
    _other_model = hooked(network, muon_hook, other)
    with pytest.raises(UnsupportedConfigurationError, match=r"got none of 1 of them \(.*bias\)"):
        other.checkpoint()


def test_a_state_without_a_model_and_other_dictionaries_are_refused() -> None:
    with pytest.raises(UnsupportedConfigurationError, match=r"got none; call model.register_comm_hook"):
        CrossoverState().checkpoint()
    state, _model, optimizer = crossover()
    with pytest.raises(ValueError, match=r"got keys \[\]; pass what checkpoint\(\) returned"):
        state.restore({}, optimizer)
    with pytest.raises(ValueError, match="with, 0, got 1; pass optimizer="):
        state.restore(state.checkpoint(()), optimizer)
