"""K-FAC's state with one rank: arguments, bad input, hyper-parameters of the step, checkpoints, odd layers."""

import copy
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
        KFACState(network, **{"optimizer": torch.optim.SGD(network.parameters(), lr=LR)} | options)


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
