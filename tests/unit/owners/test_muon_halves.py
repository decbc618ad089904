"""Both halves of torch's Muon, against its whole step."""

from unittest import mock

import pytest
import torch
from torch.optim import Muon

from crossover_ddp._owners import muon
from crossover_ddp._owners.muon import direction_of, direction_view, take_step
from crossover_ddp.errors import UnsupportedConfigurationError

pytestmark = pytest.mark.torch_version

STEPS = 40
SETTINGS = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.03, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 3},
]


@pytest.mark.parametrize("shape", [(12, 29), (29, 12)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rate", [float, torch.tensor, lambda value: torch.tensor([value])])
def test_both_halves_are_torchs_step_to_the_last_bit(
    rate: type, settings: dict[str, object], shape: tuple[int, int]
) -> None:
    """The momentum is updated in place; a learning rate that is a tensor rounds in its own type."""
    torch.manual_seed(0)
    whole = torch.randn(shape).requires_grad_()
    optimizer = Muon([whole], lr=rate(0.02), **settings)  # type: ignore[arg-type]
    group, parts = optimizer.param_groups[0], whole.detach().clone()
    momentum, flat = torch.zeros(shape), torch.empty(whole.numel(), dtype=torch.bfloat16)
    for step in range(STEPS):
        group["lr"] = rate(0.02 * 0.9**step)
        whole.grad = torch.randn(shape)
        direction = direction_of(whole.grad, momentum, momentum, group)
        received = direction_view(flat, whole.shape)
        received.copy_(direction)
        assert received.stride() == direction.stride()
        take_step(parts, received, group)
        optimizer.step()
        assert torch.equal(parts, whole), step
    assert torch.equal(momentum, optimizer.state[whole]["momentum_buffer"])


def test_a_torch_with_another_muon_is_refused() -> None:
    muon.check_torch()
    muon.check_torch.cache_clear()
    try:
        with (
            mock.patch.object(muon, "take_step", lambda parameter, *_: parameter.mul_(0.9)),
            pytest.raises(UnsupportedConfigurationError, match="computes another step than its parts do"),
        ):
            muon.check_torch()
    finally:
        muon.check_torch.cache_clear()
