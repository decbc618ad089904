"""Known defects of owners and of Muon: the report on decoupled training, and what strangers' programs found."""

import contextlib
import copy
import time
from typing import Any

import pytest
import timm.optim
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from crossover_ddp import DecoupledState, ExchangeError, UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_parameters
from tests.harness import in_ranks
from tests.harness import training as harness
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of
from tests.unit.decoupled.decoupled_training import Training, assert_same, both, network

pytestmark = pytest.mark.usefixtures("process_group")


def owned(**options: Any) -> Training:
    return Training(decoupled=True, owners="layers", **options)


@pytest.mark.defect("strangers-1")
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_with_owners_scales_or_is_refused(unscale: bool, view: bool) -> None:
    training = owned(ddp={"gradient_as_bucket_view": view})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(training.loss()).backward()
    with pytest.raises(UnsupportedConfigurationError, match="GradScaler"):
        if unscale:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.drop()


@pytest.mark.defect("strangers-1")
def test_gradients_of_owners_changed_through_data_are_refused() -> None:
    training = owned()
    training.backward()
    for parameter in training.held:
        parameter.grad.data.mul_(0.5)
    with pytest.raises(UnsupportedConfigurationError, match="gradients that were changed"):
        training.optimizer.step()


@pytest.mark.defect("strangers-1")
def test_the_norm_of_gradients_that_only_owners_have_is_no_number(caplog: pytest.LogCaptureFixture) -> None:
    training = owned()
    for _ in range(4):
        training.backward()
        assert all(each.grad.isnan().all() for each in training.held if each.grad is not None)
        training.optimizer.zero_grad()
    assert "never trains" in caplog.text


@pytest.mark.defect("decoupled-9")
def test_two_steps_of_one_optimizer_before_the_others_are_two_steps_or_an_error() -> None:
    training = harness.Training("owned", optimizers=harness.muon_and_sgd)
    training.backward()
    training.optimizer.step()
    with pytest.raises(UnsupportedConfigurationError, match="second one"):
        training.optimizer.step()


@pytest.mark.defect("decoupled-11", "strangers-29")
@pytest.mark.parametrize("muon", [False, True])
@in_ranks(2)
def test_frozen_parameters_are_no_load(rank: int, muon: bool) -> None:
    """Each rank trains as many elements of a model with a frozen backbone."""
    parameters = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    parameters.append(nn.Parameter(torch.ones(40, 40), requires_grad=False))
    if muon:
        owners = MuonState(torch.optim.Muon(parameters)).owners
    else:
        owners = DecoupledState(torch.optim.AdamW(parameters), owners="layers").owners or ()
    trained_by = [0, 0]
    for parameter, owner in zip(parameters, owners, strict=True):
        trained_by[owner] += parameter.numel() if parameter.requires_grad else 0
    assert trained_by == [128, 128]


