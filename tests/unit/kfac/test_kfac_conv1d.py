"""GPT-2's ``Conv1D``: a Linear layer whose weight is transposed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.unit.kfac.test_kfac_state import Training

transformers = pytest.importorskip(
    "transformers", reason="transformers, of which Conv1D is, is not installed"
)
Conv1D = transformers.pytorch_utils.Conv1D

pytestmark = pytest.mark.usefixtures("process_group")


def test_its_direction_is_that_of_the_linear_layer() -> None:
    plain = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
    twin = copy.deepcopy(plain)
    for index in (1, 3):
        linear = plain[index]
        assert isinstance(linear, nn.Linear)
        twin[index] = Conv1D(linear.out_features, linear.in_features)
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


def test_gpt_2_trains() -> None:
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
