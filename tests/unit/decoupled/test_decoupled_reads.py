"""No parameter is read or updated in another state than with plain DDP, however a model or a script gets at it."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

from crossover_ddp import UnsupportedConfigurationError
from tests.unit.decoupled.decoupled_training import STEPS, Training, assert_same, both, inputs, network, sgd

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]
Make = Callable[[nn.Module], torch.optim.Optimizer]


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


@pytest.fixture
def pair() -> Iterator[tuple[Training, Training]]:
    training, plain = both()
    yield training, plain
    with contextlib.suppress(UnsupportedConfigurationError):
        training.state.close()


# --- references past the guards --------------------------------------------------------------------------------


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
    assert_same(training, plain)


def test_an_evaluation_past_ddp_reads_references_that_are_up_to_date() -> None:
    training, plain = both(net=Remembering)
    found = []
    for each in (training, plain):
        each.run()
        with torch.no_grad():
            found.append(each.model.module.eval()(inputs(9)))
    assert torch.equal(*found)


def test_what_is_read_through_its_module_is_still_deferred_into_forward() -> None:
    """Only the buckets of what is read past the guards come before forward."""
    training, _ = both(net=Remembering)
    training.run()
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


def test_nobody_is_told_of_references_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    Training(decoupled=True, net=lambda: nn.Sequential(nn.LSTM(6, 6), First(), nn.Linear(6, 6))).run(8)
    assert "does not read" not in caplog.text


class First(nn.Module):
    def forward(self, several: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return several[0]


# --- .data --------------------------------------------------------------------------------------------------------


def clamp(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.clamp_(-0.1, 0.1)


def test_data_of_gradients_changed_after_step_is_refused_in_forward(pair: tuple[Training, Training]) -> None:
    training, _ = pair
    training.run(3)
    training.backward()
    gradients = [p.grad for p in training.held]
    training.optimizer.step()
    gradients[0].data.mul_(0.5)
    with pytest.raises(UnsupportedConfigurationError, match="got gradients that were changed"):
        training.backward()


def test_data_of_parameters_changed_after_a_first_step_is_refused_in_forward(
    pair: tuple[Training, Training],
) -> None:
    training, _ = pair
    training.run(3)
    clamp(training.held)
    with pytest.raises(UnsupportedConfigurationError, match=r"p\.data\.clamp_.*state\.flush\(\) after step"):
        training.backward()


@pytest.mark.parametrize(("check", "refused"), [("", False), ("0", False), ("1", True)])
def test_crossover_check_checks_always(check: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_CHECK", check)
    training = Training(decoupled=True).run(8)
    clamp(training.held)
    with pytest.raises(UnsupportedConfigurationError) if refused else contextlib.nullcontext():
        training.backward()


def test_from_the_fourth_deferred_step_on_nothing_is_checked(
    pair: tuple[Training, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = pair
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(
        "crossover_ddp._decoupled.pending.fingerprint", lambda tensor: summed.append(tensor) or torch.ones(())
    )
    training.run(5)  # two that are not deferred, three that are
    assert summed
    training.backward()  # applies the third
    summed.clear()
    training.update()
    training.run(3)
    assert not summed


@pytest.mark.parametrize("check", ["", "1"])
def test_checks_change_nothing(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_CHECK", check)
    training, plain = both()
    assert [training.step() for _ in range(8)] == [plain.step() for _ in range(8)]
    assert training.is_pending
    assert_same(training, plain)


WAYS: dict[str, Callable[[Training], list[Any]]] = {
    "the model": lambda t: list(t.model.parameters()),
    "the optimizer": lambda t: [p for group in t.optimizer.param_groups for p in group["params"]],
    "the optimizer's list": lambda t: t.optimizer.param_groups[0]["params"] + [],
    "a copy": lambda t: t.optimizer.param_groups[0]["params"].copy(),
    "backwards": lambda t: [*reversed(t.optimizer.param_groups[0]["params"])],
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_clamped_after_step_through_model_or_optimizer_are_those_of_plain_ddp(
    way: str, pair: tuple[Training, Training]
) -> None:
    for each in pair:
        for _ in range(STEPS):
            each.step()
            clamp(WAYS[way](each))
    assert_same(*pair)


def test_hyper_parameters_and_zero_grad_bring_nothing_up_to_date(pair: tuple[Training, Training]) -> None:
    training, _ = pair
    training.run()
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.9
        assert len(group["params"]) == 6
    training.optimizer.zero_grad()
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1).step()
    assert training.is_pending


def test_groups_are_plain_lists_again_after_close(pair: tuple[Training, Training]) -> None:
    training, _ = pair
    training.run()
    training.state.close()
    assert [type(group["params"]) for group in training.optimizer.param_groups] == [list]


# --- the caller's context -----------------------------------------------------------------------------------------


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [sgd, adafactor])
def test_updates_run_without_forwards_autocast(make: Make) -> None:
    training, plain = both(make=make)
    for _ in range(STEPS + 1):
        for each in (training, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each.model(inputs(each.steps)).float().square().mean()
            loss.backward()
            each.update()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(training, plain)


class NewState(torch.optim.SGD):
    """Puts a new tensor into its state in every step, and then writes into it, as some do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].get("mean")
                    if mean is not None:
                        mean.mul_(0.5)
                    self.state[parameter]["mean"] = parameter.grad + (0.0 if mean is None else mean)
                    parameter.add_(self.state[parameter]["mean"], alpha=-group["lr"])


def new_state(model: nn.Module) -> torch.optim.Optimizer:
    return NewState(model.parameters(), lr=0.05)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("look", ["forward", "state_dict"])
def test_updates_run_outside_of_inference_mode(look: str, clip: bool) -> None:
    """State made in inference mode could never be updated again."""
    training, plain = both(make=new_state)
    for step in range(2 * STEPS):
        for each in (training, plain):
            each.backward()
            if clip and each.state is not None:
                each.state.clip_grad_norm_(1e9)
            each.update()
            with torch.inference_mode(step % 3 == 0):
                each.model.eval()(inputs(7)) if look == "forward" else each.model.module.state_dict()
            each.model.train()
    assert_same(training, plain)


# --- counting, threads, wrappers ----------------------------------------------------------------------------------


def test_one_state_dict_is_one_early_read(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(decoupled=True)
    with caplog.at_level(logging.WARNING):
        training.run(6)
        for _ in range(2):
            training.run(2)
            assert training.is_pending
            training.model.module.state_dict()
            training.model.module.state_dict()
    assert "updates wait for the network" not in caplog.text


def test_a_thread_that_saves_applies_no_update_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    training, plain = both()
    training.run()
    plain.run()
    partial = training.state._partial
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


def test_a_lookahead_around_the_optimizer_of_the_state_is_that_of_plain_ddp() -> None:
    training, plain = both()
    for each in (training, plain):
        outer = timm.optim.Lookahead(each.optimizer, k=3)
        for _ in range(2 * STEPS):
            each.backward()
            outer.step()
            outer.zero_grad()
    assert_same(training, plain)


def test_a_scripted_module_inside_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 6)))
    with pytest.raises(UnsupportedConfigurationError, match=r"got 1 made by torch\.jit"):
        Training(decoupled=True, net=lambda: net).backward()
