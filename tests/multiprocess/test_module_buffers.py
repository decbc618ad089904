"""Buffers travel behind the gradients: DDP broadcasts nothing in forward, on all ranks or on none."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from crossover_ddp._engine.exchange import Exchange
from tests.harness import in_ranks
from tests.harness.training import WIDTH, Training, batch, decoupled, optimizers_of

STEPS = 5
HOOKS = ("split", "crossover", "decoupled", "kfac", "wrapped split", "wrapped")
BROADCAST = "_default_broadcast_coalesced"


def broadcasts() -> Any:
    original = getattr(DistributedDataParallel, BROADCAST)
    return mock.patch.object(
        DistributedDataParallel, BROADCAST, autospec=True, side_effect=original
    )


def wrapped_split(*_: Any) -> tuple[Any, Any]:
    return ddp.CrossoverState(), ddp.crossover_wrapper(ddp.reduce_scatter_all_gather_hook)


def training_of(hook: str | None, rank: int) -> Training:
    torch.manual_seed(3)
    layers = (nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    way = wrapped_split if hook == "wrapped split" else hook
    return Training(way, rank, module=nn.Sequential(*layers))


@pytest.mark.torch_version
@in_ranks(2)
def test_ddp_broadcasts_only_before_the_first_step(rank: int) -> None:
    """That buffers are those of plain DDP: tests/conformance."""
    for hook in HOOKS:
        with broadcasts() as noted:
            training = training_of(hook, rank).run(STEPS)
            training.close()
        assert noted.call_count == (STEPS if hook == "wrapped" else 1), hook


@pytest.mark.parametrize(
    "options", [{"defer": "always"}, {"defer": "auto"}, {"owners": "layers"}], ids=str
)
@in_ranks(2)
def test_an_average_that_is_swapped_in_keeps_its_buffers(
    rank: int, options: dict[str, Any]
) -> float:
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
def test_statistics_are_those_of_plain_ddp_whatever_comes_between_steps(
    rank: int, kept: bool
) -> None:
    """Two passes through one graph, of which DDP exchanges the first gradients only, or one through each of two."""
    found = []
    for hook in ("decoupled", "split", None):
        training = training_of(hook, rank)
        for _ in range(STEPS):
            losses = [training.loss(0)]
            losses += losses if kept else [training.loss(1)]
            for loss in losses:
                loss.backward(
                    retain_graph=kept
                )  # autograd has saved the statistics, and looks at them
                if hook == "decoupled":
                    training.state.flush()  # before gradients are changed
            training.drop()
            training.step()
        training.model.eval()(batch(0, 0))
        found.append(training.weights())
        training.close()
    for hooked in found[:-1]:
        assert all(map(torch.allclose, hooked, found[-1]))


class Flagged(nn.Module):
    """A curriculum, or a switch of quantization-aware training, in a buffer that scripts write between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("on", torch.zeros(1))
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.inner(x).tanh() * (1 + self.on)) * self.scale[0].float()
        return out


def filled(module: Any, step: int) -> None:
    module.on.fill_(step)


def filled_data(module: Any, step: int) -> None:
    module.on.data.fill_(step)


def replaced(module: Any, step: int) -> None:
    module.on = torch.full((1,), float(step))


def swapped_storage(module: Any, step: int) -> None:
    module.on.data = torch.full((1,), float(step))


def reset(module: Any, step: int) -> None:
    module.norm.reset_running_stats()


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WRITES = (filled, filled_data, replaced, swapped_storage, reset)
WHO: dict[str, Callable[[int], bool]] = {
    "rank 0": lambda rank: rank == 0,
    "rank 1": bool,
    "all": lambda rank: True,
}


@pytest.mark.torch_version
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(
    "hook", ["split", "crossover", "int8", "decoupled", "owned", "kfac", "muon", "wrapped"]
)
@in_ranks(2)
def test_a_buffer_written_between_two_steps_is_that_of_plain_ddp(
    rank: int, hook: str, who: str
) -> None:
    """Of rank 0 the next forward of all ranks has it; that of another rank is overwritten before."""
    for write in WRITES:
        plain, ours = (
            trained_while_written(hook, rank, write, WHO[who](rank), ours) for ours in (False, True)
        )
        assert plain[0] == ours[0], write
        assert all(map(torch.equal, plain[1], ours[1])), (
            f"{write}: buffers or parameters at the end"
        )


def trained_while_written(
    hook: str, rank: int, write: Callable[[Any, int], None], writes: bool, ours: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and final values, of plain DDP unless ``ours``, or of a hook that leaves buffers to DDP."""
    is_exact = hook not in ("int8", "kfac")
    Exchange.of(None).leaves_buffers_to_ddp = not ours
    torch.manual_seed(3)
    optimizers = functools.partial(optimizers_of, hook)
    training = Training(
        hook if ours or not is_exact else None, rank, module=Flagged(), optimizers=optimizers
    )
    losses = []
    for step in range(9):
        if step in (1, 4, 5, 8) and writes:
            write(training.model.module, step)
        if step == 6:
            with torch.no_grad():
                training.model.eval()(batch(rank, 99))
            training.model.train()
        if step == 7 and hook not in ("kfac", "muon"):
            with training.model.no_sync():
                losses.append(training.backward(50))
        loss = training.loss()
        # DDP broadcasts in this forward, and so not in the one after backward. Before torch 2.14 autograd refuses that
        # backward behind plain DDP as well: the broadcast has written to BatchNorm's saved running statistics.
        if step == 3 and TORCH >= (2, 14):
            with torch.no_grad():
                training.model(batch(rank, 98))
        loss.backward()
        training.update()
        losses.append(loss.item())
    training.close()
    return losses, training.weights()


@pytest.mark.parametrize("evaluates", [0, 1])
@pytest.mark.parametrize("hook", ["split", "decoupled"])
@in_ranks(2)
def test_an_evaluation_through_ddp_on_one_rank_alone_is_that_of_plain_ddp(
    rank: int, hook: str, evaluates: int
) -> None:
    """An old habit: the broadcast of that rank's forward meets the next one of the others."""
    found = []
    for way in (None, hook):
        training = training_of(way, rank)
        for _ in range(4):
            training.run(2)
            if rank == evaluates:
                with torch.no_grad():
                    training.model.eval()(batch(rank, 99))
                    training.model(batch(rank, 98))
                training.model.train()
        found.append([training.loss().item(), training.values])
        training.close()
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("hook", ["split", "decoupled", "owned"])
@in_ranks(2)
def test_a_forward_that_goes_past_ddps_hooks_is_that_of_plain_ddp(rank: int, hook: str) -> None:
    """``model.forward(x)``: DDP broadcasts the buffers itself."""
    found = []
    for way in (None, hook):
        training = training_of(way, rank)
        for step in range(8):
            training.model.forward(batch(rank, step)).square().mean().backward()
            training.update()
        training.close()
        found.append(training.weights())
    assert all(map(torch.equal, *found))


@in_ranks(2)
def test_a_buffer_hook_of_the_users_is_called_as_ever(rank: int) -> None:
    calls: list[int] = []
    training = training_of("crossover", rank)
    training.model._register_buffer_comm_hook(
        calls, lambda state, buffers: state.append(len(buffers))
    )
    with broadcasts() as noted:
        training.run(STEPS).close()
    assert (len(calls), noted.call_count) == (STEPS, 0)
