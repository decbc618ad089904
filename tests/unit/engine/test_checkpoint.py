"""Checkpoints of one rank: which optimizers are in it, and which dictionaries are taken back."""

import pytest

from crossover_ddp import CrossoverState
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness.training import Training

pytestmark = pytest.mark.usefixtures("process_group")


def test_one_optimizer_has_its_own_place_and_several_a_list() -> None:
    training = Training("crossover").run(1)
    state, optimizer = training.state, training.optimizer
    one, many, none = (state.checkpoint(given) for given in (optimizer, [optimizer], ()))
    assert one["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert [each["param_groups"] for each in many["optimizer"]] == [one["optimizer"]["param_groups"]]
    assert none["optimizer"] == []
    for given, saved in ((optimizer, one), ([optimizer], many), ((), none), (optimizer, {**one, "epoch": 1})):
        state.restore(saved, given)


def test_optimizers_that_the_state_does_not_know_and_other_dictionaries_are_refused() -> None:
    for way, unknown in (("crossover", r"6 of them \(.*weight.*\)"), ("muon", r"3 of them \(.*bias.*\)")):
        training = Training(way)
        with pytest.raises(UnsupportedConfigurationError, match=f"got none of {unknown}; pass optimizer="):
            training.state.checkpoint()
    with pytest.raises(UnsupportedConfigurationError, match=r"got none; call model.register_comm_hook"):
        CrossoverState().checkpoint()
    training = Training("crossover")
    with pytest.raises(ValueError, match=r"got keys \[\]; pass what checkpoint\(\) returned"):
        training.state.restore({}, training.optimizer)
    with pytest.raises(ValueError, match="with, 0, got 1; pass optimizer="):
        training.state.restore(training.state.checkpoint(()), training.optimizer)
