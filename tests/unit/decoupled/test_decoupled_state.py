"""The decoupled hook in a job of one rank: user code between backward and the next forward."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm.optim
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from crossover_ddp import (
    DecoupledKFACState,
    DecoupledState,
    OwnerState,
    UnsupportedConfigurationError,
    decoupled_hook,
)
from crossover_ddp.codecs import Int8
from crossover_ddp.kfac_hooks import kfac_hook
from tests.harness import training as harness
from tests.harness.oracles import heard
from tests.harness.training import same
from tests.harness.turn import RecordingTurn
from tests.multiprocess.kfac_training import WIDTH
from tests.multiprocess.kfac_training import Training as WithKFAC
from tests.unit.decoupled.decoupled_training import STEPS, Training, assert_same, both, inputs

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]
refused = functools.partial(pytest.raises, UnsupportedConfigurationError)


@pytest.fixture
def plain() -> Training:
    return Training(decoupled=False)


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training(decoupled=True)
    yield made
    # After a test that has written gradients it raises once more.
    with contextlib.suppress(UnsupportedConfigurationError):
        made.state.close()


LOOKS: dict[str, Callable[[Training], object]] = {
    "flush": lambda t: t.state.flush(),
    "the state's own dict": lambda t: t.state.state_dict(),
    "the optimizer's": lambda t: t.optimizer.state_dict(),
    "loading the optimizer's": lambda t: t.optimizer.load_state_dict(
        copy.deepcopy(t.optimizer.state_dict())
    ),
    "zeroing in place": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "a second step": lambda t: t.optimizer.step(),
    "close": lambda t: t.state.close(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_step_changes_no_parameter_until_a_read(
    look: str, training: Training, plain: Training
) -> None:
    training.run(STEPS - 1).backward()
    before = [p.detach().clone() for p in training.held]
    training.update()
    assert training.is_pending
    assert all(map(torch.equal, training.held, before)), "documented: held tensors are old"
    LOOKS[look](training)
    assert not training.is_pending
    assert all(map(torch.equal, training.held, plain.run().weights()))


@pytest.mark.defect("strangers-31")
@pytest.mark.parametrize(("steps", "every", "told"), [(8, 1, 1), (64, 16, 0)])
def test_reads_in_every_step_warn_once_and_occasional_reads_do_not(
    steps: int, every: int, told: int
) -> None:
    training = Training(decoupled=True)
    with heard() as said:
        for step in range(1, 1 + steps):
            training.step()
            if step % every == 0:
                training.model.module.state_dict()
    assert ["updates wait for the network" in each for each in said] == [True] * told


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("when", ["after", "before"])
@pytest.mark.parametrize("ours", ["decoupled", "owned"])
def test_schedulers_work_wherever_they_are_stepped(
    ours: str, scheduler_first: bool, when: str
) -> None:
    cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20)
    trained = [
        harness.Training(way, schedule=cycle if scheduler_first else None) for way in (ours, None)
    ]
    for each in trained:
        scheduler = each.schedulers.pop() if scheduler_first else cycle(each.optimizer)
        with warnings.catch_warnings():
            # Torch always warns of stepping it before; stepping it after must not warn.
            warnings.simplefilter("ignore" if when == "before" else "error")
            acts = (
                (scheduler.step, each.update) if when == "before" else (each.update, scheduler.step)
            )
            for _ in range(8):
                each.backward()
                for act in acts:
                    act()
    assert_same(*trained)


@pytest.mark.defect("strangers-7")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_clipping_equals_torchs_deferred_or_not(norm_type: float, max_norm: float) -> None:
    """It may be repeated, with the same norm up to its last bits."""
    net = functools.partial(harness.mlp, 6, 40, 40, 6, seed=3, tanh_last=True)
    runs = [Training(decoupled=decoupled, net=net) for decoupled in (True, True, False)]
    deferred, flushed, plain = runs
    for step in range(12):
        for each in runs:
            each.backward()
        flushed.state.flush()
        for most in (max_norm, 0.1 * max_norm)[: 1 + (step == 11)]:
            got, other = (
                each.state.clip_grad_norm_(most, norm_type) for each in (deferred, flushed)
            )
            assert torch.equal(got, other) or most < max_norm
            expected = clip_grad_norm_(plain.model.parameters(), most, norm_type)
            assert torch.allclose(got, expected, rtol=1e-5)
        assert step == 11 or same(deferred, flushed)
        for each in runs:
            each.update()
    torch.testing.assert_close(deferred.weights(), plain.weights(), rtol=1e-6, atol=1e-8)


def clamp(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.clamp_(-0.1, 0.1)


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "torch's clipping": lambda held: clip_grad_norm_(held, 1.0),
    "torch's clipping of large norms only": lambda held: clip_grad_norm_(held, 1e9),
    "clipping by value": lambda held: nn.utils.clip_grad_value_(held, 0.1),
    "noise": lambda held: [p.grad.add_(1.0) for p in held if p.grad is not None],
    "old-style clipping": lambda held: [p.grad.data.mul_(0.5) for p in held if p.grad is not None],
    "other gradients": lambda held: [setattr(p, "grad", torch.ones_like(p)) for p in held],
}
CLIPPING = ("torch's clipping",)
HELD = "tensors taken earlier"
FLUSHED = "tensors taken earlier, behind flush()"
WAYS: dict[str, Callable[[Training], list[nn.Parameter]]] = {
    "the model": lambda t: list(t.model.parameters()),
    "the network": lambda t: [p for _, p in t.model.module.named_parameters()],
    "the optimizer": lambda t: [p for group in t.optimizer.param_groups for p in group["params"]],
    "the optimizer by number": lambda t: [
        group["params"][i]
        for group in t.optimizer.param_groups
        for i in range(len(group["params"]))
    ],
    "the optimizer's list": lambda t: t.optimizer.param_groups[0]["params"] + [],
    "a sum of lists": lambda t: sum((group["params"] for group in t.optimizer.param_groups), []),  # noqa: RUF017
    "a copy": lambda t: t.optimizer.param_groups[0]["params"].copy(),
    "backwards": lambda t: [*reversed(t.optimizer.param_groups[0]["params"])],
    FLUSHED: lambda t: (t.state and t.state.flush(), t.held)[1],
}


@pytest.mark.parametrize("way", [*WAYS, HELD])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_gradients_and_parameters_equal_plain_ddps(change: str, way: str) -> None:
    """Gradients are changed before the step, and parameters after it."""
    training, plain = both()
    is_held = way == HELD
    with heard() as said:
        for each in (training, plain):
            for _ in range(STEPS):
                each.backward()
                CHANGES[change](each.held if is_held else WAYS[way](each))
                each.update()
                if not is_held:
                    clamp(WAYS[way](each))
    if change in CLIPPING:  # a norm of ours may differ from torch's in the last bit
        torch.testing.assert_close(training.weights(), plain.weights(), rtol=1e-6, atol=1e-7)
    else:
        assert_same(training, plain)
    assert any("gradients are read" in each for each in said) == (
        change == "noise" and way != FLUSHED
    )


# Writes between step() and the next forward to tensors taken earlier, the number of steps before,
# and the message. `.data` counts no version.
SPOILED: dict[str, tuple[Callable[[list[Any]], object], int, str]] = {
    "parameters": (lambda held: held[0].add_(1.0), STEPS, "parameters were written between"),
    "parameters' data": (clamp, 2, r"data\.clamp_.*state\.flush\(\) after step"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_changes_between_step_and_update_are_refused(spoiled: str, training: Training) -> None:
    act, steps, message = SPOILED[spoiled]
    training.run(steps).backward()
    training.optimizer.step()
    with torch.no_grad():
        act(training.held)
    with refused(match=message):
        training.backward()


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda gradient: gradient.data.mul_(0.5)])
def test_gradients_after_step_are_plain_ddps_and_writing_them_changes_no_step(
    write: Any, view: bool
) -> None:
    training, plain = both(ddp={"gradient_as_bucket_view": view})
    for each in (training, plain):
        for _ in range(STEPS):
            each.backward()
            each.gradients = [p.grad for p in each.held]
            each.optimizer.step()
            each.norms = [gradient.norm() for gradient in each.gradients]
            each.read = [gradient.clone() for gradient in each.gradients]
            write(each.gradients[0])
            each.drop()
    assert all(map(torch.equal, training.read, plain.read))
    torch.testing.assert_close(training.norms, plain.norms)
    assert_same(training, plain)


@pytest.mark.parametrize(("check", "refuses"), [("", False), ("0", False), ("1", True)])
def test_later_steps_are_checked_with_crossover_check(
    check: str, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_CHECK", check)
    training, plain = (each.run(8) for each in both())
    assert training.is_pending
    assert_same(training, plain)
    training.step()
    training.held[0].data[-1, -1] += 1.0  # none of the few elements that are compared in every step
    with refused() if refuses else contextlib.nullcontext():
        training.backward()


def accumulated(each: Training) -> None:
    """Without no_sync: each backward averages the sum so far."""
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


def by_closure(each: Training) -> None:
    calls: list[float] = []

    def closure() -> float:
        each.drop()
        calls.append(each.backward())
        return calls[-1]

    with torch.no_grad():  # the closure needs gradients whatever the caller has set
        assert each.optimizer.step(closure) == calls[-1]
    assert len(calls) == 1


def rate_in_place(each: Training) -> None:
    each.step()
    each.optimizer.param_groups[0]["lr"].mul_(0.9)


def scaled(each: Training, unscale: bool = False) -> None:
    scaler = vars(each).setdefault(
        "scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    )
    scaler.scale(each.loss()).backward()
    if unscale:
        scaler.unscale_(each.optimizer)
    scaler.step(each.optimizer)
    scaler.update()
    each.drop()


def in_a_lookahead(each: Training) -> None:
    outer = vars(each).setdefault("outer", timm.optim.Lookahead(each.optimizer, k=3))
    each.backward()
    outer.step()
    outer.zero_grad()


def evaluated_for_inference(each: Training, clip: bool = False, saved: bool = False) -> None:
    each.backward()
    if clip and each.state is not None:
        each.state.clip_grad_norm_(1e9)
    each.update()
    with torch.inference_mode(each.steps % 3 == 0):
        each.model.module.state_dict() if saved else each.model.eval()(inputs(7))
    each.model.train()


class NewState(torch.optim.SGD):
    """Puts a new tensor into its state in every step, and writes it, unlike an inference tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            mean = self.state[parameter].get("mean", torch.zeros(()))
            self.state[parameter]["mean"] = mean.mul_(0.5) + parameter.grad
            parameter.add_(self.state[parameter]["mean"], alpha=-0.05)


