"""K-FAC in decoupled training: what cannot work together is refused with the remedy."""

from collections.abc import Callable
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


def twice(made: Training) -> None:
    DecoupledState(made.optimizer, kfac=made.kfac)
    other = torch.optim.SGD(made.model.parameters(), lr=0.1)
    DecoupledState(other, kfac=made.kfac)


def with_codec(made: Training) -> None:
    DecoupledState(made.optimizer, kfac=Training(codec=Int8()).kfac)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda made: DecoupledState(made.optimizer, kfac=made.kfac, codec=Int8()),
            "with kfac=, got codec=Int8",
        ),
        (
            lambda made: DecoupledState(made.optimizer, kfac=made.kfac, owners="layers"),
            "with kfac=, got codec=None and owners='layers'",
        ),
        (twice, "a new KFACState without a codec for each DecoupledState, got one that is part of another"),
        (with_codec, "a new KFACState without a codec for each DecoupledState, got one with a codec"),
    ],
    ids=["codec", "owners", "twice", "its own codec"],
)
def test_what_cannot_be_combined_is_refused(make: Callable[[Training], Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=message):
        make(Training())


def test_an_optimizer_is_left_alone_if_the_state_is_refused() -> None:
    made = Training()
    with pytest.raises(UnsupportedConfigurationError):
        with_codec(made)
    DecoupledState(made.optimizer, kfac=made.kfac)


def test_wrong_arguments_are_named() -> None:
    made = Training()
    with pytest.raises(TypeError, match="expected a KFACState, got kfac=SGD"):
        DecoupledState(made.optimizer, kfac=made.optimizer)  # type: ignore[arg-type]
    mutex = GPUMutex("kfac-decoupled-refused", device="cpu0")
    try:
        with pytest.raises(
            ValueError, match=r"expected one mutex, got mutex=.* and a KFACState with mutex=None"
        ):
            DecoupledState(made.optimizer, mutex=mutex, kfac=made.kfac)
    finally:
        mutex.close()
    with pytest.raises(
        ValueError, match="expected one process group, got a KFACState of another, of 1 ranks"
    ):
        DecoupledState(made.optimizer, dist.new_group([0]), kfac=made.kfac)


def test_its_own_hook_and_plans_are_refused() -> None:
    made = Training(decoupled=True).run(3)
    for plan, message in (
        (made.kfac.plan_factors, "got one that is part of a DecoupledState"),
        (made.state.plan_buckets, "expected a state without owners or kfac to plan for"),
        (made.state.plan_codec, "expected a state without owners or kfac to plan a codec for"),
    ):
        with pytest.raises(UnsupportedConfigurationError, match=message):
            plan()
    other = DistributedDataParallel(made.model.module)
    other.register_comm_hook(made.kfac, kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match="expected decoupled_hook for a KFACState"):
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
