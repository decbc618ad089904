"""Decoupled training, with and without owners: unusual models and optimizers, turns, listeners."""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import UnsupportedConfigurationError
from tests.harness import training as harness
from tests.harness.networks import Branches
from tests.harness.training import CountsPerGroup
from tests.harness.turn import RecordingTurn
from tests.unit.decoupled.decoupled_training import (
    Training,
    assert_same,
    both,
    groups_of,
    inputs,
    network,
    owned,
)

pytestmark = pytest.mark.usefixtures("process_group")
refused = functools.partial(pytest.raises, UnsupportedConfigurationError)
OWNERS: list[dict[str, Any]] = [{}, {"owned": True}]


class Pinn(nn.Module):
    """A network that returns its derivatives with respect to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.net))(x)  # type: ignore[no-any-return]


class Decaying(torch.optim.SGD):
    """Adds weight decay to gradients in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=0.1)
        return super().step(closure)


def quantised() -> nn.Module:
    net = network()
    net.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    return net


WALKS: dict[str, dict[str, Any]] = {
    "a group without gradients is counted": {
        "net": Branches,
        "make": lambda model: CountsPerGroup(groups_of(model), lr=0.1),
        "ddp": {"find_unused_parameters": True},
    },
    "an optimizer may reuse the memory of gradients": {
        "make": lambda m: Decaying(m.parameters(), lr=0.1)
    },
    "a frozen integer parameter may be in the optimizer": {
        "net": quantised,
        "make": lambda model: Decaying(model.parameters(), lr=0.1),
    },
    "forward may take derivatives by torch.func": {"net": Pinn},
}


@pytest.mark.defect("decoupled-1", "strangers-6", "strangers-27", "strangers-37")
@pytest.mark.parametrize("options", OWNERS, ids=str)
@pytest.mark.parametrize("walk", WALKS)
def test_unusual_training_equals_plain_ddp(walk: str, options: dict[str, Any]) -> None:
    ours, plain = (each.run(8) for each in both(**WALKS[walk], **options))
    assert_same(plain, ours)
    for group, expected in zip(
        *(each.optimizer.param_groups for each in (ours, plain)), strict=True
    ):
        assert {**group, "params": ()} == {**expected, "params": ()}


def test_a_wrapper_around_step_is_called_once_per_step_and_refused_for_owners() -> None:
    """Such as a scheduler's step, or the update of an average."""

    def wrapped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inner, group = optimizer.step, optimizer.param_groups[0]

        def step() -> None:
            inner()
            group["lr"] *= 0.9

        optimizer.step = step  # type: ignore[method-assign, assignment]
        return optimizer

    ours, plain = both(make=wrapped)
    assert_same(plain.run(8), ours.run(8))
    with refused(match="own step"):
        owned(make=wrapped)


@pytest.mark.defect("decoupled-3")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", OWNERS, ids=str)
def test_a_forward_without_a_step_takes_no_second_turn(options: dict[str, Any], grad: bool) -> None:
    turns = RecordingTurn()
    training = Training(decoupled=True, mutex=turns, **{**options, "defer": "auto"})
    for _ in range(24):  # deferred and not deferred, in turns
        training.step()
        with torch.set_grad_enabled(grad):
            training.model(inputs(0))
    log = turns.taken_and_given
    runs = {(name, len(list(run))) for name, run in itertools.groupby(log[log.index("acquire") :])}
    assert runs == {("acquire", 1), ("release", 1)}


@pytest.mark.defect("decoupled-15")
def test_the_norm_has_the_widest_type_of_all_gradients() -> None:
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1).bfloat16()])
    net.forward = lambda x: net[1](net[0](x).bfloat16())  # type: ignore[method-assign]
    training = Training(decoupled=True, net=lambda: net)
    training.backward()
    norm = training.state.clip_grad_norm_(1.0)
    training.state.flush()
    assert norm.dtype == clip_grad_norm_(training.held, 1.0).dtype == torch.float32


@pytest.mark.defect("strangers-11")
@pytest.mark.parametrize("options", [*OWNERS, {"defer": "auto"}], ids=str)
def test_a_moving_average_by_on_update_equals_plain_ddps(options: dict[str, Any]) -> None:
    """The other way, tensors taken earlier after `flush`, is in test_decoupled_state.py."""
    ours, plain = runs = both(**options)
    averages = [{parameter: parameter.detach().clone() for parameter in run.held} for run in runs]
    calls = Counter[Tensor]()

    def update(new: Sequence[Any], average: dict[Any, Tensor] = averages[0]) -> None:
        torch._foreach_lerp_([average[p] for p in new], [p.detach() for p in new], 0.5)
        calls.update(new)

    ours.state.on_update(update)
    for _ in range(6):
        plain.step()
        update(plain.held, averages[1])
        ours.step()
    assert ours.is_pending or options == {"defer": "auto"}
    ours.state.flush()
    assert all(map(torch.equal, *(each.values() for each in averages)))
    assert {*calls.values()} == {6}


def test_on_update_reports_steps_only_until_its_handle_is_removed() -> None:
    """Frozen parameters are not reported."""

    def partly_frozen() -> nn.Module:
        module = network()
        module[0].weight.requires_grad_(False)
        return module

    training, heard = Training(decoupled=True, net=partly_frozen), Counter[Tensor]()
    handle = training.state.on_update(heard.update)
    with training.model.no_sync():
        training.backward()
    training.backward()
    training.optimizer.zero_grad()
    training.backward()
    assert not heard
    for _ in range(2):  # the second step is not reported
        training.optimizer.step()
        training.state.flush()
        assert heard == Counter(training.held[1:])
        handle.remove()
        training.drop()
        training.backward()


def test_on_update_reports_a_parameter_once_per_step_of_several_optimizers() -> None:
    """All parameters are in one bucket. In every second step one optimizer has no gradients."""

    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        one, other, head = model.module.branches[0], model.module.branches[1], model.module.head
        return [
            torch.optim.SGD([*one.parameters(), *head.parameters()]),
            torch.optim.SGD(other.parameters()),
        ]

    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 25}
    training = harness.Training("owned", module=Branches(), optimizers=two, **ddp)
    heard = Counter[Tensor]()
    training.state.on_update(heard.update)
    training.run(8).state.flush()
    assert [heard[parameter] for parameter in training.held] == [8] * 6
