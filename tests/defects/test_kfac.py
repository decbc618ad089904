"""Known defects of K-FAC; most with one rank."""

import contextlib
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

from crossover_ddp import DecoupledState, KFACState, decoupled_hook, kfac_hook
from crossover_ddp._owners.kept import tensors_in
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import RankError, in_ranks, networks, run_ranks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, batch

pytestmark = pytest.mark.usefixtures("process_group")

network = functools.partial(networks.mlp, WIDTH, 8, OUTPUTS, seed=1)
both_hooks = pytest.mark.parametrize("decoupled", [False, True], ids=["kfac_hook", "decoupled_hook"])


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    inputs, targets = batch(0, seed)
    return F.cross_entropy(model(inputs), targets)


# --- a second backward pass before the step ----------------------------------------------------------------


def accumulate(training: Training) -> None:
    with training.model.no_sync():
        loss_of(training.model, 7).backward()


BETWEEN: dict[str, Callable[[Training], Any]] = {
    "leave": lambda training: None,
    "clip": lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3),
    "accumulate": accumulate,
}


@pytest.mark.defect("strangers-2", "kfac-S1")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("views", [False, True])
@both_hooks
def test_directions_that_wait_for_the_step_are_not_preconditioned_again(
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


def by_hand(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


CLEAR: dict[str, Callable[[Training], Any]] = {
    "to None": lambda training: training.optimizer.zero_grad(),
    "to zero": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "by hand": by_hand,
}


@pytest.mark.defect("kfac-S1")
@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("parts", [1, 2])
@both_hooks
def test_gradients_that_were_cleared_in_any_way_are_accepted(decoupled: bool, parts: int, clear: str) -> None:
    """Each way to clear gradients, before or after a look at them, is as good as another."""
    training = Training(0, network(), decoupled=decoupled)
    for step in range(4):
        CLEAR[clear](training)
        torch.autograd.grad(loss_of(training.model.module, 9), list(training.model.parameters()))
        for part in range(1, parts):
            with training.model.no_sync():
                loss_of(training.model, 10 * step + part).backward()
        loss_of(training.model, 10 * step).backward()
        training.optimizer.step()


# --- layers of which a part never comes --------------------------------------------------------------------


AWAY: dict[str, Callable[[nn.Module], Any]] = {
    "frozen": lambda model: model.get_parameter("0.bias").requires_grad_(False),
    "ignored": lambda model: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["0.bias"]
    ),
}


@pytest.mark.defect("kfac-S2")
# A part that never comes would be waited for where no signal is heard.
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("away", AWAY)
@both_hooks
def test_a_layer_of_which_a_part_never_comes_is_refused(away: str, decoupled: bool) -> None:
    """A layer whose bias is not exchanged is refused by name, where its weight would stay as each rank has it."""
    inner = network()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    state = KFACState(inner, optimizer)
    AWAY[away](inner)
    model = DistributedDataParallel(inner)
    if decoupled:
        model.register_comm_hook(DecoupledState(optimizer, kfac=state), decoupled_hook)
    else:
        model.register_comm_hook(state, kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match=r"0\.bias"):
        loss_of(model).backward()


# --- off, and closed ---------------------------------------------------------------------------------------


def flops(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.defect("kfac-S4")
@both_hooks
def test_disabled_it_computes_nothing(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CROSSOVER_DISABLE=1 a step computes what it does without a hook."""
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    plain, training = DistributedDataParallel(network()), Training(0, network(), decoupled=decoupled)
    for _ in range(2):
        expected = flops(lambda: loss_of(plain).backward())
        assert flops(lambda: loss_of(training.model).backward()) == expected


@pytest.mark.defect("kfac-S3", "kfac-S7")
@both_hooks
def test_closed_it_goes_on_with_what_it_knows(decoupled: bool) -> None:
    """After close() steps precondition with the solvers that are there; nothing is taken, dropped, or in the way."""
    training = Training(0, network(), decoupled=decoupled, inv_update_steps=1, kl_clip=None)
    training.step()
    training.kfac.close()
    before, found = training.kfac.stats(), []
    wrong = {name: before[name] for name in ("strained", "dropped")}
    for _ in range(3):
        training.backward()
        found.append(training.gradients())
    assert training.kfac.stats().items() >= wrong.items()
    plain = network()
    plain.load_state_dict(training.model.module.state_dict())
    loss_of(plain, 1).backward()
    assert not torch.allclose(found[-1]["0.weight"], plain[0].weight.grad, rtol=0.1)
    assert all(torch.equal(each["0.weight"], found[0]["0.weight"]) for each in found)


# --- what is not preconditioned ----------------------------------------------------------------------------


def compile_early(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    loss_of(compiled).backward()
    return compiled


@pytest.mark.defect("kfac-S5")
@pytest.mark.parametrize("prepare", [nn.Module.eval, compile_early])
def test_a_step_without_any_factor_is_told_once(
    prepare: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Training in which K-FAC sees no layer warns once, and says what may be the cause."""
    training = Training(0, prepare(network()), ddp={"bucket_cap_mb": 25}, kl_clip=None)
    for _ in range(3):
        training.step()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "eval()" in record.message and "compiled" in record.message


@pytest.mark.defect("strangers-32")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_an_optimizer_that_divides_preconditioning_out_again_is_named(
    kind: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    """Adam and its like bring one warning that names them; SGD is what K-FAC is for."""
    inner = network()
    KFACState(inner, kind(inner.parameters(), lr=0.1))  # type: ignore[call-arg]
    told = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert [kind.__name__ in each for each in told] == [True] * (0 if kind is torch.optim.SGD else 1)


@pytest.mark.defect("kfac-S8")
def test_a_layer_may_be_called_by_keyword() -> None:
    """GPT-2's Conv1D names its input x; called by that name, it trains as it does without K-FAC."""
    pytest.importorskip("transformers", reason="transformers, of which Conv1D is, is not installed")
    from transformers.pytorch_utils import Conv1D

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Conv1D(OUTPUTS, WIDTH)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(x=inputs)  # type: ignore[no-any-return]

    training = Training(0, Named())
    training.step()
    assert training.kfac.stats()["dropped"] == 0


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
    [lambda output: output, lambda output: (Output(output),), lambda output: UserDict(logits=output)],
)
def test_a_weight_used_beside_its_module_is_noticed(
    wrapped: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A gradient of which K-FAC has seen a part only is told."""
    model = Training(0, BesideItsModule(wrapped), kl_clip=None).model
    for output in tensors_in(model(torch.randn(4, WIDTH))):
        output.square().sum().backward()
    assert "layer: the model uses the weight beside its layer, too" in caplog.text


# --- ranks and layouts ---------------------------------------------------------------------------------------


class Positions(nn.Module):
    """The same function of [N, S, d], computed in one of three layouts."""

    def __init__(self, arrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = network()
        self.arrange = arrange

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.arrange(inputs)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.defect("strangers-4")
@pytest.mark.parametrize(
    "arrange", [lambda x: x.transpose(0, 1), lambda x: x.flatten(0, 1)], ids=["sequence first", "flattened"]
)
@pytest.mark.parametrize("called", [lambda x: ((x,), {}), lambda x: ((), {"inputs": x})], ids=["", "by name"])
def test_directions_do_not_depend_on_the_layout(
    arrange: Callable[[Tensor], Tensor],
    called: Callable[[Tensor], tuple[tuple[Tensor, ...], dict[str, Tensor]]],
) -> None:
    """The same model, computed batch first, sequence first or flattened, makes the same step."""
    found = []
    for each in (lambda x: x, arrange):
        training = Training(0, Positions(each), kl_clip=None, damping=0.1)
        args, kwargs = called(torch.randn(4, 12, WIDTH, generator=torch.Generator().manual_seed(0)))
        training.model(*args, **kwargs).backward()
        found.append(training.gradients())
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def drift(rank: int, world_size: int) -> list[Tensor]:
    """Train with a layer that is spread over the ranks; rank 1 rounds otherwise from its second step on."""
    training = Training(rank, networks.mlp(WIDTH, 230, 300, OUTPUTS, seed=1), damping=0.1)
    training.step()
    assert training.spread()
    product = Tensor.__matmul__
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Tensor, "__matmul__", lambda a, b: product(a, b) * (1 + 2**-20))
        for _ in range(4):
            training.step()
    return [parameter.detach().clone() for parameter in training.model.parameters()]


@pytest.mark.defect("kfac-S10")
def test_a_rank_that_begins_to_round_otherwise_parts_no_replicas() -> None:
    """Where a library rounds otherwise on one rank under way, replicas stay equal or training ends with an error."""
    with contextlib.suppress(RankError):
        first, second = run_ranks(drift, 2)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


@pytest.mark.defect("strangers-3")
@both_hooks
@in_ranks(2)
def test_a_state_dict_that_one_rank_has_loaded_is_named(rank: int, decoupled: bool) -> None:
    """A user whose resume loads K-FAC's state on rank 0 alone is told so, on all ranks."""
    training = Training(rank, network(), decoupled=decoupled)
    saved = training.kfac.state_dict()
    if rank == 0:
        training.kfac.load_state_dict({**saved, "steps": 7})
    told = r"the same steps of KFACState on all ranks, got steps of KFACState by rank \{0: 7, 1: 0\}"
    with pytest.raises(UnsupportedConfigurationError, match=told):
        training.backward()


# What rank 1 alone has: other layers, or another argument.
OTHERS: dict[str, Any] = {
    "layer '0'": (WIDTH, 9, OUTPUTS),
    "layers": (WIDTH, 8, 8, OUTPUTS),
    "kl_clip": 0.01,
    "solver": "eigen",
    "inv_update_steps": 2,
}


@pytest.mark.defect("strangers-3")
@in_ranks(3)
def test_other_layers_and_arguments_are_refused_by_name_on_all_ranks(rank: int) -> None:
    """Replicas would drift apart."""
    for what, other in OTHERS.items():
        given = {what: other} if rank == 1 else {}
        widths = given.pop(what) if given and what.startswith("layer") else (WIDTH, 8, OUTPUTS)
        layers = networks.mlp(*widths, seed=1)
        with pytest.raises(UnsupportedConfigurationError) as caught:
            KFACState(layers, torch.optim.SGD(layers.parameters(), lr=0.1), **given)
        told = str(caught.value)
        assert told.startswith(f"expected the same {what} on all ranks, got {what} by rank {{0: ")
        assert what.startswith("layer") or f"1: {other!r}" in told
