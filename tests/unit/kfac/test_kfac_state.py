"""K-FAC's state with one rank: arguments, layers and optimizers, bad input, hyper-parameters, checkpoints."""

import copy
import itertools
import logging
import math
import pickle
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from crossover_ddp._kfac.curvature import Curvature
from crossover_ddp._kfac.factor_traffic import Factor
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess import kfac_training
from tests.multiprocess.kfac_training import LR, mlp

pytestmark = pytest.mark.usefixtures("process_group")
ROUGH_STEPS = 1000 if IN_CAMPAIGN else 80


class Training(kfac_training.Training):
    """Of one rank, on a batch by its seed and with a loss of the test's own."""

    def __init__(self, network: nn.Module | None = None, **options: Any) -> None:
        options = {"inv_update_steps": 1, "ddp": {"bucket_cap_mb": 25}} | options
        super().__init__(0, network or mlp(6, 8, 4), **options)

    def backward(self, seed: int = 0, loss: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        self.optimizer.zero_grad()
        output = self.model(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)))
        (output.square().mean() if loss is None else loss(output)).backward()
        return self.gradients()

    def step(self, seed: int = 0) -> dict[str, Tensor]:  # type: ignore[override]
        gradients = self.backward(seed)
        self.optimizer.step()
        return gradients


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": -1}, r"expected damping > 0, got damping=-1; "),
        ({"damping": lambda step: 0.0}, r"expected damping > 0, got damping=0\.0; "),
        ({"factor_decay": 1.5}, r"expected 0 <= factor_decay < 1, got factor_decay=1\.5; "),
        ({"kl_clip": 0.0}, r"expected kl_clip > 0, got kl_clip=0\.0; pass None for no clip"),
        ({"factor_update_steps": 0}, r"got factor_update_steps=0; 1 means every step"),
        ({"inv_update_steps": 2.5}, r"got inv_update_steps=2\.5; "),
        ({"solver": "lu"}, r"expected solver to be one of inverse, eigen, got solver='lu'"),
        ({"weight_sharing": "sum"}, r"expected weight_sharing to be one of expand, reduce, kfac-pytorch"),
        ({"factors": "none"}, r"expected factors to be one of global, local"),
        ({"accumulated": "max"}, r"expected accumulated to be one of mean, sum"),
        ({"max_factor_dim": 0}, r"got max_factor_dim=0; 8192 is the default"),
        ({"max_factor_dim": 2.5}, r"got max_factor_dim=2\.5; 8192 is the default"),
        (
            {"optimizer": [nn.Linear(1, 1)]},
            r"expected an optimizer or a sequence of them, got optimizer=Linear",
        ),
        ({"optimizer": None}, r"got optimizer=None; pass it, or kl_clip=None"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    network = mlp(6, 4)
    with pytest.raises(ValueError, match=message):
        KFACState(network, **{"optimizer": SGD(network.parameters(), lr=LR)} | options)


def sharded() -> nn.Module:
    network = mlp(6, 4)
    network[0].weight.placements = ()  # what tells a DTensor from a whole one
    return network


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp(6, 4).half(), r"0\.weight of float16.*use autocast, or skip it"),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")),
            r"parameters on \['cpu', 'meta'\]; ",
        ),
        (sharded, r"got 0\.weight sharded over ranks \(DTensor\)"),
    ],
    ids=["half precision", "several devices", "sharded"],
)
def test_parameters_that_it_cannot_treat_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=message):
        KFACState(make(), kl_clip=None)
    half = nn.Sequential(nn.Linear(6, 5).half(), nn.Linear(5, 4))
    KFACState(half, kl_clip=None, skip=["0"]).close()


def test_the_state_of_another_model_is_refused() -> None:
    model, other = DistributedDataParallel(mlp(6, 4)), mlp(6, 4)
    model.register_comm_hook(KFACState(other, kl_clip=None), kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match="make a KFACState for each model"):
        model(torch.ones(2, 6)).sum().backward()


def test_a_state_cannot_be_pickled_but_its_model_can_be_copied() -> None:
    training = Training()
    training.step()
    with pytest.raises(TypeError, match=r"copy or save model\.module, .* and the state's state_dict\(\)"):
        pickle.dumps(training.state)
    with pytest.raises(TypeError, match=r"AveragedModel\(model\.module\)"):
        torch.optim.swa_utils.AveragedModel(training.model)
    copied = copy.deepcopy(training.model.module)
    copied(torch.ones(2, 6)).sum().backward()
    assert training.step(1).keys() == dict(training.model.module.named_parameters()).keys()


def test_hyper_parameters_may_depend_on_the_step() -> None:
    seen: dict[str, list[int]] = {"damping": [], "decay": []}

    def noted(name: str, value: float) -> Callable[[int], float]:
        def at(step: int) -> float:
            seen[name].append(step)
            return value / (step + 1)

        return at

    changing = Training(damping=noted("damping", 0.1), factor_decay=noted("decay", 0.9), kl_clip=None)
    fixed = Training(damping=0.1, factor_decay=0.9, kl_clip=None)
    first, second = (changing.step(), changing.step(1)), (fixed.step(), fixed.step(1))
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert not torch.allclose(first[1]["0.weight"], second[1]["0.weight"])
    assert set(seen["damping"]) >= {0, 1}


