"""K-FAC in decoupled training: what cannot work together is refused with the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import Int8
from crossover_ddp.comm_hooks import DecoupledState
from crossover_ddp.kfac_hooks import kfac_hook
from tests.harness.turn import RecordingTurn
from tests.multiprocess.kfac_training import WIDTH, Training

pytestmark = pytest.mark.usefixtures("process_group")
NEW = "a new KFACState without a codec for each DecoupledState, got one "
# What DecoupledState is given beside the optimizer and K-FAC.
REFUSED: list[tuple[Callable[[Training], dict[str, Any]], type[Exception], str]] = [
    (lambda _: {"codec": Int8()}, UnsupportedConfigurationError, "owners= and kfac= at most, got codec=Int8"),
    (lambda _: {"owners": "layers"}, UnsupportedConfigurationError, "got codec=None, owners='layers' and"),
    (lambda _: {"kfac": Training(codec=Int8()).kfac}, UnsupportedConfigurationError, NEW + "with a codec"),
    (lambda made: {"kfac": made.optimizer}, TypeError, "expected a KFACState, got kfac=SGD"),
    (
        lambda _: {"mutex": RecordingTurn()},
        ValueError,
        r"expected one mutex, got mutex=.* and a KFACState with mutex=None",
    ),
    (
        lambda _: {"process_group": dist.new_group([0])},
        ValueError,
        "expected one process group, got a KFACState of another, of 1 ranks",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_what_cannot_be_combined_is_refused_and_leaves_the_optimizer_alone(
    options: Callable[[Training], dict[str, Any]], kind: type[Exception], message: str
) -> None:
    made = Training()
    with pytest.raises(kind, match=message):
        DecoupledState(made.optimizer, **{"kfac": made.kfac} | options(made))
    DecoupledState(made.optimizer, kfac=made.kfac)
    with pytest.raises(UnsupportedConfigurationError, match=NEW + "that is part"):
        DecoupledState(torch.optim.SGD(made.model.parameters(), lr=0.1), kfac=made.kfac)


def test_the_states_of_both_go_on_together_and_its_own_hook_is_refused() -> None:
    made = Training(decoupled=True).run(4)
    assert made.state.stats()["deferred"], "the last update waits for the next forward"
    saved = made.kfac.state_dict()
    assert not made.state.stats()["deferred"]
    assert saved["steps"] == 4
    other = DistributedDataParallel(made.model.module)
    other.register_comm_hook(made.kfac, kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match="expected decoupled_hook for a KFACState"):
        other(torch.ones(5, WIDTH)).sum().backward()
    made.drop()
    made.kfac.load_state_dict(saved)
    made.state.close()
    made.kfac.close()
    made.step()
    assert made.kfac.steps == 5
