"""What MuonState refuses, in one process."""

import copy
import logging
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon

from crossover_ddp.comm_hooks import DecoupledState
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.kfac_hooks import KFACState
from crossover_ddp.muon_hooks import MuonState, muon_hook

WIDTH = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def muon_of(module: nn.Module, **settings: object) -> Muon:
    return Muon([p for p in module.parameters() if p.ndim == 2], **settings)  # type: ignore[arg-type]


def hooked(module: nn.Module, muon: Muon, **settings: object) -> tuple[DistributedDataParallel, MuonState]:
    model = DistributedDataParallel(module)
    state = MuonState(muon, **settings)  # type: ignore[arg-type]
    model.register_comm_hook(state, muon_hook)
    return model, state


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(3, WIDTH)).square().mean() * factor).backward()


class OtherStep(Muon):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def test_another_optimizer_is_refused(process_group: dist.ProcessGroup) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Muon, got muon=AdamW"):
        MuonState(AdamW(network().parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of which OtherStep has another"):
        MuonState(OtherStep([nn.Parameter(torch.ones(2, 2))]))


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, math.inf, math.nan])
def test_a_loss_scale_that_rounds_is_refused(process_group: dist.ProcessGroup, scale: float) -> None:
    module = network()
    muon = muon_of(module)
    with pytest.raises(ValueError, match="expected a loss_scale that is a power of two"):
        MuonState(muon, loss_scale=scale)
    model, _ = hooked(module, muon, loss_scale=lambda: scale)
    with pytest.raises(ValueError, match="expected a loss_scale that is a power of two"):
        backward(model)


def test_a_step_needs_an_exchange(process_group: dist.ProcessGroup) -> None:
    module = network()
    muon = muon_of(module)
    model, state = hooked(module, muon)
    muon.step()  # no gradients: nothing to do, as ever
    with pytest.raises(UnsupportedConfigurationError, match="got none yet"):
        state.grad_norm()
    with model.no_sync():
        backward(model)
    with pytest.raises(
        UnsupportedConfigurationError, match=r"expected a backward\(\) with muon_hook between"
    ):
        muon.step()
    backward(model)
    before = [p.detach().clone() for p in module.parameters()]
    muon.step()
    assert not all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    with pytest.raises(
        UnsupportedConfigurationError, match=r"expected a backward\(\) with muon_hook between"
    ):
        muon.step()


def test_the_owners_settings_may_not_change_before_the_step(process_group: dist.ProcessGroup) -> None:
    module = network()
    muon = muon_of(module)
    model, _ = hooked(module, muon)
    backward(model)
    muon.param_groups[0]["momentum"] = 0.5
    with pytest.raises(UnsupportedConfigurationError, match="change them before backward"):
        muon.step()


def test_matrices_of_another_model_are_refused(process_group: dist.ProcessGroup) -> None:
    module, other = network(), network()
    model, _ = hooked(module, Muon([*muon_of(module).param_groups[0]["params"], other[0].weight]))
    with pytest.raises(UnsupportedConfigurationError, match="expected the matrices of one DDP model"):
        backward(model)


def test_another_state_is_refused(process_group: dist.ProcessGroup) -> None:
    module = network()
    model = DistributedDataParallel(module)
    model.register_comm_hook(KFACState(module, kl_clip=None), muon_hook)
    with pytest.raises(UnsupportedConfigurationError, match="expected a MuonState, got state=KFACState"):
        backward(model)


def test_a_state_stays_in_its_process(process_group: dist.ProcessGroup) -> None:
    module = network()
    model, state = hooked(module, muon_of(module))
    for attempt in (lambda: pickle.dumps(state), lambda: copy.deepcopy(model)):
        with pytest.raises(TypeError, match="expected a model without its hook"):
            attempt()


def test_what_is_not_finite_shows_in_the_gradients(process_group: dist.ProcessGroup) -> None:
    module = network()
    model, state = hooked(module, muon_of(module))
    backward(model)
    first = [p.grad for p in module.parameters() if p.ndim == 2]
    assert all(gradient is not None and not gradient.any() for gradient in first)
    norm = float(state.grad_norm())
    assert norm > 0
    state.muon.zero_grad()
    backward(model, math.inf)
    second = [p.grad for p in module.parameters() if p.ndim == 2]
    assert all(gradient is not None and gradient.isnan().all() for gradient in second)
    model.zero_grad()
    backward(model)  # what was not finite need not be dropped by hand
    assert float(state.grad_norm()) == norm


def test_disabled_leaves_muon_alone(
    process_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    ours, plain = network(), network()
    muon, other = muon_of(ours, lr=0.1), muon_of(plain, lr=0.1)
    with caplog.at_level(logging.INFO):
        model, state = hooked(ours, muon)
    for each, optimizer in ((model, muon), (plain, other)):
        backward(each)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))
    state.consolidate()
    assert len(muon.state_dict()["state"]) == 2
    assert state.newton_schulz_calls == 0 and set(state.memory_usage().values()) == {0}
    state.close()
    with pytest.raises(UnsupportedConfigurationError, match="CROSSOVER_DISABLE"):
        state.grad_norm()


def test_a_state_describes_itself(process_group: dist.ProcessGroup) -> None:
    module = network()
    model, state = hooked(module, muon_of(module))
    assert (
        repr(state)
        == "MuonState(2 matrices, 2 of them on rank 0 of 1, the busiest rank has 100% of the cost)"
    )
    backward(model)
    assert state.newton_schulz_calls == 2
    assert state.memory_usage()["buffers"] > 0


def test_nothing_is_exchanged_after_close(process_group: dist.ProcessGroup) -> None:
    module = network()
    model, state = hooked(module, muon_of(module))
    state.close()
    with pytest.raises(UnsupportedConfigurationError, match=r"got a backward\(\) after close"):
        backward(model)
    MuonState(state.muon)
    with pytest.raises(UnsupportedConfigurationError, match="has another already"):
        DecoupledState(state.muon, owners="layers")
