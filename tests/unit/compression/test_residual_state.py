"""States without a codec load what a hook without residuals saved, and lose nothing in silence."""

from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp import CompressedState, CrossoverState, MuonState

pytestmark = pytest.mark.usefixtures("process_group")
STATES = {
    "muon": lambda: MuonState(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])),
    "compressed": lambda: CompressedState(codec=None),
    "crossover": CrossoverState,
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_without_a_codec_refuses_what_is_not_its_own(name: str) -> None:
    state: Any = STATES[name]()
    with pytest.raises(ValueError, match=r"expected 'residuals' and 'loss_scale', got keys"):
        state.load_state_dict({"factors": {}})
    state.close()


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("residuals", [{}, {"weight": torch.ones(2)}])
def test_dropped_residuals_leave_a_warning(
    name: str, residuals: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    state: Any = STATES[name]()
    state.load_state_dict({})
    state.load_state_dict({"residuals": residuals, "loss_scale": 1.0})
    assert ("they are dropped" in caplog.text) == bool(residuals)
    state.close()
