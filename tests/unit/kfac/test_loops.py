"""K-FAC in users' loops, with one rank: clearing, accumulating, closing, disabling."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from crossover_ddp import DecoupledKFACState, KFACState, decoupled_hook, kfac_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import networks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, batch

pytestmark = pytest.mark.usefixtures("process_group")

network = functools.partial(networks.mlp, WIDTH, 8, OUTPUTS, seed=1)
both_hooks = pytest.mark.parametrize(
    "decoupled", [False, True], ids=["kfac_hook", "decoupled_hook"]
)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    inputs, targets = batch(0, seed)
    return F.cross_entropy(model(inputs), targets)


def backward_unsynced(training: Training, seed: int) -> None:
    with training.model.no_sync():
        loss_of(training.model, seed).backward()


# Actions of a loop between two exchanges that do not clear the gradients.
BETWEEN: dict[str, Callable[[Training], Any]] = {
    "leave": lambda training: None,
    "clip": lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3),
    "accumulate": lambda training: backward_unsynced(training, 7),
}


@pytest.mark.defect("strangers-2", "kfac-S1")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("views", [False, True])
@both_hooks
def test_a_second_exchange_without_clearing_directions_is_refused_and_training_continues(
    decoupled: bool, views: bool, between: str
) -> None:
    """It would precondition the directions of the first exchange a second time."""
    training = Training(0, network(), ddp={"gradient_as_bucket_view": views}, decoupled=decoupled)
    for _ in range(3):
        training.step()
    training.backward()
    BETWEEN[between](training)
    with pytest.raises(UnsupportedConfigurationError, match=r"zero_grad\(\).*no_sync\(\)"):
        loss_of(training.model, 6).backward()
    training.step()


CLEAR: dict[str, Callable[[Training], Any]] = {
    "to None": lambda training: training.optimizer.zero_grad(),
    "to zero": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "by hand": lambda training: [
        each.grad.data.zero_() for each in training.model.parameters() if each.grad is not None
    ],
}


@pytest.mark.defect("kfac-S1")
@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("parts", [1, 2])
@both_hooks
def test_gradients_that_were_cleared_in_any_way_are_accepted(
    decoupled: bool, parts: int, clear: str
) -> None:
    training = Training(0, network(), decoupled=decoupled)
    for step in range(4):
        CLEAR[clear](training)
        torch.autograd.grad(loss_of(training.model.module, 9), list(training.model.parameters()))
        for part in range(1, parts):
            backward_unsynced(training, 10 * step + part)
        loss_of(training.model, 10 * step).backward()
        training.optimizer.step()


@pytest.mark.defect("kfac-S2")
# Without the refusal a journey would wait in C++, where Python handles no signal.
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("away", ["frozen", "ignored"])
@both_hooks
def test_a_layer_whose_bias_gets_no_gradient_is_refused(away: str, decoupled: bool) -> None:
    inner = network()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    kfac = KFACState(inner, optimizer)
    if away == "frozen":
        inner[0].bias.requires_grad_(False)
    else:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.bias"])
    model = DistributedDataParallel(inner)
    if decoupled:
        model.register_comm_hook(DecoupledKFACState(optimizer, kfac), decoupled_hook)
    else:
        model.register_comm_hook(kfac, kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match=r"0\.bias"):
        loss_of(model).backward()


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    return counter.get_total_flops()


@pytest.mark.defect("kfac-S4")
@both_hooks
def test_with_crossover_disable_a_step_computes_no_more_than_plain_ddp(
    decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    plain = DistributedDataParallel(network())
    training = Training(0, network(), decoupled=decoupled)
    for _ in range(2):
        assert flops(training.model) == flops(plain)


@pytest.mark.defect("kfac-S3", "kfac-S7")
@both_hooks
def test_after_close_steps_precondition_with_the_existing_solvers(decoupled: bool) -> None:
    """No factors are taken, no batches are counted as dropped, and the model has no hooks."""
    training = Training(0, network(), decoupled=decoupled, inv_update_steps=1, kl_clip=None)
    training.step()
    training.kfac.close()
    assert not any(each._forward_hooks for each in training.model.module)
    before = training.kfac.stats()
    found = []
    for _ in range(3):
        training.backward()
        found.append(training.gradients()["0.weight"])
    assert all(training.kfac.stats()[name] == before[name] for name in ("strained", "dropped"))
    plain = network()
    plain.load_state_dict(training.model.module.state_dict())
    loss_of(plain, 1).backward()
    assert not torch.allclose(found[-1], plain[0].weight.grad, rtol=0.1)
    assert all(torch.equal(each, found[0]) for each in found)


class Positions(nn.Module):
    """The same function of [N, S, d], computed in one of three layouts."""

    def __init__(self, arrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = network()
        self.arrange = arrange

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.arrange(inputs)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.defect("strangers-4")
@pytest.mark.parametrize("arrange", [lambda x: x.transpose(0, 1), lambda x: x.flatten(0, 1)])
def test_directions_do_not_depend_on_the_layout_of_inputs_inside_the_model(
    arrange: Callable[[Tensor], Tensor],
) -> None:
    """Nor on whether the model's argument is passed by position or by name."""
    x = torch.randn(4, 12, WIDTH, generator=torch.Generator().manual_seed(0))
    first = Training(0, Positions(lambda x: x), kl_clip=None, damping=0.1)
    second = Training(0, Positions(arrange), kl_clip=None, damping=0.1)
    first.model(x).backward()
    second.model(inputs=x).backward()
    for name, gradient in first.gradients().items():
        atol = 1e-4 * float(gradient.abs().max())
        assert torch.allclose(second.gradients()[name], gradient, rtol=1e-3, atol=atol)
