"""Buffers travel behind the gradients: DDP broadcasts nothing in forward, on all ranks or on none."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from tests.harness import in_ranks
from tests.harness.training import WIDTH, Training, batch, decoupled

STEPS = 5
HOOKS = ("split", "crossover", "decoupled", "kfac", "wrapped split", "wrapped")
BROADCAST = "_default_broadcast_coalesced"


def broadcasts() -> Any:
    original = getattr(DistributedDataParallel, BROADCAST)
    return mock.patch.object(DistributedDataParallel, BROADCAST, autospec=True, side_effect=original)


def wrapped_split(*_: Any) -> tuple[Any, Any]:
    return ddp.CrossoverState(), ddp.crossover_wrapper(ddp.reduce_scatter_all_gather_hook)


def training_of(hook: str | None, rank: int) -> Training:
    torch.manual_seed(3)
    layers = (nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    way = wrapped_split if hook == "wrapped split" else hook
    return Training(way, rank, module=nn.Sequential(*layers))


@pytest.mark.torch_version
@in_ranks(2)
def test_ddp_broadcasts_only_before_the_first_step(rank: int) -> list[list[torch.Tensor]]:
    """That buffers are those of plain DDP: tests/conformance."""
    found = []
    for hook in HOOKS:
        with broadcasts() as noted:
            training = training_of(hook, rank).run(STEPS)
            training.close()
        assert noted.call_count == (STEPS if hook == "wrapped" else 1), hook
        found.append([] if hook == "wrapped" else training.weights())  # there each rank has its own meanwhile
    return found


@pytest.mark.parametrize("options", [{"defer": "always"}, {"defer": "auto"}, {"owners": "layers"}], ids=str)
@in_ranks(2)
def test_an_average_that_is_swapped_in_keeps_its_buffers(rank: int, options: dict[str, Any]) -> float:
    """Parameters and buffers go in through ``.data``, which counts no version, and DDP's forward evaluates."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))
    training = Training(decoupled(**options), rank, module=module)
    for _ in range(14):  # deferred and not deferred, in turns
        training.step()
        for parameter in module.parameters():
            parameter.data.copy_(parameter.data)
        module[1].running_mean.data.fill_(1000.0)
        with torch.no_grad():
            training.model.eval()(batch(0, 0))
        assert float(module[1].running_mean.mean()) == 1000.0
        training.model.train()
    training.close()
    return float(module[1].running_mean.mean())


@pytest.mark.parametrize("kept", [True, False])
@in_ranks(2)
def test_statistics_are_those_of_plain_ddp_whatever_comes_between_steps(rank: int, kept: bool) -> None:
    """Two passes through one graph, of which DDP exchanges the first gradients only, or one through each of two."""
    found = []
    for hook in ("decoupled", "split", None):
        training = training_of(hook, rank)
        for _ in range(STEPS):
            losses = [training.loss(0)]
            losses += losses if kept else [training.loss(1)]
            for loss in losses:
                loss.backward(retain_graph=kept)  # autograd has saved the statistics, and looks at them
                if hook == "decoupled":
                    training.state.flush()  # before gradients are changed
            training.drop()
            training.step()
        training.model.eval()(batch(0, 0))
        found.append(training.weights())
        training.close()
    for hooked in found[:-1]:
        assert all(map(torch.allclose, hooked, found[-1]))


@in_ranks(2)
def test_a_forward_that_goes_past_ddps_hooks_is_refused(rank: int) -> None:
    """Nobody would copy rank 0's buffers in, and DDP broadcasts none."""
    training = training_of("decoupled", rank).run(STEPS)
    with pytest.raises(ddp.UnsupportedConfigurationError, match=r"not model\.forward"):
        training.model.forward(batch(rank, 0)).sum().backward()
    training.drop()
    training.run(2).close()


@in_ranks(2)
def test_a_buffer_hook_of_the_users_is_called_as_ever(rank: int) -> None:
    calls: list[int] = []
    training = training_of("crossover", rank)
    training.model._register_buffer_comm_hook(calls, lambda state, buffers: state.append(len(buffers)))
    with broadcasts() as noted:
        training.run(STEPS).close()
    assert (len(calls), noted.call_count) == (STEPS, 0)
