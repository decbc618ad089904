"""Code between two steps writes parameters, the optimizer's state, or takes the step itself.

Such a loop trains as with plain DDP, or an error names the change it needs. This holds long after
the first steps, which are checked most closely.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import crossover_ddp as ddp
from tests.harness import in_ranks
from tests.harness.oracles import error_of
from tests.harness.training import Training, batch

LATE = 9  # steps before the first write


def evaluate(training: Training) -> None:
    with torch.no_grad():
        training.model(batch(0, 0))


# --- averages that are swapped in ----------------------------------------------------------------


def copied(
    held: list[nn.Parameter], average: list[torch.Tensor], between: Callable[[], object]
) -> None:
    kept = [p.detach().clone() for p in held]
    for p, a in zip(held, average, strict=True):
        p.data.copy_(a)
    between()
    for p, k in zip(held, kept, strict=True):
        p.data.copy_(k)


def exchanged(
    held: list[nn.Parameter], average: list[torch.Tensor], between: Callable[[], object]
) -> None:
    kept = [p.data for p in held]
    for p, a in zip(held, average, strict=True):
        p.data = a
    between()
    for p, k in zip(held, kept, strict=True):
        p.data = k


@pytest.mark.torch_version
@pytest.mark.parametrize("evaluates", ["the DDP model", "its module", "a training forward"])
@pytest.mark.parametrize("swap", [copied, exchanged])
@pytest.mark.parametrize("way", ["decoupled", "owned"])
@in_ranks(2)
def test_an_average_swapped_in_through_data_is_refused(
    rank: int, way: str, swap: Any, evaluates: str
) -> None:
    training = Training(way, rank).run(LATE)
    average = [p.detach() * 0.9 for p in training.held]

    def between() -> None:
        if evaluates == "its module":
            with torch.no_grad():
                training.model.module(batch(0, 0))
        elif evaluates == "the DDP model":
            evaluate(training)
        else:
            training.model(batch(0, 0))

    told = error_of(lambda: swap(training.held, average, between))
    assert told.startswith("parameters were written between optimizer.step() and their update")
    assert "an average that is swapped in for an evaluation" in told and "state.flush()" in told


@pytest.mark.parametrize("swap", [copied, exchanged])
@pytest.mark.parametrize("how", ["flush", "model.parameters()"])
@pytest.mark.parametrize("way", ["decoupled", "owned"])
@in_ranks(2)
def test_an_average_swapped_in_as_the_error_advises_changes_nothing(
    rank: int, way: str, how: str, swap: Any
) -> None:
    found = []
    for each in (None, way):
        training = Training(each, rank)
        for _ in range(3):
            training.run(3)
            if each is not None and how == "flush":
                training.state.flush()
            held = training.held if how == "flush" else list(training.model.parameters())
            swap(
                held, [p.detach() * 0.9 for p in held], lambda training=training: evaluate(training)
            )
        training.close()
        found.append(training.weights())
    assert all(map(torch.equal, *found))


@in_ranks(2)
def test_equal_values_written_through_data_are_no_difference(rank: int) -> None:
    """Restored values, NaN among them, have the bits that they had."""
    training = Training("decoupled", rank).run(LATE)
    training.state.flush()
    training.held[0].data[0, 0] = torch.nan
    training.step()
    for p in training.held:
        p.data.copy_(p.detach().clone())
    evaluate(training)
    training.close()


# --- the optimizer's state -----------------------------------------------------------------------


def zeroed(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


def scaled(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"].mul_(0.1)


def popped(optimizer: Any) -> None:
    optimizer.state.pop(next(iter(optimizer.state)))


def replaced(optimizer: Any) -> None:
    optimizer.state = type(optimizer)([torch.zeros(1)], lr=0.1).state


RESTARTS: dict[str, Callable[[Any], None]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "zero": zeroed,
    "scale": scaled,
    "pop": popped,
    "update": lambda optimizer: optimizer.state.update({p: {} for p in [*optimizer.state]}),
    "replace": replaced,
    "load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


# With owners a rank has only the state of its own parameters.
@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("way", "how"),
    [
        *((way, how) for way in ("decoupled", "kfac") for how in RESTARTS),
        ("owned", "clear"),
        ("owned", "zero"),
    ],
)
@in_ranks(2)
def test_momentum_that_is_restarted_between_steps_is_that_of_plain_ddp(
    rank: int, way: str, how: str
) -> None:
    found = []
    for each in (None, way) if way != "kfac" else ("kfac", decoupled_kfac):
        training = Training(each, rank)
        for _ in range(3):
            training.run(4)
            RESTARTS[how](training.optimizer)
        training.run(2)
        if each is not None and each != "kfac":
            training.state.flush()
        if not (way == "kfac" or each is None):
            assert way == "owned" or training.state.stats()["steps_deferred"] > 8
        found.append([p.detach().clone() for p in training.model.parameters()])
    assert all(map(torch.equal, *found))


def decoupled_kfac(model: Any, optimizers: Any, mutex: Any) -> Any:
    kfac = ddp.KFACState(model, optimizers[0])
    return ddp.DecoupledKFACState(optimizers[0], kfac), ddp.decoupled_hook


@pytest.mark.parametrize("how", ["tensor", "dictionary"])
@in_ranks(2)
def test_momentum_written_through_a_held_reference_is_refused(rank: int, how: str) -> None:
    training = Training("decoupled", rank).run(LATE)
    held = training.optimizer.state[training.held[0]]
    momentum = held["momentum_buffer"]
    training.step()
    assert training.is_pending
    if how == "tensor":
        momentum.zero_()
    else:
        held.clear()
    told = error_of(lambda: evaluate(training))
    assert told.startswith("the optimizer's state was written between") and "state.flush()" in told


@in_ranks(2)
def test_after_close_the_optimizers_state_is_a_plain_dictionary(rank: int) -> None:
    training = Training("decoupled", rank).run(4)
    training.close()
    assert type(training.optimizer.state).__module__ == "collections"
    training.run(2)


# --- gradients that other code uses --------------------------------------------------------------


def second_optimizer(training: Training) -> None:
    """A second stage of training begins."""
    second = torch.optim.AdamW(training.held, lr=1e-3)
    for _ in range(3):
        training.backward()
        second.step()
        training.drop()


def by_hand(training: Training) -> None:
    for _ in range(2):
        training.backward()
        with torch.no_grad():
            for p in training.held:
                p.add_(p.grad, alpha=-0.1)
        training.drop()


def by_hand_in_old_style(training: Training) -> None:
    for _ in range(2):
        training.backward()
        for p in training.held:
            p.data = p.data - 0.1 * p.grad.data
        training.drop()


def perturbed(training: Training) -> None:
    """SAM whose first pass is exchanged."""
    training.backward()
    ups = [0.05 * p.grad / p.grad.norm() for p in training.held]
    with torch.no_grad():
        torch._foreach_add_(training.held, ups)
    training.drop()
    training.backward()


USES = [second_optimizer, by_hand, by_hand_in_old_style, perturbed]


@pytest.mark.torch_version
@pytest.mark.parametrize("use", USES)
@in_ranks(2)
def test_other_code_that_uses_gradients_trains_as_with_plain_ddp(rank: int, use: Any) -> None:
    runs = [Training(way, rank).run(LATE) for way in ("decoupled", None)]
    for training in runs:
        use(training)
        training.drop()
        training.run(2)
    runs[0].close()
    # A norm of ours may differ from torch's in the last bit.
    torch.testing.assert_close(runs[0].weights(), runs[1].weights(), rtol=1e-6, atol=1e-7)


@pytest.mark.torch_version
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", ["owned", "muon"])
@in_ranks(2)
def test_other_code_that_uses_incomplete_gradients_is_refused(
    rank: int, way: str, use: Any
) -> None:
    training = Training(way, rank).run(LATE)
    told = error_of(lambda: use(training))
    assert told.startswith(
        ("expected step() of the optimizer", "expected muon.step() after backward()")
    ), told


@pytest.mark.parametrize("way", ["decoupled", "owned", "muon"])
@in_ranks(2)
def test_a_skipped_step_is_not_taken_for_a_use_of_its_gradients(rank: int, way: str) -> None:
    training = Training(way, rank).run(LATE)
    for _ in range(2):
        training.backward()
        training.drop()
    training.run(2)
    training.close()
