"""The decoupled hook in a job of one rank: what users do between backward and the next forward."""

import contextlib
import copy
import functools
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm.utils
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import DecoupledState, UnsupportedConfigurationError
from tests.harness import training as harness
from tests.harness.networks import blow
from tests.unit.decoupled.decoupled_training import STEPS, Training, assert_same, both, inputs

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


@pytest.fixture
def plain() -> Training:
    return Training(decoupled=False)


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training(decoupled=True)
    yield made
    # A test that spoiled the gradients hears of it once more.
    with contextlib.suppress(UnsupportedConfigurationError):
        made.state.close()


def test_the_first_steps_are_not_deferred_since_ddp_rebuilds_its_buckets(training: Training) -> None:
    deferred = []
    for _ in range(4):
        training.step()
        deferred.append(training.is_pending)
    assert deferred == [False, False, True, True]


def test_step_changes_nothing_until_somebody_looks(training: Training, plain: Training) -> None:
    training.run()
    held = list(training.model.module.parameters())
    training.backward()
    before = [p.detach().clone() for p in held]
    training.optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(held, before, strict=True)), (
        "documented: held tensors are old"
    )
    training.state.flush()
    plain.run(STEPS + 1)
    assert_same(training, plain)


LOOKS: dict[str, Callable[[Training], object]] = {
    "model.state_dict": lambda t: t.model.state_dict(),
    "the inner model's": lambda t: t.model.module.state_dict(),
    "parameters": lambda t: list(t.model.parameters()),
    "an evaluation": lambda t: torch.no_grad()(t.model.module.eval())(inputs(0)),
    "an evaluation through DDP": lambda t: torch.no_grad()(t.model.eval())(inputs(0)),
    "a moving average": lambda t: timm.utils.ModelEmaV3(t.model),
    "a deep copy of the network": lambda t: copy.deepcopy(t.model.module),
    "the state's own dict": lambda t: t.state.state_dict(),
    "the optimizer's": lambda t: t.optimizer.state_dict(),
    "loading the optimizer's": lambda t: t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict())),
    "zeroing in place": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "a second step": lambda t: t.optimizer.step(),
    "close": lambda t: t.state.close(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_the_update_done(look: str, training: Training, plain: Training) -> None:
    held = list(training.model.module.parameters())
    training.run()
    plain.run()
    assert training.is_pending
    LOOKS[look](training)
    assert not training.is_pending
    assert all(torch.equal(p, w) for p, w in zip(held, plain.weights(), strict=True))


def test_reading_in_every_step_is_correct_and_said_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            training.step()
            training.model.zero_grad()
    assert len([r for r in caplog.records if "updates wait for the network" in r.message]) == 1


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("when", ["after", "before"])
def test_schedulers_work_wherever_they_are_made_and_stepped(scheduler_first: bool, when: str) -> None:
    cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20)
    trained = []
    for way in ("decoupled", None):
        each = harness.Training(way, schedule=cycle if scheduler_first else None)
        scheduler = each.schedulers.pop() if scheduler_first else cycle(each.optimizer)
        with warnings.catch_warnings():
            # Stepping it before is what torch warns of in any case; stepping it after must not warn.
            warnings.simplefilter("ignore" if when == "before" else "error")
            for _ in range(8):
                each.backward()
                if when == "before":
                    scheduler.step()
                each.update()
                if when == "after":
                    scheduler.step()
        trained.append(each)
    assert_same(*trained)


