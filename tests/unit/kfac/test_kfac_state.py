"""K-FAC's state with one rank: arguments, bad input, hyper-parameters of the step, checkpoints, odd layers."""

import copy
import functools
import itertools
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import DecoupledState
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.kfac_hooks import FactorPlan, KFACState, kfac_hook
from tests.harness import networks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.turn import RecordingTurn

pytestmark = pytest.mark.usefixtures("process_group")
LR = 0.1
mlp = functools.partial(networks.mlp, seed=1)
ROUGH_STEPS = 1000 if IN_CAMPAIGN else 80


class Training:
    """A model under DDP with K-FAC, and its optimizer."""

    def __init__(self, network: nn.Module | None = None, **options: Any) -> None:
        self.model = DistributedDataParallel(network or mlp(6, 8, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        options = {"inv_update_steps": 1} | options
        self.state = KFACState(self.model, self.optimizer, **options)
        self.model.register_comm_hook(self.state, kfac_hook)

    def backward(self, seed: int = 0, loss: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        output = self.model(x)
        (output.square().mean() if loss is None else loss(output)).backward()
        return self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        named = self.model.module.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def step(self, seed: int = 0) -> dict[str, Tensor]:
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
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    network = mlp(6, 4)
    with pytest.raises(ValueError, match=message):
        KFACState(network, **{"optimizer": torch.optim.SGD(network.parameters(), lr=LR)} | options)


@pytest.mark.parametrize(
    ("gone", "instead"),
    [({"inversion": "background"}, "solvers are made at once"), ({"costs": "measured"}, "by typical costs")],
)
def test_words_that_have_gone_are_accepted_with_a_warning(gone: dict[str, Any], instead: str) -> None:
    with pytest.warns(FutureWarning, match=instead) as told:
        given = Training(**gone)
    assert len(told) == 1
    usual = Training()
    for step in range(3):
        expected, got = usual.step(step), given.step(step)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_input_factors_leave_early_if_that_is_planned_after_a_step() -> None:
    training = Training()
    with pytest.raises(UnsupportedConfigurationError, match="train some steps that take factors first"):
        training.state.plan_factors()
    training.step()
    plan = training.state.plan_factors()
    assert [layer for group in plan.early for layer in group] == [0, 1]
    with pytest.warns(FutureWarning, match=r"FactorPlan\.early_s has gone"):
        assert math.isnan(plan.early_s)
    assert training.state.plan_factors(early=False) == FactorPlan(())


def test_the_clip_needs_an_optimizer() -> None:
    with pytest.raises(ValueError, match=r"got optimizer=None; pass it, or kl_clip=None"):
        KFACState(mlp(6, 4))
    KFACState(mlp(6, 4), kl_clip=None).close()


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(
        UnsupportedConfigurationError, match=r"0\.weight of float16.*use autocast, or skip it"
    ):
        KFACState(mlp(6, 4).half(), kl_clip=None)
    half = nn.Sequential(nn.Linear(6, 5).half(), nn.Linear(5, 4))
    KFACState(half, kl_clip=None, skip=["0"]).close()


def test_a_model_on_several_devices_is_refused() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(UnsupportedConfigurationError, match=r"parameters on \['cpu', 'meta'\]; "):
        KFACState(network, kl_clip=None)


def test_sharded_parameters_are_refused() -> None:
    network = mlp(6, 4)
    network[0].weight.placements = ()  # what tells a DTensor from a whole one
    with pytest.raises(UnsupportedConfigurationError, match=r"got 0\.weight sharded over ranks \(DTensor\)"):
        KFACState(network, kl_clip=None)


def test_another_state_is_refused_by_backward() -> None:
    model = DistributedDataParallel(mlp(6, 4), gradient_as_bucket_view=True)
    state = DecoupledState(torch.optim.SGD(model.parameters(), lr=LR))
    model.register_comm_hook(state, kfac_hook)
    with pytest.raises(
        UnsupportedConfigurationError, match=r"got state=DecoupledState; .*cannot be combined"
    ):
        model(torch.ones(2, 6)).sum().backward()
    state.close()


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


def test_updates_are_due_every_n_steps() -> None:
    training = Training(factor_update_steps=2, inv_update_steps=4, kl_clip=None)
    factors, solvers = [], []
    for step in range(6):
        training.step(step)
        layer = training.state.state_dict()["layers"]["0"]
        factors.append(layer["a"].clone())
        solvers.append(torch.cat([tensor.flatten() for tensor in layer["solver"].values()]))
    assert [torch.equal(*pair) for pair in itertools.pairwise(factors)] == [True, False, True, False, True]
    assert [torch.equal(*pair) for pair in itertools.pairwise(solvers)] == [True, True, True, False, True]


def test_the_clip_follows_the_learning_rate_of_the_moment() -> None:
    training = Training(kl_clip=1e-6)
    first = training.backward()["0.weight"]
    for group in training.optimizer.param_groups:
        group["lr"] = LR / 2
    again = Training(kl_clip=1e-6)
    again.optimizer.param_groups[0]["lr"] = LR / 2
    torch.testing.assert_close(again.backward()["0.weight"], 2 * first)


def test_the_clip_bounds_the_step() -> None:
    training = Training(kl_clip=None)
    free = training.backward()
    plain = {name: p.grad for name, p in _plain(mlp(6, 8, 4), 0).items()}
    total = sum(float((free[name].double() * plain[name].double()).sum()) for name in free) * LR**2
    clipped = Training(kl_clip=total / 4).backward()
    for name in free:
        torch.testing.assert_close(clipped[name], free[name] / 2)
    loose = Training(kl_clip=total * 4).backward()
    for name in free:
        torch.testing.assert_close(loose[name], free[name])


def _plain(network: nn.Module, seed: int) -> dict[str, nn.Parameter]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    network(x).square().mean().backward()
    return dict(network.named_parameters())


def test_loss_scaling_changes_nothing_but_the_scale() -> None:
    plain, scaled = Training(kl_clip=1e-4), Training(kl_clip=1e-4, loss_scale=lambda: 256.0)
    for step in range(3):
        expected = plain.step(step)
        got = scaled.backward(step, lambda output: 256.0 * output.square().mean())
        for name in expected:
            torch.testing.assert_close(got[name] / 256.0, expected[name], rtol=2e-5, atol=1e-8)
        for parameter in scaled.model.parameters():
            parameter.grad /= 256.0
        scaled.optimizer.step()


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


def test_gradients_that_overflow_leave_the_factors_alone() -> None:
    training = Training(kl_clip=None)
    training.step()
    before = {name: layer["g"].clone() for name, layer in training.state.state_dict()["layers"].items()}
    overflown = training.backward(1, lambda output: output.square().mean() * math.inf)
    assert not all(torch.isfinite(gradient).all() for gradient in overflown.values())
    after = training.state.state_dict()["layers"]
    assert all(torch.equal(factor, after[name]["g"]) for name, factor in before.items())
    assert training.state.stats()["dropped"] == 2
    assert "1 batches dropped" in training.state.report()
    assert all(torch.isfinite(gradient).all() for gradient in training.backward(2).values())


def test_the_state_of_other_layers_is_refused() -> None:
    saved = Training(mlp(6, 8, 4)).state.state_dict()
    with pytest.raises(ValueError, match="make the model and KFACState as they were"):
        Training(mlp(6, 4)).state.load_state_dict(saved)
    with pytest.raises(ValueError, match="solver='eigen'"):
        Training(mlp(6, 8, 4), solver="eigen").state.load_state_dict(saved)


class Attention(nn.Module):
    """torch's own attention multiplies by its projections without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1)
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def test_layers_that_are_never_called_keep_their_gradient() -> None:
    training = Training(Attention(), kl_clip=None)
    got = training.backward()
    expected = {name: p.grad for name, p in _plain(_same(Attention, training), 0).items()}
    for name in got:
        same = torch.equal(got[name], expected[name])  # type: ignore[arg-type]
        assert same == (not name.startswith("first")), name


def _same(make: Callable[[], nn.Module], training: Training) -> nn.Module:
    network = make()
    network.load_state_dict(training.model.module.state_dict())
    return network


def test_the_turn_is_kept_for_making_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = RecordingTurn()
    made_at: set[int] = set()
    training = Training(inv_update_steps=2, mutex=turn)
    cholesky = torch.linalg.cholesky_ex

    def watched(*args: Any, **options: Any) -> Any:
        made_at.add(len(turn.order))
        return cholesky(*args, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", watched)
    training.step()
    assert made_at == {0}, "solvers are made before the turn is given away"
    assert turn.order == ["release", "request", "acquire"]
    training.step(1)
    assert turn.order == ["release", "request", "acquire"] * 2


def test_the_report_names_layers_owners_and_what_passes_through() -> None:
    training = Training(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)), skip=["2"])
    report = training.state.report()
    assert "0: A 7, G 8, rank 0" in report
    assert "1.weight passes through: " in report
    assert "2.weight passes through: " in report
    assert "rank 0 works for " in report


def test_memory_is_told() -> None:
    training = Training()
    assert training.state.memory_usage()["factors"] == 0
    training.step()
    usage = training.state.memory_usage()
    assert usage["factors"] == 4 * (7**2 + 8**2 + 9**2 + 4**2) == usage["solvers"]
    assert usage["buffers"] >= 4 * (7 * 8 + 9 * 4)


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