def test_backward_under_autocast_changes_nothing() -> None:
    inside, outside = Training(kl_clip=None), Training(kl_clip=None)
    with torch.autocast("cpu", torch.bfloat16):
        got = inside.backward(loss=lambda output: output.float().square().mean())
    with torch.autocast("cpu", torch.bfloat16):
        output = outside.model(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)))
        loss = output.float().square().mean()
    loss.backward()
    expected = outside.gradients()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_state_of_other_layers_is_refused() -> None:
    saved = Training(mlp(6, 8, 4)).state.state_dict()
    with pytest.raises(ValueError, match="make the model and KFACState as they were"):
        Training(mlp(6, 4)).state.load_state_dict(saved)
    with pytest.raises(ValueError, match="solver='eigen'"):
        Training(mlp(6, 8, 4), solver="eigen").state.load_state_dict(saved)


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_rough_steps_leave_no_number_that_is_none(solver: str) -> None:
    """Batches of one, dead units, constant and zero inputs, zero gradients, damping of all sizes."""
    rough = random.Random(7)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 4)
    )
    with torch.no_grad():
        network[3].bias -= 2.0  # units that are dead for most inputs
    model = DistributedDataParallel(network)
    optimizer = SGD(model.parameters(), lr=0.01)
    state = KFACState(
        model, optimizer, solver=solver, inv_update_steps=3, damping=lambda step: 10 ** rough.uniform(-9, 2)
    )
    model.register_comm_hook(state, kfac_hook)
    for _ in range(ROUGH_STEPS):
        optimizer.zero_grad()
        x = rough.choice([torch.zeros, torch.ones, torch.randn])(rough.choice([1, 4]), 1, 6, 6)
        (model(x * 10 ** rough.uniform(-6, 3)).square().mean() * rough.choice([0.0, 1e-6, 1.0])).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert state.stats()["dropped"] == 0
    state.close()


def test_a_second_model_with_the_same_state_is_refused() -> None:
    training, second = Training(), DistributedDataParallel(mlp(6, 8, 4))
    training.step()
    second.register_comm_hook(training.kfac, kfac_hook)
    with pytest.raises(UnsupportedConfigurationError, match="make a KFACState for each model"):
        second(torch.ones(2, 6)).sum().backward()
    training.step(1)


# One that is never complete would be waited for where no signal is heard.
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("decoupled", [False, True])
def test_behind_a_refused_bucket_no_layer_of_two_buckets_is_waited_for(decoupled: bool) -> None:
    training = Training(mlp(6, 40, 40, 40), decoupled=decoupled, ddp={"bucket_cap_mb": 1e-4})
    for step in range(3):
        training.step(step)
    *others, weight, _ = training.held
    for each in others:
        each.grad = None
    assert weight.grad is not None
    with pytest.raises(UnsupportedConfigurationError, match=r"gradients that were cleared"):
        training.model(torch.ones(5, 6)).sum().backward()
    training.step(3)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_schedule_may_end_with_the_last_step(decoupled: bool) -> None:
    schedule = [0.3, 0.2, 0.1]
    options: dict[str, Any] = {"damping": lambda step: schedule[step], "decoupled": decoupled}
    training, resumed = Training(**options), Training(**options)
    for step in range(3):
        training.step(step)
    resumed.kfac.load_state_dict(training.kfac.state_dict())
    for each in (training, resumed):
        with pytest.raises(IndexError):
            each.backward(3)


def test_factors_that_were_lost_some_steps_ago_are_an_error_all_the_same() -> None:
    traffic = KFACState(nn.Linear(2, 2), kl_clip=None)._preconditioner.traffic
    traffic.hold([[Factor(traffic.layers[0], dim=2)] * 2], groups=1, decay=0.9)
    with mock.patch.object(Curvature, "add", side_effect=RuntimeError("a peer has gone")):
        traffic.leave()
    traffic.leave()  # as in each later step
    with pytest.raises(ExchangeError, match="factors of K-FAC failed: a peer has gone"):
        traffic.settle()


def test_the_group_is_that_of_the_model_where_none_is_named() -> None:
    alone = dist.new_group([0])
    training = Training(ddp={"process_group": alone})
    assert training.kfac.process_group is alone
    training.step()


# --- optimizers ------------------------------------------------------------------------------------------------


def test_an_optimizer_of_some_layers_is_refused_unless_the_others_are_skipped_or_nothing_is_clipped() -> None:
    network = mlp(6, 8, 4)
    optimizer = SGD(network[0].parameters(), lr=LR)
    with pytest.raises(UnsupportedConfigurationError, match=r"none for 2\.weight, 2\.bias \(2 in all\)"):
        KFACState(network, optimizer)
    KFACState(network, optimizer, skip=["2"]).close()
    KFACState(network, optimizer, kl_clip=None).close()


