"""No parameter is read or updated in another state than with plain DDP, however a model or a script gets at it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.decoupled.decoupled_training import STEPS, Training, assert_same, both, inputs, network

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


class Remembering(nn.Module):
    """Reads the first layer's weight past the dictionary that holds it; the rest as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.references = [self.layers[0].weight]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = features @ self.references[0].t() + self.layers[0].bias
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        return hidden  # type: ignore[no-any-return]


class Tied(Remembering):
    """Uses only what it holds itself, and has no parameters of its own."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = super().forward(features)
        return nn.functional.linear(hidden, self.references[0])


class Held(nn.Module):
    """Reads nothing through its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.references = [[*layer.parameters()] for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for weight, bias in self.references:
            features = nn.functional.linear(features, weight, bias).tanh()
        return features


def test_a_forward_that_reads_nothing_through_its_modules_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Training(decoupled=True, net=Held).run(4)
    told = [r.getMessage() for r in caplog.records if "forward does not read" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("net", [Remembering, Tied])
def test_references_kept_elsewhere_are_up_to_date_from_the_first_step(
    net: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    training, plain = both(net=net)
    assert [training.step() for _ in range(10)] == [plain.step() for _ in range(10)]
    assert training.is_pending
    told = [r.getMessage() for r in caplog.records if "does not read" in r.message]
    assert len(told) == 1
    assert "1 parameters (layers.0.weight)" in told[0]
    with torch.no_grad():  # past DDP
        assert torch.equal(*(each.model.module.eval()(inputs(9)) for each in (training, plain)))
    assert_same(training, plain)


class Watched(Remembering):
    """Has ``meanwhile`` done in the middle of forward, behind the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_pre_hook(lambda *_: self.meanwhile())
        self.meanwhile: Callable[[], object] = lambda: None


@pytest.mark.parametrize("reads", ["in another thread", "after a forward that raised"])
def test_what_somebody_else_reads_is_not_taken_for_forwards_own_reads(reads: str) -> None:
    training, plain = (each.run(1) for each in both(net=Watched))
    module = training.model.module

    def in_a_thread() -> None:
        saver = threading.Thread(target=module.state_dict)
        saver.start()
        saver.join(60)

    def fail() -> None:
        raise ArithmeticError

    if reads == "in another thread":
        module.meanwhile = in_a_thread
    else:
        module.meanwhile = fail
        with pytest.raises(ArithmeticError):
            training.loss()
        module.state_dict()
        module.meanwhile = lambda: None
    assert [training.step() for _ in range(6)] == [plain.step() for _ in range(6)]
    assert_same(training, plain)


def test_a_module_that_takes_another_ones_place_is_guarded() -> None:
    training, plain = (each.run() for each in both())
    for each in (training, plain):
        net, new = each.model.module, nn.Linear(6, 6)
        new.weight, new.bias = net[2].weight, net[2].bias
        net[2] = new
    assert [training.step() for _ in range(6)] == [plain.step() for _ in range(6)]
    assert training.is_pending
    assert_same(training, plain)


def test_what_is_read_through_its_module_is_still_deferred_into_forward() -> None:
    """Only the buckets of what is read past the guards come before forward."""
    training = Training(decoupled=True, net=Remembering).run()
    pending: list[int] = []
    training.model.module.layers[1].register_forward_pre_hook(
        lambda *_: pending.append(training.state.stats()["deferred"])
    )
    training.backward()
    assert pending[0] >= 1


def test_guards_are_down_from_the_last_update_on() -> None:
    training = Training(decoupled=True).run(4)
    last = [module for module in training.model.modules() if isinstance(module, nn.Linear)][-1]
    are_plain: list[bool] = []
    last.register_forward_hook(lambda *_: are_plain.append(type(vars(last)["_parameters"]) is dict))
    training.run(2)
    assert are_plain == [True, True]


class First(nn.Module):
    def forward(self, several: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return several[0]


def test_nobody_is_told_of_references_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    Training(decoupled=True, net=lambda: nn.Sequential(nn.LSTM(6, 6), First(), nn.Linear(6, 6))).run(8)
    assert "does not read" not in caplog.text


WAYS: dict[str, Callable[[Training], list[Any]]] = {
    "the model": lambda t: list(t.model.parameters()),
    "the optimizer": lambda t: [p for group in t.optimizer.param_groups for p in group["params"]],
    "the optimizer's list": lambda t: t.optimizer.param_groups[0]["params"] + [],
    "a sum of lists": lambda t: sum((group["params"] for group in t.optimizer.param_groups), []),  # noqa: RUF017
    "a copy": lambda t: t.optimizer.param_groups[0]["params"].copy(),
    "backwards": lambda t: [*reversed(t.optimizer.param_groups[0]["params"])],
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_clamped_after_step_through_model_or_optimizer_are_those_of_plain_ddp(way: str) -> None:
    training, plain = both()
    for each in (training, plain):
        for _ in range(STEPS):
            each.step()
            for parameter in WAYS[way](each):
                parameter.data.clamp_(-0.1, 0.1)
    assert_same(training, plain)


def test_hyper_parameters_and_zero_grad_bring_nothing_up_to_date() -> None:
    training = Training(decoupled=True).run()
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.9
        assert len(group["params"]) == 6
    training.optimizer.zero_grad()
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1).step()
    assert training.is_pending


def test_a_thread_that_saves_applies_no_update_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    training, plain = (each.run() for each in both())
    partial = training.state._partials[0]
    original, both_are_in = partial.apply, threading.Barrier(2)

    def slow(*args: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_are_in.wait(0.3)  # only met if two threads are in an update at once
        original(*args)

    monkeypatch.setattr(partial, "apply", slow)
    savers = [threading.Thread(target=training.model.module.state_dict) for _ in range(2)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join(60)
    assert both_are_in.broken
    assert_same(training, plain)
