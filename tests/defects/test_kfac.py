"""Known defects of K-FAC; most with one rank."""

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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from crossover_ddp import DecoupledKFACState, KFACState, decoupled_hook, kfac_hook
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks, networks
from tests.harness.oracles import heard
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, batch

pytestmark = pytest.mark.usefixtures("process_group")

network = functools.partial(networks.mlp, WIDTH, 8, OUTPUTS, seed=1)
both_hooks = pytest.mark.parametrize(
    "decoupled", [False, True], ids=["kfac_hook", "decoupled_hook"]
)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    inputs, targets = batch(0, seed)
    return F.cross_entropy(model(inputs), targets)


BETWEEN: dict[str, Callable[[Training], Any]] = {
    "leave": id,
    "clip": lambda each: nn.utils.clip_grad_norm_(each.model.parameters(), 1e-3),
    "accumulate": lambda each: backward_unsynced(each, 7),
}


def backward_unsynced(training: Training, seed: int) -> None:
    with training.model.no_sync():
        loss_of(training.model, seed).backward()


@pytest.mark.defect("strangers-2", "kfac-S1")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("views", [False, True])
@both_hooks
def test_directions_that_wait_for_the_step_are_left_alone(
    decoupled: bool, views: bool, between: str
) -> None:
    """A second exchange that would precondition the first one's directions is refused, and training goes on."""
    training = Training(0, network(), ddp={"gradient_as_bucket_view": views}, decoupled=decoupled)
    for _ in range(3):
        training.step()
    training.backward()
    BETWEEN[between](training)
    with pytest.raises(UnsupportedConfigurationError, match=r"zero_grad\(\).*no_sync\(\)"):
        loss_of(training.model, 6).backward()
    training.step()