class Decaying(torch.optim.SGD):
    """Adds the decay of weights to gradients in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=0.1)
        return super().step(closure)


@pytest.mark.defect("strangers-6")
def test_an_optimizer_may_reuse_the_memory_of_gradients() -> None:
    ours, plain = both(make=lambda m: Decaying(m.parameters(), lr=0.1), owners="layers")
    assert_same(plain.run(), ours.run())


@pytest.mark.defect("strangers-37")
@pytest.mark.parametrize("owners", [None, "layers"])
def test_a_frozen_integer_parameter_may_be_in_the_optimizer(owners: str | None) -> None:

    def quantised() -> nn.Module:
        net = network()
        net.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
        return net

    ours, plain = both(net=quantised, make=lambda m: Decaying(m.parameters(), lr=0.1), owners=owners)
    assert_same(plain.run(), ours.run())


@pytest.mark.defect("strangers-6")
@in_ranks(2)
def test_a_lookahead_around_owners_is_refused(rank: int) -> None:
    training = owned()
    wrapper = timm.optim.Lookahead(training.optimizer, k=2)

    def train() -> None:
        for step in range(6):
            training.backward(2 * step + rank)
            wrapper.step()
            wrapper.zero_grad()

    with pytest.raises(UnsupportedConfigurationError, match="lookahead_slow_buff"):
        train()


class ScheduleFree(torch.optim.SGD):
    """Exchanges all parameters before and after evaluations, by what it keeps of each."""

    eval = train = torch.optim.SGD.step


@pytest.mark.defect("strangers-6")
def test_an_optimizer_with_modes_of_its_own_is_refused_for_owners() -> None:
    with pytest.raises(UnsupportedConfigurationError, match=r"ScheduleFree.*eval\(\)"):
        owned(make=lambda m: ScheduleFree(m.parameters(), lr=0.1))


class Failing(torch.optim.SGD):
    """Raises when so many more parts of a step have begun."""

    left, error = 0, KeyboardInterrupt()

    def step(self, closure: Any = None) -> Any:
        if any(group["params"] for group in self.param_groups):
            Failing.left -= 1
            if Failing.left == 0:
                raise Failing.error
        return super().step(closure)


@pytest.mark.defect("decoupled-14")
@pytest.mark.parametrize(
    ("left", "error", "cause"),
    [(1, ArithmeticError("singular side"), "singular side"), (2, KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_after_a_failed_step_of_owners_no_other_is_taken_and_backward_names_the_cause(
    left: int, error: Any, cause: str
) -> None:
    training = owned(make=lambda m: Failing(m.parameters(), lr=0.1)).run(3)
    training.backward()
    Failing.left, Failing.error = left, error
    with pytest.raises(type(error)):
        training.optimizer.step()
    with pytest.raises(UnsupportedConfigurationError, match="ended with an exception"):
        training.optimizer.step()
    with pytest.raises(UnsupportedConfigurationError, match=cause):
        training.backward()


@pytest.mark.defect("decoupled-14")
@in_ranks(2, timeout_s=90)
def test_other_ranks_hear_of_an_owner_that_failed_before_the_groups_timeout(rank: int) -> None:
    ddp = {"process_group": impatient_group(50)}
    training = owned(make=lambda m: Failing(m.parameters(), lr=0.1), ddp=ddp)
    training.backward()
    Failing.left = rank
    began_s = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt, ExchangeError):
        training.optimizer.step()
        if rank == 0:
            training.weights()
    waited_s = time.monotonic() - began_s
    dist.barrier()
    assert waited_s < 40


@pytest.mark.defect("strangers-31")
@in_ranks(2)
def test_a_step_that_one_rank_skips_is_named(rank: int) -> None:
    training = owned(ddp={"process_group": impatient_group(2)})

    def train() -> None:
        for step in range(3):
            training.backward(step)
            training.drop() if rank and step == 1 else training.update()
        training.weights()

    told: list[Any] = [None, None]
    dist.all_gather_object(told, error_of(train))
    assert any("step()" in each for each in told)


@pytest.mark.defect("strangers-28")
@pytest.mark.parametrize("way", ["owned", "muon"])
@in_ranks(2)
def test_torchs_distributed_checkpoint_resumes_owners(rank: int, way: str) -> None:
    saving, resumed = harness.Training(way, rank).run(4), harness.Training(way, rank)
    saving.state.consolidate()
    saved = copy.deepcopy(get_optimizer_state_dict(saving.model, saving.optimizers[0]))
    set_optimizer_state_dict(resumed.model, resumed.optimizers[0], saved)
    resumed.model.load_state_dict(saving.model.state_dict())
    resumed.steps = saving.steps
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.1
    assert harness.same(resumed.run(2), saving.run(2))


@pytest.mark.defect("strangers-16")
def test_muon_gets_hidden_matrices_only() -> None:
    net = nn.Sequential(
        nn.Embedding(7, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 7)
    )
    matrices, others = muon_parameters(net)
    assert [id(matrix) for matrix in matrices] == [id(net[1].weight), id(net[3].weight)]
    assert {id(p) for p in (*matrices, *others)} == {id(p) for p in net.parameters()}
    net[4].weight = net[0].weight
    assert len(muon_parameters(net)[0]) == 2
    assert len(muon_parameters(net, head=net[3])[0]) == 1


@in_ranks(2)
def test_muons_compare_numbers_and_nothing_that_is_each_ranks_own(rank: int) -> None:
    training = harness.Training("muon", rank)
    for group in training.optimizers[0].param_groups:
        # On devices of their own they print otherwise, too.
        group["lr"] = torch.tensor(0.02, requires_grad=bool(rank))
        group["note"] = object()
    training.run(2)
    training = harness.Training("muon", rank)
    training.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * rank
    assert error_of(training.step).startswith("expected the same settings on all ranks")
