"""The warnings of K-FAC, each given once: layers that it does not see, optimizers that undo it."""

import dataclasses
import functools
import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossover_ddp import KFACState
from crossover_ddp._owners.owned_state import tensors_in
from tests.harness import networks
from tests.harness.oracles import heard
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, batch

pytestmark = pytest.mark.usefixtures("process_group")

network = functools.partial(networks.mlp, WIDTH, 8, OUTPUTS, seed=1)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


def compile_early(model: nn.Module) -> nn.Module:
    """Compile and call a model before its KFACState is made."""
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    inputs, targets = batch(0, 0)
    F.cross_entropy(compiled(inputs), targets).backward()
    return compiled


@pytest.mark.defect("kfac-S5")
@pytest.mark.parametrize("prepare", [nn.Module.eval, compile_early])
def test_steps_without_any_factor_give_one_warning(
    prepare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(0, prepare(network()), ddp={"bucket_cap_mb": 25}, kl_clip=None)
    for _ in range(3):
        training.step()
    (message,) = warnings_in(caplog)
    assert "eval()" in message
    assert "compiled" in message


class PartlySeen(nn.Module):
    """Two layers, the first of which K-FAC does not see, for one of several reasons."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.first.train(reason != "in eval mode")
        self._reason = reason

    def forward(self, inputs: Tensor) -> Tensor:
        if self._reason == "a sparse input":
            hidden = self.first(inputs.to_sparse())
        elif self._reason == "without a call":
            hidden = F.linear(inputs, self.first.weight, self.first.bias)
        else:
            hidden = self.first(inputs)
        return self.head(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reason", ["in eval mode", "a sparse input", "without a call"])
def test_a_layer_that_is_not_seen_among_others_gives_one_warning(reason: str) -> None:
    training = Training(0, PartlySeen(reason), kl_clip=None)
    with heard() as messages:
        for _ in range(3):
            training.step()
    (message,) = [each for each in messages if "has seen no call of" in each]
    assert "first, whose gradients came" in message


@pytest.mark.defect("strangers-32")
@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD]
)
def test_an_optimizer_that_divides_by_the_size_of_gradients_is_named(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    inner = network()
    KFACState(inner, kind(inner.parameters(), lr=0.1))
    messages = warnings_in(caplog)
    if kind is torch.optim.SGD:
        assert not messages
    else:
        (message,) = messages
        assert kind.__name__ in message


class OutsideOfItsModule(nn.Module):
    """Uses a weight by calling its module, and once more without a call."""

    def __init__(self, wrapped: Callable[[Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, OUTPUTS)
        self._wrapped = wrapped

    def forward(self, inputs: Tensor) -> Any:
        return self._wrapped(self.layer(inputs) + 100 * F.linear(inputs, self.layer.weight))


@dataclasses.dataclass
class Output:
    logits: Tensor


@pytest.mark.defect("kfac-S9")
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda output: output,
        lambda output: (Output(output),),
        lambda output: UserDict(logits=output),
    ],
)
def test_a_weight_that_is_used_outside_of_its_module_is_named(
    wrapped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Training(0, OutsideOfItsModule(wrapped), kl_clip=None).model
    for output in tensors_in(model(torch.randn(4, WIDTH))):
        output.square().sum().backward()
    assert "layer: the model also uses the weight outside of its layer" in caplog.text
