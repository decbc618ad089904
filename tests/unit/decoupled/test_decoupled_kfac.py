"""K-FAC in decoupled training: what cannot work together is refused with the remedy."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import GPUMutex, UnsupportedConfigurationError
from crossover_ddp.codecs import Int8
from crossover_ddp.comm_hooks import DecoupledState
from crossover_ddp.kfac_hooks import kfac_hook
from tests.multiprocess.kfac_training import WIDTH, Training

pytestmark = pytest.mark.usefixtures("process_group")


def refuses(match: str, kind: type[Exception] = UnsupportedConfigurationError) -> Any:
    return pytest.raises(kind, match=match)


@pytest.fixture
def mutex() -> Iterator[GPUMutex]:
    made = GPUMutex("kfac-decoupled-refused", device="cpu0")
    yield made
    made.close()


def twice(made: Training, _: Any) -> None:
    DecoupledState(made.optimizer, kfac=made.kfac)
    DecoupledState(torch.optim.SGD(made.model.parameters(), lr=0.1), kfac=made.kfac)


REFUSED: dict[str, tuple[Callable[[Training, GPUMutex], Any], Any]] = {
    "codec": (
        lambda made, _: DecoupledState(made.optimizer, kfac=made.kfac, codec=Int8()),
        refuses("one of codec=, owners= and kfac= at most, got codec=Int8"),
    ),
    "owners": (
        lambda made, _: DecoupledState(made.optimizer, kfac=made.kfac, owners="layers"),
        refuses("at most, got codec=None, owners='layers' and"),
    ),
    "twice": (
        twice,
        refuses("a new KFACState without a codec for each DecoupledState, got one that is part"),
    ),
    "its own codec": (
        lambda made, _: DecoupledState(made.optimizer, kfac=Training(codec=Int8()).kfac),
        refuses("a new KFACState without a codec for each DecoupledState, got one with a codec"),
    ),
    "no K-FAC": (
        lambda made, _: DecoupledState(made.optimizer, kfac=made.optimizer),  # type: ignore[arg-type]
        refuses("expected a KFACState, got kfac=SGD", TypeError),
    ),
    "another mutex": (
        lambda made, mutex: DecoupledState(made.optimizer, mutex=mutex, kfac=made.kfac),
        refuses(r"expected one mutex, got mutex=.* and a KFACState with mutex=None", ValueError),
    ),
    "another group": (
        lambda made, _: DecoupledState(made.optimizer, dist.new_group([0]), kfac=made.kfac),
        refuses("expected one process group, got a KFACState of another, of 1 ranks", ValueError),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_refused_and_leaves_the_optimizer_alone(
    name: str, mutex: GPUMutex
) -> None:
    made, (make, refused) = Training(), REFUSED[name]
    with refused:
        make(made, mutex)
    if name != "twice":
        DecoupledState(made.optimizer, kfac=made.kfac)


def test_its_own_hook_is_refused() -> None:
    made = Training(decoupled=True).run(3)
    other = DistributedDataParallel(made.model.module)
    other.register_comm_hook(made.kfac, kfac_hook)
    with refuses("expected decoupled_hook for a KFACState"):
        other(torch.ones(5, WIDTH)).sum().backward()


def test_the_states_of_both_go_on_together() -> None:
    made = Training(decoupled=True).run(4)
    assert made.state.stats()["deferred"], "the last update waits for the next forward"
    saved = made.kfac.state_dict()
    assert not made.state.stats()["deferred"]
    assert saved["steps"] == 4
    made.kfac.load_state_dict(saved)
    made.state.close()
    made.kfac.close()
    made.step()
    assert made.kfac.steps == 5
