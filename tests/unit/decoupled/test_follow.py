"""Moving averages that follow deferred updates: bits of plain DDP, without waiting."""

import copy
import functools
import io
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from crossover_ddp import AutoState, UnsupportedConfigurationError, auto_hook
from tests.harness import training as harness
from tests.harness.training import same
from tests.unit.decoupled.averages import (
    KINDS,
    ExponentialMovingAverage,
    Kind,
    averaged,
    same_averages,
)
from tests.unit.decoupled.decoupled_training import Training

pytestmark = pytest.mark.usefixtures("process_group")
STEPS = 8
Act = Callable[["Followed", int], object]


def network() -> nn.Module:
    """Return a network with BatchNorm, a frozen parameter, a tied one and a hidden buffer."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
    )
    net[3].bias.requires_grad_(False)
    net[5].weight = net[3].weight
    net.register_buffer("scale", torch.ones(3), persistent=False)
    return net


class Followed:
    """A training with an average of it, which its state follows if it is decoupled."""

    def __init__(self, kind: Kind, training: harness.Training, *, of_ddp: bool = False) -> None:
        self.kind = kind
        self.training = training
        self.average = kind.make(training.model if of_ddp else training.model.module)
        self.of_ddp = of_ddp
        self.handle = None
        if training.state is not None:
            self.handle = training.state.follow(self.average)

    def update(self, step: int = 0) -> None:
        model = self.training.model if self.of_ddp else self.training.model.module
        self.kind.update(self.average, model, step)


def pair(name: str | Kind = "v3", *, of_ddp: bool = False, **options: Any) -> list[Followed]:
    """Return a decoupled training and plain DDP's, with the same average."""
    kind = KINDS[name] if isinstance(name, str) else name
    trainings = [Training(decoupled=each, **{"net": network, **options}) for each in (True, False)]
    return [Followed(kind, training, of_ddp=of_ddp) for training in trainings]


def train(runs: list[Followed], act: Act, steps: int = STEPS) -> None:
    for step in range(steps):
        for run in runs:
            act(run, step)


def step_and_update(run: Followed, step: int) -> None:
    run.training.step()
    run.update(step)


def is_unread(run: Followed) -> bool:
    """Return whether the latest step is deferred, and nothing has waited for it."""
    return run.training.is_pending


def assert_same(runs: list[Followed]) -> None:
    assert same(runs[0].training, runs[1].training)
    assert same_averages(runs[0].average, runs[1].average)


# --- bits ----------------------------------------------------------------------------------------