def test_a_closure_is_called_once_and_its_step_is_deferred(training: Training, plain: Training) -> None:
    for each in (training, plain):
        each.run()
        calls: list[float] = []

        def closure(each: Training = each, calls: list[float] = calls) -> float:
            each.drop()
            calls.append(each.backward())
            return calls[-1]

        for _ in range(3):
            with torch.no_grad():  # the closure needs gradients whatever the caller has set
                assert each.optimizer.step(closure) == calls[-1]
        assert len(calls) == 3
    assert training.is_pending
    assert_same(training, plain)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_by_the_state_is_torchs(
    norm_type: float, max_norm: float, training: Training, plain: Training
) -> None:
    for _ in range(STEPS):
        training.backward()
        plain.backward()
        got = training.state.clip_grad_norm_(max_norm, norm_type)
        expected = clip_grad_norm_(plain.model.parameters(), max_norm, norm_type)
        assert torch.allclose(got, expected, rtol=1e-6)
        for each in (training, plain):
            each.update()
    for a, b in zip(training.weights(), plain.weights(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_clipping_twice_clips_what_is_left(training: Training) -> None:
    training.run()
    training.backward()
    first = training.state.clip_grad_norm_(1e-3)
    second = training.state.clip_grad_norm_(1e-4)
    assert first > 1e-3
    assert float(second) == pytest.approx(1e-3, rel=1e-2)


def test_a_norm_that_is_not_finite_is_an_error_on_request(training: Training) -> None:
    training.run()
    training.backward()
    training.state._pending.shares[0].bucket.flat.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        training.state.clip_grad_norm_(1.0, error_if_nonfinite=True)


Parameters = Callable[[Training], list[nn.Parameter]]
CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "torch's clipping": lambda held: clip_grad_norm_(held, 1.0),
    "torch's clipping of large norms only": lambda held: clip_grad_norm_(held, 1e9),
    "clipping by value": lambda held: nn.utils.clip_grad_value_(held, 0.1),
    "noise": lambda held: [p.grad.add_(1.0) for p in held if p.grad is not None],
    "old-style clipping": lambda held: [p.grad.data.mul_(0.5) for p in held if p.grad is not None],
    "other gradients": lambda held: [setattr(p, "grad", torch.ones_like(p)) for p in held],
}
WAYS: dict[str, Parameters] = {
    "the model": lambda t: list(t.model.parameters()),
    "the network": lambda t: [p for _, p in t.model.module.named_parameters()],
    "the optimizer": lambda t: [p for group in t.optimizer.param_groups for p in group["params"]],
    "the optimizer by number": lambda t: [
        group["params"][i] for group in t.optimizer.param_groups for i in range(len(group["params"]))
    ],
}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_through_tensors_taken_earlier_are_refused(
    change: str, settled: bool, training: Training
) -> None:
    if settled:
        training.run(4)
    training.backward()
    CHANGES[change](training.held)
    with pytest.raises(UnsupportedConfigurationError, match=r"flush\(\)"):
        training.optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_changed_through_the_model_or_the_optimizer_are_those_of_plain_ddp(
    change: str, way: str, training: Training, plain: Training, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (training, plain):
        for _ in range(STEPS):
            each.backward()
            CHANGES[change](WAYS[way](each))
            each.update()
    assert not training.is_pending
    assert_same(training, plain)
    warned = [r for r in caplog.records if "between backward() and optimizer.step()" in r.message]
    assert len(warned) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_after_flush_gradients_are_those_of_plain_ddp_and_may_be_changed(
    change: str, training: Training, plain: Training
) -> None:
    for _ in range(STEPS):
        training.backward()
        training.state.flush()
        plain.backward()
        for each in (training, plain):
            CHANGES[change](each.held)
            each.update()
    assert_same(training, plain)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_works(fused: bool, unscale: bool) -> None:
    training, plain = both(make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=fused))
    for each in (training, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(STEPS):
            scaler.scale(each.model(inputs(step)).square().mean()).backward()
            if unscale:
                scaler.unscale_(each.optimizer)
            scaler.step(each.optimizer)
            scaler.update()
            each.optimizer.zero_grad()
    assert_same(training, plain)


def test_gradients_zeroed_in_place_before_their_update_are_refused(training: Training) -> None:
    training.run()
    training.backward()
    held = [p.grad for p in training.held]
    training.optimizer.step()
    for gradient in held:
        gradient.zero_()
    with pytest.raises(UnsupportedConfigurationError, match="changed in place"):
        training.backward()


def test_parameters_written_before_their_update_are_refused(training: Training) -> None:
    held = list(training.model.module.parameters())
    training.run()
    with torch.no_grad():
        held[0].add_(1.0)
    with pytest.raises(UnsupportedConfigurationError, match="parameters that nobody writes"):
        training.backward()


def accumulated(each: Training) -> None:
    """Without no_sync: each backward averages what has been summed so far."""
    for _ in range(3):
        each.backward()
    each.update()


def never_zeroed(each: Training) -> None:
    each.backward()
    each.optimizer.step()


def dropped(each: Training) -> None:
    each.backward()
    each.model.module[2].weight.grad = None
    each.update()


def written(each: Training) -> None:
    each.backward()
    with torch.no_grad():
        for parameter in each.held:
            parameter.mul_(0.9)
    each.update()


def left_out(each: Training) -> None:
    each.backward()
    each.drop()
    each.step()


@pytest.mark.parametrize("act", [accumulated, never_zeroed, dropped, written, left_out])
def test_what_loops_do_between_backward_and_step_is_as_with_plain_ddp(
    act: Callable[[Training], None], training: Training, plain: Training
) -> None:
    for each in (training, plain):
        for _ in range(7):
            act(each)
    assert training.is_pending == (act is not dropped), "who touches gradients makes them whole"
    assert_same(training, plain)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_the_optimizer_see_whole_steps(kind: str, training: Training, plain: Training) -> None:
    seen: list[list[float]] = []
    for each in (training, plain):
        sums: list[float] = []
        held = list(each.model.module.parameters())

        def note(*_: Any, held: list[nn.Parameter] = held, sums: list[float] = sums) -> None:
            sums.append(sum(float(p.detach().sum()) for p in held))

        getattr(each.optimizer, f"register_step_{kind}_hook")(note)
        each.run()
        seen.append(sums)
    assert seen[0] == seen[1]
    assert len(seen[0]) == STEPS


def test_an_exception_in_backward_is_followed_by_a_refused_step(training: Training) -> None:
    training.run()
    training.model.module[2].register_forward_hook(lambda m, a, out: blow(out))
    with pytest.raises(ArithmeticError):
        training.backward()
    with pytest.raises(UnsupportedConfigurationError, match="ended with an exception"):
        training.optimizer.step()
    training.state.close()
    assert "_step_supports_amp_scaling" not in vars(training.optimizer)


def test_a_second_state_on_one_optimizer_is_refused(training: Training) -> None:
    with pytest.raises(UnsupportedConfigurationError, match="has another already"):
        DecoupledState(training.optimizer)
    training.state.close()
    DecoupledState(training.optimizer).close()


def test_a_copied_model_leaves_the_state_behind(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    training.run()
    twin = copy.deepcopy(training.model)
    assert not training.is_pending
    assert "register a new one" in caplog.text
    twin(inputs(0)).sum().backward()
    assert not isinstance(pickle.loads(pickle.dumps(training.state)), DecoupledState)


def test_the_optimizer_and_a_copied_model_are_ordinary_again_after_close(plain: Training) -> None:
    training = Training(decoupled=True).run(3)
    twin = copy.deepcopy(training.model.module)
    twin(inputs(0)).sum().backward()
    training.state.close()
    training.state.close()
    assert "step" not in vars(training.optimizer)
    assert "zero_grad" not in vars(training.optimizer)
    training.run(STEPS)
    assert_same(training, plain.run(STEPS + 3))


def test_the_state_dict_carries_the_order_of_forward(training: Training) -> None:
    training.run()
    saved = training.state.state_dict()
    names = [name for name, _ in training.model.module.named_parameters()]
    assert saved == {"forward_order": names}
    other = Training(decoupled=True)
    other.state.load_state_dict(saved)
    with pytest.raises(ValueError, match="forward_order"):
        other.state.load_state_dict({"order": []})


def test_without_the_state_ddp_goes_on_after_an_error(training: Training, plain: Training) -> None:
    for each in (training, plain):
        each.run()
        each.backward()
    clip_grad_norm_(training.held, 1.0)
    for use in (training.optimizer.step, training.state.close):
        with pytest.raises(UnsupportedConfigurationError, match="changed in place"):
            use()
    for each in (training, plain):
        each.optimizer.zero_grad()
        each.run()
    assert_same(training, plain)
