"""What the states of all hooks have in common: they stay behind where a model is copied, and make checkpoints."""

import copy
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from crossover_ddp import CrossoverState, ElasticState, elastic_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness.oracles import heard
from tests.harness.training import WAYS, Training, batch

pytestmark = pytest.mark.usefixtures("process_group")
COPIES = {
    "deep": copy.deepcopy,
    "shallow": copy.copy,
    "pickled": lambda each: pickle.loads(pickle.dumps(each)),
}
# A rank that goes its own pace is pulled when the pull has come, and no two runs have the same bits.
IN_STEP = {"elastic": lambda *_: (ElasticState(2, "sync"), elastic_hook)}


@pytest.mark.defect("codecs-S11", "strangers-13", "turns-11")
@pytest.mark.parametrize("way", [name for name in WAYS if name != "split"])
def test_a_copied_or_pickled_state_stays_behind_with_a_warning(way: str) -> None:
    """And a copy of the model trains as one without a hook, beside one that goes on."""
    training, alone = (Training(IN_STEP.get(way, way)).run(steps) for steps in (3, 5))
    for kind, copied in COPIES.items():
        with heard() as said:
            assert copied(training.state) is None, kind
        assert [type(training.state).__name__ in each for each in said] == [True]
    for twin in (
        copy.deepcopy(training.model),
        AveragedModel(training.model),
        copy.deepcopy(training.model.module),
    ):
        twin(batch(0, 3)).square().mean().backward()
    assert torch.equal(training.run(2).values, alone.values)
    for each in (training, alone):
        each.close()


def test_one_optimizer_has_its_own_place_and_several_a_list() -> None:
    training = Training("crossover").run(1)
    state, optimizer = training.state, training.optimizer
    one, many, none = (state.checkpoint(given) for given in (optimizer, [optimizer], ()))
    assert one["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert [each["param_groups"] for each in many["optimizer"]] == [
        one["optimizer"]["param_groups"]
    ]
    assert none["optimizer"] == []
    for given, saved in (
        (optimizer, one),
        ([optimizer], many),
        ((), none),
        (optimizer, {**one, "epoch": 1}),
    ):
        state.restore(saved, given)


def test_optimizers_that_the_state_does_not_know_and_other_dictionaries_are_refused() -> None:
    for way, unknown in (
        ("crossover", r"6 of them \(.*weight.*\)"),
        ("muon", r"3 of them \(.*bias.*\)"),
    ):
        training = Training(way)
        with pytest.raises(
            UnsupportedConfigurationError, match=f"got none of {unknown}; pass optimizer="
        ):
            training.state.checkpoint()
    with pytest.raises(
        UnsupportedConfigurationError,
        match=r"no DDP model has a hook.*call model.register_comm_hook",
    ):
        CrossoverState().checkpoint()
    training = Training("crossover")
    with pytest.raises(ValueError, match=r"got keys \[\]; pass what checkpoint\(\) returned"):
        training.state.restore({}, training.optimizer)
    with pytest.raises(ValueError, match="with, 0, got 1; pass optimizer="):
        training.state.restore(training.state.checkpoint(()), training.optimizer)
