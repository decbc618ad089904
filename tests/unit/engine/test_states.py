"""What the states of all hooks have in common."""

import copy
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from crossover_ddp import ElasticState, elastic_hook
from tests.harness.oracles import heard
from tests.harness.training import WAYS, Training, batch

COPIES = {"deep": copy.deepcopy, "shallow": copy.copy, "pickled": lambda each: pickle.loads(pickle.dumps(each))}


# A rank that goes its own pace is pulled when the pull has come, and no two runs have the same bits.
IN_STEP = {"elastic": lambda *_: (ElasticState(2, "sync"), elastic_hook)}


@pytest.mark.defect("codecs-S11", "strangers-13", "turns-11")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("way", [name for name in WAYS if name != "split"])
def test_a_copied_or_pickled_state_stays_behind_with_a_warning(way: str) -> None:
    """And a copy of the model trains as one without a hook, beside one that goes on."""
    training, alone = (Training(IN_STEP.get(way, way)).run(steps) for steps in (3, 5))
    for kind, copied in COPIES.items():
        with heard() as said:
            assert copied(training.state) is None, kind
        assert [type(training.state).__name__ in each for each in said] == [True]
    for twin in (copy.deepcopy(training.model), AveragedModel(training.model), copy.deepcopy(training.model.module)):
        twin(batch(0, 3)).square().mean().backward()
    assert torch.equal(training.run(2).values, alone.values)
    for each in (training, alone):
        each.close()