def test_a_group_that_the_optimizer_has_lost_is_refused_in_the_next_step() -> None:
    training = Training()
    training.step()
    lost = training.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedConfigurationError, match=r"none for 2\.bias \(1 in all\)"):
        training.step(1)
    training.optimizer.param_groups[0]["params"].append(lost)


# --- layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "options"),
    [
        (nn.LayerNorm(6), {}),
        (mlp(6, 4), {"skip": ["0"]}),
        (mlp(6, 4), {"max_factor_dim": 6}),
    ],
)
def test_a_model_without_a_usable_layer_is_refused(network: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedConfigurationError,
        match=r"got none of 2 parameters \(.*\); Linear and Conv2d layers count .* max_factor_dim=, or train without",
    ):
        KFACState(network, SGD(network.parameters(), lr=LR), **options)


def test_a_head_that_is_too_large_passes_through_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "crossover_ddp"):
        Training(mlp(6, 8, 20), kl_clip=None, max_factor_dim=20)
        training = Training(mlp(6, 8, 20), kl_clip=None, max_factor_dim=19)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "2.weight, 2.bias of 2 in all pass through as plain gradients: G of 20 rows, above max_factor_dim=19. Raise"
    )
    assert "2.weight passes through: G of 20 rows, above max_factor_dim=19" in training.state.report()
    plain = copy.deepcopy(training.model.module)
    got = training.backward()
    plain(torch.randn(5, 6, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(got[name], parameter.grad) == name.startswith("2")  # type: ignore[arg-type]


# --- the first solver ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflows", [1, 2])
def test_the_first_finite_factors_get_a_solver_at_once(overflows: int) -> None:
    options: dict[str, Any] = {"kl_clip": None, "inv_update_steps": 100}
    training, usual = Training(**options), Training(**options)
    for seed in range(overflows):
        training.backward(seed, lambda output: output.square().mean() * math.inf)
    assert training.state.stats()["dropped"] == 2 * overflows
    assert f"{overflows} batches dropped" in training.state.report()
    got, expected = training.backward(7), usual.backward(7)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    solvers = [layer["solver"] for layer in training.state.state_dict()["layers"].values()]
    assert all(solvers)
    training.backward(8)
    later = [layer["solver"] for layer in training.state.state_dict()["layers"].values()]
    torch.testing.assert_close(later, solvers, rtol=0, atol=0, msg="once, not in every step")
    training.state.close()
    usual.state.close()


def test_a_layer_that_comes_late_gets_its_solver_when_it_comes() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.calls = itertools.count()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x) if next(self.calls) else x  # type: ignore[no-any-return]

    model = DistributedDataParallel(Late(), find_unused_parameters=True)
    state = KFACState(model, SGD(model.parameters(), lr=LR), inv_update_steps=100)
    model.register_comm_hook(state, kfac_hook)
    for step in range(2):
        model.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        solvers = [layer["solver"] for layer in state.state_dict()["layers"].values()]
        assert [solver is not None for solver in solvers] == [True, bool(step)]


# --- GPT-2's `Conv1D`, a Linear layer whose weight is transposed ---------------------------------------------------


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers, of which Conv1D is, is not installed")


def test_the_direction_of_conv1d_is_that_of_the_linear_layer(transformers: Any) -> None:
    plain = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
    twin = copy.deepcopy(plain)
    for index in (1, 3):
        linear = plain[index]
        assert isinstance(linear, nn.Linear)
        twin[index] = transformers.pytorch_utils.Conv1D(linear.out_features, linear.in_features)
        twin[index].load_state_dict({"weight": linear.weight.mT, "bias": linear.bias})
    of_linear, of_conv1d = (Training(each, kl_clip=1e-3, damping=0.1) for each in (plain, twin))
    for seed in range(3):
        expected, got = of_linear.step(seed), of_conv1d.step(seed)
        for name, gradient in expected.items():
            other = got[name].mT if name.endswith("weight") else got[name]
            # Another layout in memory may be multiplied in another order.
            torch.testing.assert_close(
                other, gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-7
            )


def test_gpt_2_trains(transformers: Any) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=30, n_positions=12)
    model = DistributedDataParallel(transformers.GPT2LMHeadModel(config))
    optimizer = SGD(model.parameters(), lr=0.01)
    state = KFACState(model, optimizer, inv_update_steps=1)
    model.register_comm_hook(state, kfac_hook)
    assert [name.rsplit(".", 2)[-2:] for name in state.owners] == [
        ["attn", "c_attn"], ["attn", "c_proj"], ["mlp", "c_fc"], ["mlp", "c_proj"],
    ]  # fmt: skip
    tokens = torch.randint(0, 30, (3, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert state.stats().items() >= {"strained": 0, "dropped": 0}.items()
    assert all(layer["solver"] for layer in state.state_dict()["layers"].values())
