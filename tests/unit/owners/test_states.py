"""Owners in a job of one rank, by `OwnerState` and `MuonState`: refusals, skipped steps."""

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon
from torch.optim import optimizer as optimizer_module

from crossover_ddp._owners import muon as muon_in_halves
from crossover_ddp._owners.muon import check_torch
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_hook
from crossover_ddp.owner_hooks import OwnerState
from tests.harness.training import Training, muon_and_sgd, same

pytestmark = pytest.mark.usefixtures("process_group")


def refuses(match: str) -> Any:
    return pytest.raises(UnsupportedConfigurationError, match=match)


def test_another_optimizer_is_refused() -> None:
    other = type("Other", (Muon,), {"step": lambda self: None})
    wrapped = type("Wrapped", (Muon,), {"step": functools.wraps(Muon.step)(lambda self: None)})
    for kind, message in (
        (AdamW, r"expected a torch\.optim\.Muon, got muon=AdamW"),
        (other, "got muon=Other, which has another"),
        (wrapped, "got muon=Wrapped, which has another"),
    ):
        with pytest.raises(TypeError, match=message):
            MuonState(kind([nn.Parameter(torch.ones(2, 2))]))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, math.inf, math.nan])
def test_a_loss_scale_that_rounds_is_refused(scale: float) -> None:
    def training(loss_scale: Any) -> Training:
        def way(_: Any, given: Any, __: Any) -> Any:
            return MuonState(given[0], loss_scale=loss_scale), muon_hook

        return Training(way, optimizers=muon_and_sgd)

    for use in (lambda: training(scale), training(lambda: scale).backward):
        with pytest.raises(ValueError, match="expected a loss_scale that is a power of two"):
            use()


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("muon", r"backward\(\) with muon_hook between"),
        ("owned", r"outside of no_sync\(\)"),
    ],
)
def test_a_step_needs_an_exchange(way: str, message: str) -> None:
    training = Training(way)
    training.optimizer.step()  # there are no gradients, so it does nothing, as with plain DDP
    if way == "muon":
        with refuses("there is no norm yet"):
            training.state.grad_norm()
    training.run(1)
    with training.model.no_sync():
        training.backward()
    with refuses(message):
        training.optimizer.step()
    training.drop()
    before = training.weights()
    training.step()
    assert not all(map(torch.equal, training.weights(), before))


@pytest.mark.parametrize(("way", "step"), [("muon", "muon.step()"), ("owned", "step()")])
def test_a_skipped_step_changes_nothing_and_a_forgotten_one_is_an_error(
    way: str, step: str
) -> None:
    ours = Training(way)
    plain = Training(None, optimizers=muon_and_sgd if way == "muon" else None)
    for number in range(8):
        for each in (ours, plain):
            if number % 3 == 1:
                each.backward(700)
                each.drop()
        if number % 3 == 2:
            ours.backward(800)
            with pytest.raises(UnsupportedConfigurationError) as error:
                ours.backward(800)
            assert f"expected {step} between two exchanges" in str(error.value)
            ours.drop()
        ours.step()
        plain.step()
        assert same(ours, plain), number


# Mistakes after a backward pass with Muon and SGD: the hook, the mistake, the message.
MISUSES: dict[str, tuple[str, Callable[[Training], object], str]] = {
    "clipping by another norm": (
        "owned",
        lambda t: (clip_grad_norm_(t.held, 0.1, norm_type=1.0), t.update()),
        r"state\.clip_grad_norm_",
    ),
    "a read": (
        "owned",
        lambda t: (t.optimizer.step(), t.weights()),
        r"call all of them after each backward",
    ),
    "forward": ("owned", lambda t: (t.optimizer.step(), t.backward()), "call all of them"),
    "a second step": ("owned", lambda t: (t.optimizer.step(), t.optimizer.step()), "second one"),
    "a step hook": (
        "owned",
        lambda t: (t.optimizer.register_step_post_hook(id), t.update()),
        "use DecoupledState",
    ),
    "changes through data": (
        "owned",
        lambda t: (t.held[0].grad.data.add_(0.5), t.update()),
        "were changed",
    ),
    "settings": (
        "muon",
        lambda t: (t.optimizer.param_groups[0].update(momentum=0), t.update()),
        "change",
    ),
}


