"""K-FAC in decoupled training: what cannot work together is refused with the remedy."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import GPUMutex, UnsupportedConfigurationError
from crossover_ddp.codecs import Int8
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness.groups import single_process_group


class Made:
    """A model, its optimizer, and a KFACState."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.kfac = KFACState(self.model, self.optimizer, **options)

    def step(self) -> None:
        self.model(torch.ones(5, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    with single_process_group() as made:
        yield made


def twice(made: Made) -> None:
    DecoupledState(made.optimizer, kfac=made.kfac)
    other = torch.optim.SGD(made.model.parameters(), lr=0.1)
    DecoupledState(other, kfac=made.kfac)


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
        (
            lambda made: DecoupledState(made.optimizer, kfac=Made(codec=Int8()).kfac),
            "a new KFACState without a codec for each DecoupledState, got one with a codec",
        ),
    ],
    ids=["codec", "owners", "twice", "its own codec"],
)
def test_what_cannot_be_combined_is_refused(make: Callable[[Made], Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=message):
        make(Made())


def test_an_optimizer_is_left_alone_if_the_state_is_refused() -> None:
    made = Made()
    with pytest.raises(UnsupportedConfigurationError):
        DecoupledState(made.optimizer, kfac=Made(codec=Int8()).kfac)
    DecoupledState(made.optimizer, kfac=made.kfac)


def test_wrong_arguments_are_named() -> None:
    made = Made()
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
    alone = dist.new_group([0])
    with pytest.raises(
        ValueError, match="expected one process group, got a KFACState of another, of 1 ranks"
    ):
        DecoupledState(made.optimizer, alone, kfac=made.kfac)


def test_its_own_hook_and_plans_are_refused() -> None:
    made = Made()
    state = DecoupledState(made.optimizer, kfac=made.kfac)
    made.model.register_comm_hook(state, decoupled_hook)
    for _ in range(3):
        made.step()
    with pytest.raises(UnsupportedConfigurationError, match="got one that is part of a DecoupledState"):
        made.kfac.plan_factors()
    with pytest.raises(
        UnsupportedConfigurationError, match="expected a state without owners or kfac to plan for"
    ):
        state.plan_buckets()
    with pytest.raises(
        UnsupportedConfigurationError, match="expected a state without owners or kfac to plan a codec for"
    ):
        state.plan_codec()
    other = DistributedDataParallel(made.model.module)
    other.register_comm_hook(made.kfac, kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match="expected decoupled_hook for a KFACState"):
        other(torch.ones(5, 3)).sum().backward()


def test_the_states_of_both_go_on_together() -> None:
    made = Made()
    state = DecoupledState(made.optimizer, kfac=made.kfac)
    made.model.register_comm_hook(state, decoupled_hook)
    for _ in range(4):
        made.step()
    assert state.stats()["deferred"], "the last update waits for the next forward"
    saved = made.kfac.state_dict()
    assert not state.stats()["deferred"]
    assert saved["steps"] == 4
    made.kfac.load_state_dict(saved)
    state.close()
    made.kfac.close()
    made.step()
    assert made.kfac.steps == 5
