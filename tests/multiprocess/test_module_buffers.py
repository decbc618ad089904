"""Buffers travel behind the gradients on all ranks or on none, and equal those of plain DDP."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from crossover_ddp._engine.exchange import Exchange
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
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
    """tests/conformance compares the buffers with those of plain DDP."""
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
    """Averaging writes through ``.data``, which counts no version, and evaluates with DDP."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))
    training = Training(decoupled(**options), rank, module=module)
    for _ in range(14):  # steps are deferred and not deferred, in turns
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
    """Two backward passes: through one graph, or through one each. DDP exchanges the first one."""
    found = []
    for hook in ("decoupled", "split", None):
        training = training_of(hook, rank)
        for _ in range(STEPS):
            losses = [training.loss(0)]
            losses += losses if kept else [training.loss(1)]
            for loss in losses:
                # Autograd has saved the statistics, and compares their versions.
                loss.backward(retain_graph=kept)
                if hook == "decoupled":
                    training.state.flush()  # user code is about to change gradients
            training.drop()
            training.step()
        training.model.eval()(batch(0, 0))
        found.append(training.weights())
        training.close()
    for hooked in found[:-1]:
        assert all(map(torch.allclose, hooked, found[-1]))


class Flagged(nn.Module):
    """A model with a flag in a buffer that scripts write between steps, as a curriculum does."""

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
# A function that writes a buffer, and the ranks that call it.
Write = tuple[Callable[[Any, int], None], Sequence[int]]
RANKS = ([0], [1], [0, 1])
WRITES: list[Write] = [
    (write, ranks)
    for write in (filled, filled_data, replaced, swapped_storage, reset)
    for ranks in RANKS
]
CYCLE = 9  # steps
WRITTEN_STEPS = (1, 4, 5, 8)  # of each cycle


@pytest.mark.torch_version
@pytest.mark.parametrize("write", [None, *(WRITES if IN_CAMPAIGN else ())])
@pytest.mark.parametrize(
    "hook", ["split", "crossover", "int8", "decoupled", "owned", "kfac", "muon", "wrapped"]
)
@in_ranks(2)
def test_a_buffer_written_between_two_steps_is_that_of_plain_ddp(
    rank: int, hook: str, write: Write | None
) -> None:
    """All ranks have rank 0's value in the next forward, whatever another rank has written.

    One training makes each kind of write on each choice of ranks. In the campaign each is also made
    by itself, several times.
    """
    writes = WRITES if write is None else [write] * len(WRITTEN_STEPS)
    plain = trained_while_written(hook, rank, writes, ours=False)
    ours = trained_while_written(hook, rank, writes, ours=True)
    for step, (wanted, found) in enumerate(zip(plain, ours, strict=True)):
        assert wanted == found, f"step {step}"


def trained_while_written(
    hook: str, rank: int, writes: Sequence[Write], *, ours: bool
) -> list[list[float]]:
    """Return each step's loss and buffers, and at the end all parameters and buffers.

    Buffers travel with the hook if ``ours``; else they stay with DDP, if possible without the hook.
    """
    is_exact = hook not in ("int8", "kfac")
    Exchange.of(None).leaves_buffers_to_ddp = not ours
    torch.manual_seed(3)
    optimizers = functools.partial(optimizers_of, hook)
    training = Training(
        hook if ours or not is_exact else None, rank, module=Flagged(), optimizers=optimizers
    )
    module: Any = training.model.module
    found: list[list[float]] = []
    left = iter(writes)
    for step in itertools.count():
        in_cycle = step % CYCLE
        if in_cycle in WRITTEN_STEPS:
            write, ranks = next(left, (None, ()))
            if write is None:
                break
            if rank in ranks:
                write(module, step)
        losses = []
        if in_cycle == 6:
            with torch.no_grad():
                losses.append(training.model.eval()(batch(rank, 99)).sum().item())
            training.model.train()
        if in_cycle == 7 and hook not in ("kfac", "muon"):
            with training.model.no_sync():
                losses.append(training.backward(50))
        loss = training.loss()
        losses.append(loss.item())
        found.append([*losses, *values_of(module.buffers())])
        # DDP broadcasts in this forward, and so not in the one after backward. Before torch 2.14
        # autograd refuses that backward behind plain DDP as well: the broadcast has written to
        # BatchNorm's saved running statistics.
        if in_cycle == 3 and TORCH >= (2, 14):
            with torch.no_grad():
                training.model(batch(rank, 98))
        loss.backward()
        training.update()
    training.close()
    return [*found, values_of(training.weights())]


def values_of(tensors: Any) -> list[float]:
    return [value for each in tensors for value in each.double().flatten().tolist()]


@pytest.mark.parametrize("evaluates", [0, 1])
@pytest.mark.parametrize("hook", ["split", "decoupled"])
@in_ranks(2)
def test_an_evaluation_through_ddp_on_one_rank_alone_is_that_of_plain_ddp(
    rank: int, hook: str, evaluates: int
) -> None:
    """An old habit: the broadcast of that rank's forward meets the others' next broadcast."""
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
def test_a_users_buffer_hook_is_called_in_each_step(rank: int) -> None:
    calls: list[int] = []
    training = training_of("crossover", rank)
    training.model._register_buffer_comm_hook(
        calls, lambda state, buffers: state.append(len(buffers))
    )
    with broadcasts() as noted:
        training.run(STEPS).close()
    assert (len(calls), noted.call_count) == (STEPS, 0)
