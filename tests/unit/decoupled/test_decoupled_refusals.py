"""What decoupled training cannot do is refused, and leaves nothing half done."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from crossover_ddp import UnsupportedConfigurationError, decoupled_hook
from crossover_ddp.codecs import Int8
from tests.harness import training as harness
from tests.unit.decoupled.decoupled_training import Training, assert_same, inputs

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


def second_model() -> harness.Training:
    first = Training(decoupled=True)
    first.backward()
    second = harness.Training(lambda *_: (first.state, decoupled_hook))
    vars(second)["first"] = first  # still there
    return second


NO_VIEWS = {"gradient_as_bucket_view": False, "find_unused_parameters": True}
REFUSED: dict[str, tuple[Callable[[], harness.Training], str]] = {
    "no views that can be made": (
        lambda: Training(decoupled=True, ddp=NO_VIEWS),
        r"gradient_as_bucket_view=False and find_unused",
    ),
    "parameters without an optimizer": (
        lambda: Training(decoupled=True, make=lambda m: torch.optim.SGD(list(m.parameters())[:4], lr=0.1)),
        r"got 2 that are not in it \(4.*parameter group",
    ),
    "sparse gradients": (
        lambda: harness.Training(
            "decoupled", module=nn.Embedding(4, 3, sparse=True), loss=lambda m, *_: m(torch.tensor([1])).sum()
        ),
        "sparse=False",
    ),
    "a scripted module": (
        lambda: Training(decoupled=True, net=lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 6)))),
        r"got 0 made by torch\.jit",
    ),
    "a second model": (second_model, "one model for each DecoupledState"),
    "a codec, which would round the parameters that owners send": (
        lambda: Training(decoupled=True, owners="layers", codec=Int8()),
        r"codec=None with owners='layers'.*use one of both",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoupled_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedConfigurationError, match=message):
        make().backward()


def test_strangers_in_the_optimizer_are_refused_when_they_have_gradients() -> None:
    stranger = nn.Parameter(torch.ones(2))
    training = Training(
        decoupled=True, make=lambda model: torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    )
    (training.loss() + stranger.sum()).backward()
    with pytest.raises(UnsupportedConfigurationError, match="gradients of 1 other parameters"):
        training.optimizer.step()


def by_hand(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


INSTEAD: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "another optimizer": lambda held: torch.optim.Adam(held, lr=0.01).step(),
    "a fused one": lambda held: torch.optim.SGD(held, lr=0.1, fused=True).step(),
    "by hand": by_hand,
}
NEXT: dict[str, Callable[[Training], object]] = {
    "forward": lambda training: training.backward(),
    "a look": lambda training: list(training.model.parameters()),
    "evaluation": lambda training: training.model.module(inputs(0)),
}


@pytest.mark.parametrize("next_", NEXT)
@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_step_of_somebody_else_is_refused_unless_gradients_are_whole(
    steps: int, instead: str, next_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instead == "a fused one" and steps > 4:
        monkeypatch.setenv("CROSSOVER_CHECK", "1")  # torch's fused kernels count no version
    training, plain = Training(decoupled=True).run(steps), Training(decoupled=False).run(steps)
    for each in (training, plain):
        each.backward()
        training.state.flush()
        INSTEAD[instead](each.held)
    assert_same(training, plain)
    training.backward()
    INSTEAD[instead](training.held)
    with pytest.raises(UnsupportedConfigurationError, match=r"another optimizer.*call state\.flush\(\)"):
        NEXT[next_](training)
    training.step()  # nothing is left half done
    training.state.close()