@pytest.mark.torch_version
@pytest.mark.parametrize("of_ddp", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_an_average_has_plain_ddps_bits_and_steps_stay_deferred(
    name: str, of_ddp: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs = pair(name, of_ddp=of_ddp)
    deferred = []

    def act(run: Followed, step: int) -> None:
        step_and_update(run, step)
        deferred.append(is_unread(run))

    with caplog.at_level(logging.INFO, "crossover_ddp"):
        train(runs, act)
    assert deferred[::2] == [False] * 2 + [True] * (STEPS - 2)
    assert "not updated in parts" not in caplog.text
    assert "are read between" not in caplog.text
    assert_same(runs)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", ["v3 warm-up", "swa", "torch_ema"])
def test_an_average_is_right_in_every_step(name: str, owned: bool) -> None:
    """The average is read in every step, so all of it is complete there."""
    runs = pair(name, owned=owned)
    for _ in range(STEPS):
        train(runs, step_and_update, 1)
        assert_same(runs)


UNUSUAL: dict[str, Act] = {}


def unusual(act: Act) -> Act:
    UNUSUAL[act.__name__] = act
    return act


@unusual
def twice_between_steps(run: Followed, step: int) -> None:
    run.training.step()
    run.update(step)
    run.update(step + 1)


@unusual
def in_every_third_step(run: Followed, step: int) -> None:
    run.training.step()
    if step % 3 == 0:
        run.update(step)


@unusual
def before_the_step(run: Followed, step: int) -> None:
    run.training.backward()
    run.update(step)
    run.training.update()


@unusual
def before_and_after_the_step(run: Followed, step: int) -> None:
    before_the_step(run, step)
    run.update(step)


@unusual
def after_the_forward(run: Followed, step: int) -> None:
    loss = run.training.loss()
    run.update(step)
    loss.backward()
    run.training.update()


@unusual
def after_a_flush(run: Followed, step: int) -> None:
    run.training.step()
    if run.training.state is not None:
        run.training.state.flush()
    run.update(step)


@unusual
def with_an_accumulation(run: Followed, step: int) -> None:
    with run.training.model.no_sync():
        run.training.backward(100 + step)
    step_and_update(run, step)


@unusual
def with_clipping(run: Followed, step: int) -> None:
    run.training.backward()
    clip_grad_norm_(run.training.model.parameters(), 1e9)
    run.training.update()
    run.update(step)


@unusual
def with_parameters_that_are_written_after_the_update(run: Followed, step: int) -> None:
    step_and_update(run, step)
    if step % 3 == 2:
        with torch.no_grad():
            for parameter in run.training.model.parameters():
                parameter.clamp_(-0.3, 0.3)


@unusual
def with_other_settings_after_the_update(run: Followed, step: int) -> None:
    run.average.decay = 0.5 + 0.05 * step
    step_and_update(run, step)
    run.average.decay = 0.0


@unusual
def with_an_evaluation_of_the_average(run: Followed, step: int) -> None:
    step_and_update(run, step)
    module = getattr(run.average, "module", None)
    if step % 3 == 2 and module is not None:
        module.eval()
        run.training.model.module[0].bias.data.add_(module(torch.ones(1, 6)).detach()[0])


@pytest.mark.parametrize("name", ["v3", "v3 warm-up", "own function", "torch_ema"])
@pytest.mark.parametrize("act", UNUSUAL)
def test_unusual_loops_have_plain_ddps_bits(act: str, name: str) -> None:
    runs = pair(name)
    train(runs, UNUSUAL[act])
    assert runs[0].training.state.stats()["steps_deferred"] == STEPS - 2
    assert_same(runs)


def test_steps_that_a_scaler_skips_count_as_with_plain_ddp() -> None:
    runs = pair("v3 warm-up")
    scalers = {id(run): torch.amp.GradScaler("cpu", init_scale=2.0**10) for run in runs}

    def act(run: Followed, step: int) -> None:
        scaler = scalers[id(run)]
        overflowing = run.training.held[-1].register_hook(
            functools.partial(torch.mul, math.inf if step in (8, 11) else 1.0)
        )
        scaler.scale(run.training.loss(step)).backward()
        overflowing.remove()
        scaler.step(run.training.optimizer)
        scaler.update()
        run.training.drop()
        run.update(step)

    train(runs, act, 14)
    assert runs[0].training.state.stats()["steps_deferred"] >= 9
    assert_same(runs)


@pytest.mark.parametrize("defer", ["auto", "always"])
def test_an_average_follows_steps_that_are_not_deferred(defer: str) -> None:
    runs = pair("v3", defer=defer)
    train(runs, step_and_update, 40)
    assert_same(runs)


def test_an_average_follows_refits_to_plain_ddp_and_back() -> None:
    def auto(model: Any, optimizers: Any, mutex: Any) -> Any:
        return AutoState(optimizers[0]), auto_hook

    trainings = [harness.Training(way, module=network()) for way in (auto, None)]
    runs = [Followed(KINDS["swa"], training) for training in trainings]
    train(runs, step_and_update, 40)
    assert runs[0].training.state.chosen is not None
    assert_same(runs)


# --- reads ---------------------------------------------------------------------------------------


def _pickled(average: Any) -> Any:
    return pickle.loads(pickle.dumps(average))


def _saved(average: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(average.state_dict(), buffer)
    buffer.seek(0)
    return [*torch.load(buffer).values()][-1]


READS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda average: [*average.state_dict().values()],
    "parameters": lambda average: [*average.parameters()],
    "a parameter": lambda average: average.module[0].weight,
    "the module's forward": lambda average: average.module.eval()(torch.ones(2, 6)),
    "its own forward": lambda average: average.eval()(torch.ones(2, 6)),
    "a part's forward": lambda average: average.module[3](torch.ones(2, 6)),
    "a copy": lambda average: [*copy.deepcopy(average).parameters()],
    "a copy of the module": lambda average: [*copy.deepcopy(average.module).parameters()],
    "a pickle": lambda average: [*_pickled(average).parameters()],
    "a checkpoint": _saved,
}


def flat(values: Any) -> Tensor:
    values = [values] if isinstance(values, Tensor) else values
    return torch.cat([each.detach().flatten().double() for each in values])


@pytest.mark.parametrize("name", ["v3", "swa"])
@pytest.mark.parametrize("read", READS)
def test_a_read_of_the_average_completes_it(read: str, name: str) -> None:
    runs = pair(name)
    train(runs, step_and_update)
    found = [flat(READS[read](run.average)) for run in runs]
    assert torch.equal(*found)
    assert not is_unread(runs[0])


def test_a_module_that_was_taken_from_the_average_earlier_is_complete() -> None:
    runs = pair("v3")
    modules = [run.average.module.eval() for run in runs]
    train(runs, step_and_update)
    assert torch.equal(*[module(torch.ones(2, 6)) for module in modules])


@pytest.mark.parametrize(
    "read",
    [
        lambda average: average.shadow_params,
        lambda average: average.state_dict()["shadow_params"],
        lambda average: copy.deepcopy(average).shadow_params,
        lambda average: copy.copy(average).shadow_params,
    ],
)
def test_a_read_of_a_list_completes_it(read: Callable[[Any], Any]) -> None:
    runs = pair("torch_ema")
    train(runs, step_and_update)
    assert is_unread(runs[0])
    assert torch.equal(*[flat(read(run.average)) for run in runs])
    assert not is_unread(runs[0])


@pytest.mark.parametrize("updates", [False, True], ids=["not updated", "updated"])
def test_an_average_may_be_swapped_in_for_an_evaluation(updates: bool) -> None:
    """The average has references of its own to parameters whose updates are pending."""
    runs = pair("torch_ema")
    losses = []

    def act(run: Followed, step: int) -> None:
        run.training.step()
        if updates or step < 3:
            run.update(step)
        if step % 3 == 2:
            with run.average.average_parameters(), torch.no_grad():
                losses.append(float(run.training.loss(99)))

    train(runs, act)
    assert losses[::2] == losses[1::2]
    assert_same(runs)


@pytest.mark.parametrize("name", ["v3", "torch_ema"])
def test_a_copy_is_an_ordinary_average(name: str) -> None:
    run = pair(name)[0]
    train([run], step_and_update)
    twin = copy.deepcopy(run.average)
    assert type(twin) is KINDS[name].make(network()).__class__
    before = twin.state_dict() if name == "v3" else {"shadow_params": twin.shadow_params}
    kept = copy.deepcopy(before)
    step_and_update(run, STEPS)
    run.training.state.flush()
    assert str(kept) == str(before)
    assert twin.__dict__.keys() == run.average.__dict__.keys()


def test_counters_are_updated_at_the_call() -> None:
    runs = pair("swa")
    train(runs, step_and_update)
    assert int(runs[0].average.n_averaged) == STEPS
    listed = pair("torch_ema")[0]
    train([listed], step_and_update)
    assert listed.average.num_updates == STEPS
    assert is_unread(runs[0]) and is_unread(listed)


def test_an_average_loads_a_checkpoint_while_an_update_is_pending() -> None:
    runs = pair("swa")
    saved = copy.deepcopy(runs[1].average.state_dict())
    train(runs, step_and_update)
    for run in runs:
        run.average.load_state_dict(saved)
    assert_same(runs)
    train(runs, step_and_update)
    assert_same(runs)


# --- averages that are not updated in parts ------------------------------------------------------


def by_their_norm(averaged: Any, current: Any, count: Any) -> None:
    """Average by a weight that depends on all tensors together."""
    distance = torch.stack([(a - b).norm() for a, b in zip(averaged, current, strict=True)]).norm()
    torch._foreach_lerp_(averaged, current, float(1 / (1 + distance)))


def with_noise(averaged: Any, current: Any, count: Any) -> None:
    torch._foreach_lerp_(averaged, current, 0.1)
    for each in averaged:
        each.add_(torch.randn(each.shape))


def in_bfloat16(model: nn.Module) -> Any:
    """Return an average with stochastic rounding, whose random numbers are drawn for all tensors."""
    return ModelEmaV3(model, decay=0.9, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "kind",
    [
        averaged(multi_avg_fn=by_their_norm),
        averaged(multi_avg_fn=with_noise),
        Kind(in_bfloat16),
    ],
    ids=["norm", "noise", "stochastic rounding"],
)
def test_an_average_that_mixes_tensors_is_updated_at_once(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    runs = pair(kind)
    states = {id(run): torch.Generator().manual_seed(1).get_state() for run in runs}

    def act(run: Followed, step: int) -> None:
        run.training.step()
        torch.set_rng_state(states[id(run)])
        run.update(step)
        states[id(run)] = torch.get_rng_state()

    with caplog.at_level(logging.INFO, "crossover_ddp"):
        train(runs, act)
    assert caplog.text.count("is not updated in parts") == 1
    assert not is_unread(runs[0])
    assert_same(runs)


def test_an_average_of_another_model_is_updated_at_once() -> None:
    """A model that is not this state's has no pending updates."""
    run = pair("v3")[0]
    other = network()
    average = ModelEmaV3(other, decay=0.5)
    run.training.state.follow(average)
    train([run], step_and_update)
    with torch.no_grad():
        other[0].weight.fill_(1.0)
    expected = average.module[0].weight.lerp(other[0].weight, 0.5)
    average.update(other)
    with torch.no_grad():
        other[0].weight.fill_(7.0)
    assert is_unread(run)
    run.training.state.flush()
    assert torch.equal(average.module[0].weight, expected)


def test_a_model_of_other_shapes_gets_the_averages_own_error() -> None:
    run = pair("torch_ema")[0]
    train([run], step_and_update)
    with pytest.raises(ValueError, match="another number of parameters"):
        run.average.update(run.training.held[1:])
    with pytest.raises(TypeError, match="positional argument"):
        pair("v3")[0].average.update()


# --- the handle and refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["remove", "close"])
@pytest.mark.parametrize("name", ["v3", "torch_ema"])
def test_an_average_is_complete_and_as_before_when_it_is_left_alone(name: str, how: str) -> None:
    runs = pair(name)
    train(runs, step_and_update)
    end = {"remove": runs[0].handle.remove, "close": runs[0].training.state.close}[how]
    end()
    assert type(runs[0].average) is type(runs[1].average)
    assert vars(runs[0].average).keys() == vars(runs[1].average).keys()
    assert_same(runs)
    train(runs, after_a_flush)
    end()
    assert_same(runs)


def test_an_average_may_be_followed_again_by_another_state() -> None:
    one, other = pair("v3")[0], pair("v3")[0]
    with pytest.raises(UnsupportedConfigurationError, match=r"no state follows.*remove\(\)"):
        other.training.state.follow(one.average)
    one.handle.remove()
    other.training.state.follow(one.average)
    one.training.state.close()
    assert one.average.following is not None


class Unknown:
    def update(self, model: nn.Module) -> None: ...


class TwoModules(AveragedModel):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "average",
    [Unknown(), network(), 0.99, None, torch.optim.SGD(network().parameters(), 0.1)],
    ids=lambda each: type(each).__name__,
)
def test_other_objects_are_refused(average: Any) -> None:
    state = Training(decoupled=True).state
    name = type(average).__name__
    with pytest.raises(TypeError, match=rf"expected a moving average .*got average={name}; use on"):
        state.follow(average)


def test_an_average_with_a_second_module_is_refused() -> None:
    with pytest.raises(TypeError, match="one copy of the model"):
        Training(decoupled=True).state.follow(TwoModules(network()))


def test_an_update_that_raises_leaves_the_loop_usable() -> None:
    def raising(averaged: Any, current: Any, count: Any) -> None:
        torch._foreach_lerp_(averaged, current, 0.5)
        if fails:
            raise RuntimeError("no memory")

    fails = False
    run = pair(averaged(multi_avg_fn=raising))[0]
    train([run], step_and_update)
    run.training.step()
    fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        run.update()
    fails = False
    train([run], step_and_update)
    run.training.state.flush()


def test_lists_are_followed_without_references_to_parameters_if_they_are_passed() -> None:
    """An average without references of its own is complete with ``update(parameters)``."""
    runs = pair("torch_ema of parameters")
    for run in runs:
        run.average._params_refs = []
    train(runs, step_and_update)
    assert is_unread(runs[0])
    assert_same(runs)


def test_an_average_of_some_parameters_is_followed() -> None:
    def make(model: nn.Module) -> Any:
        return ExponentialMovingAverage([p for p in model.parameters() if p.requires_grad], 0.9)

    runs = pair(Kind(make, lambda average, model, step: average.update()))
    train(runs, step_and_update)
    assert is_unread(runs[0])
    assert_same(runs)


def test_the_function_of_an_average_may_be_pickled() -> None:
    run = pair(averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9)))[0]
    train([run], step_and_update)
    twin = copy.deepcopy(run.average)
    assert same_averages(twin, run.average)
