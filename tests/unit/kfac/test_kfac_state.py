"""KFACState with one rank: arguments, layers, optimizers, hyper-parameters, checkpoints."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.kfac_hooks import KFACState
from tests.harness.oracles import heard
from tests.multiprocess import kfac_training
from tests.multiprocess.kfac_training import LR, mlp, same

pytestmark = pytest.mark.usefixtures("process_group")


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


class Training(kfac_training.Training):
    """Trains with one rank, on a batch given by its seed, with any loss."""

    def __init__(self, network: nn.Module | None = None, **options: Any) -> None:
        options = {"inv_update_steps": 1, "ddp": {"bucket_cap_mb": 25}} | options
        super().__init__(0, network or mlp(6, 8, 4), **options)

    def output(self, seed: int = 0) -> Tensor:
        output: Tensor = self.model(
            torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        )
        return output

    def backward(
        self, seed: int = 0, loss: Callable[[Tensor], Tensor] = mean_square
    ) -> dict[str, Tensor]:  # type: ignore[override]
        self.optimizer.zero_grad()
        loss(self.output(seed)).backward()
        return self.gradients()

    def step(self, seed: int = 0) -> dict[str, Tensor]:  # type: ignore[override]
        gradients = self.backward(seed)
        self.optimizer.step()
        return gradients

    def solvers(self) -> list[Any]:
        return [layer["solver"] for layer in self.kfac.state_dict()["layers"].values()]


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
        (
            {"weight_sharing": "sum"},
            r"expected weight_sharing to be one of expand, reduce, kfac-pytorch",
        ),
        ({"factors": "none"}, r"expected factors to be one of global, local"),
        ({"accumulated": "max"}, r"expected accumulated to be one of mean, sum"),
        ({"max_factor_dim": 0}, r"got max_factor_dim=0; 8192 is the default"),
        ({"max_factor_dim": 2.5}, r"got max_factor_dim=2\.5; 8192 is the default"),
        (
            {"optimizer": [nn.Linear(1, 1)]},
            r"expected an optimizer or a sequence of them, got optimizer=L",
        ),
        ({"optimizer": None}, r"got optimizer=None; pass it, or kl_clip=None"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    network = mlp(6, 4)
    with pytest.raises(ValueError, match=message):
        KFACState(network, **{"optimizer": SGD(network.parameters(), lr=LR)} | options)


def sharded() -> nn.Module:
    network = mlp(6, 4)
    network[0].weight.placements = ()  # an attribute that only a DTensor has
    return network


NONE = r"none of 2 parameters \(.*\); Linear and Conv2d layers count .*, or train without"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: mlp(6, 4).half(), {}, r"0\.weight of float16.*use autocast, or skip it"),
        (
            lambda: nn.Sequential(mlp(3, 3), nn.Linear(3, 3, device="meta")),
            {},
            r"on \['cpu', 'meta'\]; ",
        ),
        (sharded, {}, r"got 0\.weight sharded over ranks \(DTensor\)"),
        (lambda: nn.LayerNorm(6), {}, NONE),
        (lambda: mlp(6, 4), {"skip": ["0"]}, NONE),
        (lambda: mlp(6, 4), {"max_factor_dim": 6}, NONE),
    ],
)
def test_a_model_that_kfac_cannot_treat_is_refused(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=message):
        KFACState(make(), kl_clip=None, **options)
    half = nn.Sequential(nn.Linear(6, 5).half(), nn.Linear(5, 4))
    KFACState(half, kl_clip=None, skip=["0"]).close()


def test_hyper_parameters_may_depend_on_the_step() -> None:
    by_step: Any = {"damping": lambda n: 0.1 / (n + 1), "factor_decay": lambda n: 0.9 / (n + 1)}
    changing = Training(**by_step, kl_clip=None)
    fixed = Training(damping=0.1, factor_decay=0.9, kl_clip=None)
    first = [changing.step(), changing.step(1)]
    second = [fixed.step(), fixed.step(1)]
    assert same(first[:1], second[:1])
    assert not torch.allclose(first[1]["0.weight"], second[1]["0.weight"])


def test_backward_under_autocast_changes_nothing() -> None:
    inside = Training(kl_clip=None)
    outside = Training(kl_clip=None)
    with torch.autocast("cpu", torch.bfloat16):
        got = inside.backward()
        loss = mean_square(outside.output())
    loss.backward()
    assert same([got], [outside.gradients()])


def test_the_state_of_other_layers_is_refused() -> None:
    saved = Training(mlp(6, 8, 4)).state.state_dict()
    with pytest.raises(ValueError, match="make the model and KFACState as they were"):
        Training(mlp(6, 4)).state.load_state_dict(saved)
    with pytest.raises(ValueError, match="solver='eigen'"):
        Training(mlp(6, 8, 4), solver="eigen").state.load_state_dict(saved)


# A journey that waits for an incomplete layer would wait in C++, where Python handles no signal.
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("decoupled", [False, True])
def test_after_a_refused_bucket_no_journey_waits_for_a_layer_of_two_buckets(
    decoupled: bool,
) -> None:
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
    training = Training(**options)
    resumed = Training(**options)
    for step in range(3):
        training.step(step)
    resumed.kfac.load_state_dict(training.kfac.state_dict())
    for each in (training, resumed):
        with pytest.raises(IndexError):
            each.backward(3)


def test_the_process_group_defaults_to_that_of_the_ddp_model() -> None:
    alone = dist.new_group([0])
    training = Training(ddp={"process_group": alone})
    assert training.kfac.process_group is alone
    training.step()


def test_an_optimizer_without_some_layers_needs_them_skipped_or_no_clip() -> None:
    network = mlp(6, 8, 4)
    optimizer = SGD(network[0].parameters(), lr=LR)
    with pytest.raises(
        UnsupportedConfigurationError, match=r"none for 2\.weight, 2\.bias \(2 in all\)"
    ):
        KFACState(network, optimizer)
    KFACState(network, optimizer, skip=["2"]).close()
    KFACState(network, optimizer, kl_clip=None).close()
    training = Training()
    training.step()
    training.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedConfigurationError, match=r"none for 2\.bias \(1 in all\)"):
        training.step(1)


def test_a_head_that_is_too_large_passes_through_with_one_warning() -> None:
    with heard() as messages:
        Training(mlp(6, 8, 20), kl_clip=None, max_factor_dim=20)
        training = Training(mlp(6, 8, 20), kl_clip=None, max_factor_dim=19)
    (warning,) = messages
    why = "G of 20 rows, above max_factor_dim=19"
    assert f"2.weight, 2.bias of 2 in all pass through as plain gradients: {why}. Raise" in warning
    assert f"2.weight passes through: {why}" in training.state.report()
    plain = copy.deepcopy(training.model.module)
    got = training.backward()
    plain(torch.randn(5, 6, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(got[name], parameter.grad) == name.startswith("2")


@pytest.mark.parametrize("overflows", [1, 2])
def test_the_first_finite_factors_get_a_solver_at_once(overflows: int) -> None:
    options: dict[str, Any] = {"kl_clip": None, "inv_update_steps": 100}
    training = Training(**options)
    usual = Training(**options)
    for seed in range(overflows):
        training.backward(seed, lambda output: output.square().mean() * math.inf)
    assert training.state.stats()["dropped"] == 2 * overflows
    assert f"{overflows} batches dropped" in training.state.report()
    assert same([training.backward(7)], [usual.backward(7)])
    solvers = training.solvers()
    assert all(solvers)
    training.backward(8)
    torch.testing.assert_close(
        training.solvers(), solvers, rtol=0, atol=0, msg="solvers are made once, not in every step"
    )


def test_a_layer_that_is_first_called_in_a_later_step_gets_its_solver_then() -> None:
    network = mlp(6, 6, 6)
    calls = itertools.count()

    def forward(x: Tensor) -> Tensor:
        hidden: Tensor = network[0](x)
        return network[2](hidden) if next(calls) else hidden

    network.forward = forward  # type: ignore[method-assign]
    training = Training(network, ddp={"find_unused_parameters": True}, inv_update_steps=100)
    for step in range(2):
        training.step(step)
        assert [solver is not None for solver in training.solvers()] == [True, bool(step)]


@pytest.mark.defect("kfac-S8")
def test_the_direction_of_conv1d_called_by_keyword_is_that_of_the_linear_layer() -> None:
    """Conv1D of GPT-2 is a Linear layer with a transposed weight. Its argument is named x."""
    pytest.importorskip("transformers", reason="transformers, which has Conv1D, is not installed")
    from transformers.pytorch_utils import Conv1D

    plain = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
    twin: Any = copy.deepcopy(plain)
    for index in (1, 3):
        linear: Any = plain[index]
        twin[index] = Conv1D(linear.out_features, linear.in_features)
        twin[index].load_state_dict({"weight": linear.weight.mT, "bias": linear.bias})
    twin.forward = lambda inputs: twin[3](x=twin[2](twin[1](x=twin[0](inputs))))
    of_linear = Training(plain, kl_clip=1e-3, damping=0.1)
    of_conv1d = Training(twin, kl_clip=1e-3, damping=0.1)
    for seed in range(3):
        expected, got = of_linear.step(seed), of_conv1d.step(seed)
        for name, gradient in expected.items():
            other = got[name].mT if name.endswith("weight") else got[name]
            # The order of additions in a product may depend on the layout in memory.
            atol = 1e-5 * float(gradient.abs().max()) + 1e-7
            torch.testing.assert_close(other, gradient, rtol=1e-3, atol=atol)