Loop = Callable[[Training], None]
Make = Callable[[nn.Module], torch.optim.Optimizer]
DEFERRED: list[tuple[Loop, Make | None]] = [
    *((loop, None) for loop in (accumulated, never_zeroed, dropped, written, by_closure)),
    (rate_in_place, lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))),
]
LOOPS: list[tuple[Loop, Make | None]] = [
    *DEFERRED,
    (in_a_lookahead, None),
    *(
        (functools.partial(scaled, unscale=unscale), make)
        for unscale in (True, False)
        for make in (None, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    ),
    *(
        (
            functools.partial(evaluated_for_inference, **how),
            lambda m: NewState(m.parameters(), lr=0.05),
        )
        for how in ({}, {"clip": True}, {"saved": True}, {"clip": True, "saved": True})
    ),
]


@pytest.mark.parametrize(("loop", "make"), LOOPS)
def test_training_loops_equal_plain_ddp(loop: Loop, make: Make | None) -> None:
    training, plain = both(make=make)
    for each in (training, plain):
        for _ in range(10):
            loop(each)
    if (loop, make) in DEFERRED:
        assert training.is_pending
    assert_same(training, plain)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_the_optimizer_see_whole_steps(
    kind: str, training: Training, plain: Training
) -> None:
    seen: list[torch.Tensor] = []
    for each in (training, plain):
        register = getattr(each.optimizer, f"register_step_{kind}_hook")
        register(lambda *_, held=each.held: seen.append(parameters_to_vector(held).clone()))
        each.run()
    assert len(seen) == 2 * STEPS
    assert all(map(torch.equal, seen[:STEPS], seen[STEPS:]))


def test_copied_models_and_optimizers_of_closed_states_are_plain(
    training: Training, plain: Training
) -> None:
    training.run(3)
    training.state.load_state_dict({"forward_order": ["0.weight"]})  # of version 0.1
    with pytest.raises(ValueError, match="expected a state dict of a DecoupledState"):
        training.state.load_state_dict({"order": []})
    with heard() as said:
        for twin in (copy.deepcopy(training.model), copy.deepcopy(training.model.module)):
            assert not training.is_pending
            twin(inputs(0)).sum().backward()
    assert any("has no hook" in each for each in said)
    training.state.close()
    training.state.close()
    assert not {"step", "zero_grad"} & {*vars(training.optimizer)}
    assert [type(group["params"]) for group in training.optimizer.param_groups] == [list]
    training.run(STEPS)
    assert_same(training, plain.run(STEPS + 3))
    DecoupledState(training.optimizer).close()


def test_after_an_error_and_close_training_equals_plain_ddp(
    training: Training, plain: Training
) -> None:
    for each in (training, plain):
        each.run().backward()
    training.optimizer.step()
    before = training.held[0].detach().clone()
    training.held[0].data.add_(1.0)
    for use in (training.model.module.state_dict, training.state.close):
        with refused(match="parameters were written"):
            use()
    training.held[0].data.copy_(before)
    for each in (training, plain):
        each.optimizer.zero_grad()
        each.run()
    assert_same(training, plain)


class Embedded(nn.Module):
    """Has sparse gradients, and reads no features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.embedding(torch.tensor([1]))  # type: ignore[no-any-return]


def some(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[:4], lr=0.1)


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(6, 6)))


STRANGER = nn.Parameter(torch.ones(2))


def with_a_stranger(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), STRANGER], lr=0.1)


def trains_a_stranger(each: Training) -> None:
    each.run(1)
    (each.loss() + STRANGER.sum()).backward()
    each.optimizer.step()


def adds_a_group(each: Training) -> None:
    each.optimizer.add_param_group({"params": [*each.model.parameters()][4:]})
    each.step()


REFUSED: list[tuple[dict[str, Any], Callable[[Training], object], str]] = [
    (
        {"ddp": {"gradient_as_bucket_view": False, "find_unused_parameters": True}},
        Training.backward,
        r"gradient_as_bucket_view=False and find_unused",
    ),
    ({"make": some}, Training.backward, r"got 2 that are not in it \(4.*parameter group"),
    ({"net": Embedded}, Training.backward, "sparse=False"),
    ({"net": scripted}, Training.backward, r"got 0 made by torch\.jit"),
    ({"owned": True, "make": some}, adds_a_group, r"add_param_group\(\) make a new state"),
    ({"make": with_a_stranger}, trains_a_stranger, "gradients of 1 other parameters"),
]


@pytest.mark.defect("decoupled-7", "strangers-31")
@pytest.mark.parametrize(("options", "act", "message"), REFUSED)
def test_models_and_optimizers_that_cannot_work_are_refused(
    options: Any, act: Any, message: str
) -> None:
    with refused(match=message):
        act(Training(decoupled=True, **options))


INSTEAD: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "another optimizer": lambda held: torch.optim.Adam(held, lr=0.01).step(),
    "a fused one": lambda held: torch.optim.SGD(held, lr=0.1, fused=True).step(),
    "by hand": torch.no_grad()(lambda held: [p.sub_(0.1 * p.grad) for p in held]),
}
NEXT: dict[str, Callable[[Training], object]] = {
    "forward": lambda t: t.backward(),
    "a look": lambda t: list(t.model.parameters()),
    "evaluation": lambda t: t.model.module(inputs(0)),
}


@pytest.mark.parametrize("next_", NEXT)
@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_step_of_other_code_equals_plain_ddps(steps: int, instead: str, next_: str) -> None:
    training, plain = Training(decoupled=True).run(steps), Training(decoupled=False).run(steps)
    for each in (training, plain):
        for _ in range(2):
            each.backward()
            INSTEAD[instead](each.held)
            NEXT[next_](each)
            each.drop()
        each.run(2)
    assert_same(training, plain)
    training.state.close()


NEW = "a new KFACState without a codec for each DecoupledKFACState, got one "


# Arguments of DecoupledKFACState beside the optimizer.
KFAC_REFUSED: list[tuple[Callable[[WithKFAC], dict[str, Any]], type[Exception], str]] = [
    (
        lambda _: {"kfac": WithKFAC(codec=Int8()).kfac},
        UnsupportedConfigurationError,
        NEW + "with a codec",
    ),
    (lambda made: {"kfac": made.optimizer}, TypeError, "expected a KFACState, got kfac=SGD"),
    (
        lambda _: {"mutex": RecordingTurn()},
        ValueError,
        "got mutex=.* and a KFACState with mutex=None",
    ),
    (
        lambda _: {"process_group": dist.new_group([0])},
        ValueError,
        "got a KFACState of another, of 1 ranks",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), KFAC_REFUSED)
def test_a_kfac_state_that_does_not_fit_is_refused(
    options: Any, kind: type[Exception], message: str
) -> None:
    """The optimizer is left alone."""
    made = WithKFAC()
    with pytest.raises(kind, match=message):
        DecoupledKFACState(made.optimizer, **{"kfac": made.kfac} | options(made))
    DecoupledKFACState(made.optimizer, made.kfac)
    with refused(match=NEW + "that is part"):
        DecoupledKFACState(torch.optim.SGD(made.model.parameters(), lr=0.1), made.kfac)


# Arguments of version 0.2 that exclude each other, and the message.
COMBINED: list[tuple[Callable[[WithKFAC], dict[str, Any]], str]] = [
    (
        lambda _: {"owners": "layers", "codec": Int8()},
        r"owners='layers' and kfac=None.*OwnerState\(optimizer, codec=.*use one",
    ),
    (
        lambda made: {"kfac": made.kfac, "codec": Int8()},
        "owners= and kfac= at most, got codec=Int8",
    ),
    (lambda made: {"kfac": made.kfac, "owners": "layers"}, "got codec=None, owners='layers' and"),
]


@pytest.mark.parametrize(("options", "message"), COMBINED)
def test_former_arguments_that_exclude_each_other_are_refused(options: Any, message: str) -> None:
    made = WithKFAC()
    with refused(match=message):
        DecoupledState(made.optimizer, **options(made))


def test_owners_layers_makes_an_owner_state_with_a_warning_and_trains_as_that() -> None:
    def formerly(model: Any, optimizers: Any, mutex: Any) -> Any:
        with pytest.warns(FutureWarning, match=r"OwnerState\(optimizer\).*owner_hook"):
            state = DecoupledState(optimizers, mutex=mutex, owners="layers", defer="auto")
        assert type(state) is OwnerState
        return state, decoupled_hook

    assert_same(harness.Training(formerly).run(6), harness.Training("owned").run(6))


def test_kfac_makes_a_decoupled_kfac_state_with_a_warning() -> None:
    made = WithKFAC()
    with pytest.warns(FutureWarning, match=r"write DecoupledKFACState\(optimizer, kfac\)"):
        state = DecoupledState(made.optimizer, kfac=made.kfac, defer="always")
    assert type(state) is DecoupledKFACState


def test_kfacs_state_dict_flushes_and_kfac_hook_is_refused() -> None:
    made = WithKFAC(decoupled=True).run(4)
    assert made.state.stats()["deferred"], "the last update waits for the next forward"
    saved = made.kfac.state_dict()
    assert not made.state.stats()["deferred"]
    assert saved["steps"] == 4
    other = DistributedDataParallel(made.model.module)
    other.register_comm_hook(made.kfac, kfac_hook)
    with refused(match="expected decoupled_hook for a KFACState"):
        other(torch.ones(5, WIDTH)).sum().backward()
    made.drop()
    made.kfac.load_state_dict(saved)
    made.state.close()
    made.kfac.close()
    made.step()
    assert made.kfac.steps == 5