@pytest.mark.defect("strangers-1", "decoupled-9")
@pytest.mark.parametrize(("way", "act", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse_of_owners_is_refused_with_the_remedy(way: str, act: Any, message: str) -> None:
    training = Training(way, optimizers=muon_and_sgd)
    training.backward()
    with refuses(message):
        act(training)


def test_gradients_that_are_dropped_after_some_optimizers_have_stepped_are_refused_once() -> None:
    training = Training("owned", optimizers=muon_and_sgd).run(1)
    training.backward()
    training.optimizers[0].step()
    with refuses(r"dropped after step\(\) of Muon alone"):
        training.drop()
    before = torch.cat([p.detach().flatten() for p in training.held])
    training.run(1)
    assert not torch.equal(torch.cat([p.detach().flatten() for p in training.held]), before)
    training.state.checkpoint()


class Collective(SGD):
    """An optimizer with a collective of its own, as public distributed Muons have one."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        return super().step(closure)


class Square(SGD):
    """Works on square matrices only, such as those of the trial of optimizers."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            torch.linalg.cholesky(torch.eye(parameter.shape[0]) * torch.ones(parameter.shape))
        return super().step(closure)


class ScheduleFree(SGD):
    """Replaces all parameters before and after evaluations, by its state of each."""

    eval = train = SGD.step


@pytest.mark.defect("strangers-6")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Collective, "Collective.*allreduce"),
        (Square, r"Square, which failed on one of shape \(4, 6\)"),
        (ScheduleFree, r"ScheduleFree.*eval\(\)"),
    ],
)
def test_an_optimizer_that_cannot_run_on_one_parameter_is_refused(
    kind: type[SGD], message: str
) -> None:
    with refuses(message):
        OwnerState(kind([nn.Parameter(torch.ones(4, 6))], lr=0.1))


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_of_muons_step_are_refused(everywhere: bool, kind: str) -> None:
    training = Training("muon").run(1)
    target = optimizer_module if everywhere else training.optimizer
    register = getattr(target, f"register_{'optimizer_' * everywhere}step_{kind}_hook")
    handle = register(lambda *_: None)
    training.backward()
    with refuses("expected no step hooks"):
        training.optimizer.step()
    handle.remove()
    training.drop()
    training.run(1)


def test_a_matrix_that_is_taken_out_of_muon_is_averaged_as_any_other_parameter() -> None:
    ours, plain = Training("muon"), Training(None, optimizers=muon_and_sgd)
    for each in (ours, plain):
        muon, sgd = each.run(2).optimizers
        sgd.add_param_group({"params": [muon.param_groups[0]["params"].pop()]})
        each.run(3)
    assert same(ours, plain)


def test_matrices_of_another_model_are_refused() -> None:
    stranger = nn.Parameter(torch.ones(2, 2))
    training = Training("muon", optimizers=lambda m: [Muon([m.module[0].weight, stranger])])
    with refuses("expected the matrices of one DDP model"):
        training.backward()


def test_a_torch_with_another_muon_is_refused() -> None:
    check_torch.cache_clear()
    other = mock.patch.object(
        muon_in_halves, "take_step", lambda parameter, *_: parameter.mul_(0.9)
    )
    try:
        with other, refuses("computes another step than its parts do"):
            Training("muon")
    finally:
        check_torch.cache_clear()


def test_a_closed_state_gives_muon_back() -> None:
    training, plain = Training("muon").run(2), Training(None, optimizers=muon_and_sgd).run(2)
    with refuses("has another already"):
        MuonState(training.optimizer)
    training.state.close()
    with refuses("this MuonState is closed"):
        training.backward()
    training.drop()
    assert "zero_grad" not in vars(training.optimizer)
    after = Training(None, module=training.model.module, optimizers=lambda _: training.optimizers)
    after.steps = training.steps
    assert same(after.run(2), plain.run(2))
    MuonState(training.optimizer)
    with refuses("has another already"):
        OwnerState(training.optimizer)