CLEAR: dict[str, Callable[[Training], Any]] = {
    "to None": lambda each: each.optimizer.zero_grad(),
    "to zero": lambda each: each.optimizer.zero_grad(set_to_none=False),
    "by hand": lambda each: [
        p.grad.data.zero_() for p in each.model.parameters() if p.grad is not None
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
# A part that never comes would be waited for where no signal is heard.
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("away", ["frozen", "ignored"])
@both_hooks
def test_a_layer_of_which_a_part_never_comes_is_refused(away: str, decoupled: bool) -> None:
    inner = network()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    state: Any = KFACState(inner, optimizer)
    if away == "frozen":
        inner[0].bias.requires_grad_(False)
    else:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.bias"])
    model = DistributedDataParallel(inner)
    state, hook = (
        (DecoupledKFACState(optimizer, state), decoupled_hook) if decoupled else (state, kfac_hook)
    )
    model.register_comm_hook(state, hook)
    with pytest.raises(UnsupportedConfigurationError, match=r"0\.bias"):
        loss_of(model).backward()


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    return counter.get_total_flops()


@pytest.mark.defect("kfac-S4")
@both_hooks
def test_disabled_it_computes_nothing(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    plain, training = (
        DistributedDataParallel(network()),
        Training(0, network(), decoupled=decoupled),
    )
    for _ in range(2):
        assert flops(training.model) == flops(plain)


@pytest.mark.defect("kfac-S3", "kfac-S7")
@both_hooks
def test_closed_it_goes_on_with_what_it_knows(decoupled: bool) -> None:
    """After close() steps precondition with the solvers that are there; nothing is taken, dropped, or in the way."""
    training = Training(0, network(), decoupled=decoupled, inv_update_steps=1, kl_clip=None)
    training.step()
    training.kfac.close()
    assert not any(each._forward_hooks for each in training.model.module)
    before, found = training.kfac.stats(), []
    for _ in range(3):
        training.backward()
        found.append(training.gradients()["0.weight"])
    assert all(training.kfac.stats()[name] == before[name] for name in ("strained", "dropped"))
    plain = network()
    plain.load_state_dict(training.model.module.state_dict())
    loss_of(plain, 1).backward()
    assert not torch.allclose(found[-1], plain[0].weight.grad, rtol=0.1)
    assert all(torch.equal(each, found[0]) for each in found)


def compile_early(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    loss_of(compiled).backward()
    return compiled


@pytest.mark.defect("kfac-S5")
@pytest.mark.parametrize("prepare", [nn.Module.eval, compile_early])
def test_a_step_without_any_factor_is_told_once(
    prepare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(0, prepare(network()), ddp={"bucket_cap_mb": 25}, kl_clip=None)
    for _ in range(3):
        training.step()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "eval()" in record.message and "compiled" in record.message


@pytest.mark.parametrize("seen", ["in eval mode", "a sparse input", "without a call"])
def test_a_layer_that_is_not_seen_beside_others_is_told_once(seen: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)
            self.first.train(seen != "in eval mode")

        def forward(self, inputs: Tensor) -> Tensor:
            if seen == "a sparse input":
                return self.head(self.first(inputs.to_sparse()))
            if seen == "without a call":
                return self.head(F.linear(inputs, self.first.weight, self.first.bias))
            return self.head(self.first(inputs))

    training = Training(0, Net(), kl_clip=None)
    with heard() as said:
        for _ in range(3):
            training.step()
    (told,) = [each for each in said if "has seen no call of" in each]
    assert "first, whose gradients came" in told


@pytest.mark.defect("strangers-32")
@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD]
)
def test_an_optimizer_that_divides_it_out_again_is_named(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    inner = network()
    KFACState(inner, kind(inner.parameters(), lr=0.1))
    told = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert [kind.__name__ in each for each in told] == [True] * (kind is not torch.optim.SGD)


class BesideItsModule(nn.Module):
    """Uses a weight through its module, and once more beside it."""

    def __init__(self, wrapped: Callable[[Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        self.layer, self._wrapped = nn.Linear(WIDTH, OUTPUTS), wrapped

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
def test_a_weight_used_beside_its_module_is_noticed(
    wrapped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Training(0, BesideItsModule(wrapped), kl_clip=None).model
    for output in tensors_in(model(torch.randn(4, WIDTH))):
        output.square().sum().backward()
    assert "layer: the model uses the weight beside its layer, too" in caplog.text


class Positions(nn.Module):
    """The same function of [N, S, d], computed in one of three layouts."""

    def __init__(self, arrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.arrange = network(), arrange

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.arrange(inputs)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.defect("strangers-4")
@pytest.mark.parametrize("arrange", [lambda x: x.transpose(0, 1), lambda x: x.flatten(0, 1)])
def test_directions_do_not_depend_on_the_layout(arrange: Callable[[Tensor], Tensor]) -> None:
    """Nor on whether the model is called by name."""
    x = torch.randn(4, 12, WIDTH, generator=torch.Generator().manual_seed(0))
    first, second = (
        Training(0, Positions(f), kl_clip=None, damping=0.1) for f in (lambda x: x, arrange)
    )
    first.model(x).backward()
    second.model(inputs=x).backward()
    for name, gradient in first.gradients().items():
        atol = 1e-4 * float(gradient.abs().max())
        assert torch.allclose(second.gradients()[name], gradient, rtol=1e-3, atol=atol)


@pytest.mark.defect("strangers-3")
@in_ranks(3)
def test_other_layers_arguments_and_states_are_refused_by_name_on_all_ranks(rank: int) -> None:
    """Of one rank alone: replicas would drift apart."""
    others = {"kl_clip": 0.01, "solver": "eigen", "inv_update_steps": 2}
    hidden = {"layer '0'": (9,), "layers": (8, 8)}
    for what in (*hidden, *others):
        widths = hidden.get(what, (8,)) if rank == 1 else (8,)
        layers = networks.mlp(WIDTH, *widths, OUTPUTS, seed=1)
        given: dict[str, Any] = {what: others[what]} if rank == 1 and what in others else {}
        with pytest.raises(UnsupportedConfigurationError) as caught:
            KFACState(layers, torch.optim.SGD(layers.parameters(), lr=0.1), **given)
        told = str(caught.value)
        assert told.startswith(f"expected the same {what} on all ranks, got {what} by rank {{0: ")
        assert what in hidden or f"1: {others[what]!r}" in told
    training = Training(rank, network())
    saved = training.kfac.state_dict()
    if rank == 1:
        training.kfac.load_state_dict({**saved, "steps": 7})
    found = r"the same steps of KFACState on all ranks, got steps of KFACState by rank \{0: 0, 1: 7"
    with pytest.raises(UnsupportedConfigurationError, match=found):
        training.backward()
