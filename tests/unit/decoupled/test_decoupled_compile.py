"""Under torch.compile decoupled training makes as many graphs as plain DDP, with its weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from crossover_ddp import DecoupledState
from crossover_ddp._ddp.compiled import uncompiled
from tests.harness import inside
from tests.harness import training as harness
from tests.unit.decoupled.decoupled_training import assert_same, inputs

pytestmark = [pytest.mark.usefixtures("process_group", "fresh_compiler"), pytest.mark.torch_version]
STEPS = 8


class Block(nn.Module):
    """A module of our own: torch 2.11 compiles no frame of torch's layers that stand alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.inner(features).tanh()


def network() -> nn.Sequential:
    """Return a stack whose blocks may be compiled one by one, as in many large models."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 6), Block(), Block(), Block())


# Compiled parts: the network by a wrapper or in place, the DDP model, or block by block.
WAYS = ("network", "network in place", "model", "blocks")


class Trained(harness.Training):
    """Trains a model, compiled in one of the ways or not, in fresh graphs."""

    def __init__(self, way: str, *, decoupled: bool, defer: str = "always") -> None:
        torch._dynamo.reset()
        self.counter, net = CompileCounter(), network()
        for each in {"blocks": [*net[1:]], "network in place": [net]}.get(way, []):
            each.compile(backend=self.counter)
        module: Any = torch.compile(net, backend=self.counter) if way == "network" else net
        super().__init__(
            harness.decoupled(defer=defer) if decoupled else None,
            module=module,
            loss=lambda model, rank, step: self.called(inputs(step)).square().mean(),
            **DecoupledState.ddp_options(module, compiled=way in ("model", "later") or None),
        )
        self.called: Any = (
            torch.compile(self.model, backend=self.counter) if way == "model" else self.model
        )
        self.graphs: list[int] = []
        self.deferred = 0
        # Called between step() and the next forward.
        self.look: Callable[[], torch.Tensor] | None = None
        self.seen: list[torch.Tensor] = []

    def update(self) -> None:
        self.optimizer.step()
        self.deferred += self.is_pending
        self.drop()
        if self.look is not None:
            self.seen.append(self.look())
        self.steps += 1
        self.graphs.append(self.counter.frame_count)


@pytest.mark.defect("strangers-26")
@pytest.mark.parametrize(
    ("way", "defer"), [*((way, "always") for way in WAYS), ("network", "auto"), ("blocks", "auto")]
)
def test_compiled_models_make_as_many_graphs_as_plain_ddp(way: str, defer: str) -> None:
    """With the buckets of ``ddp_options``: torch's own DDPOptimizer wants large ones."""
    steps = STEPS + (inside.RACE[-1] if defer == "auto" else 0)
    plain = Trained(way, decoupled=False).run(steps)
    decoupled = Trained(way, decoupled=True, defer=defer)
    if defer == "auto":
        inside.pretend_times(decoupled.state, deferred_s=3.0, whole_s=2.0)
    decoupled.run(steps)
    assert decoupled.graphs == plain.graphs and plain.graphs[-1] > 0
    assert decoupled.deferred == STEPS - 2 if defer == "always" else 0 < decoupled.deferred < steps
    assert_same(decoupled, plain)
    decoupled.close()


def weights(trained: Trained) -> Callable[[], torch.Tensor]:
    return lambda: torch.stack([value.double().sum() for value in trained.weights()])


def evaluation(trained: Trained) -> Callable[[], torch.Tensor]:
    """Evaluate another compiled copy of the network."""
    apart = torch.compile(trained.model.module, backend="eager")
    return lambda: apart(inputs(99)).detach()


@pytest.mark.parametrize(
    ("way", "look"), [("model", weights), ("blocks", weights), ("", evaluation)]
)
def test_reads_between_step_and_forward_see_the_update_and_make_no_graph(
    way: str, look: Any
) -> None:
    graphs, found = [], []
    for decoupled in (True, False):
        trained = Trained(way, decoupled=decoupled)
        trained.look = look(trained)
        trained.run(STEPS).close()
        graphs.append(trained.graphs)
        found.append(torch.stack(trained.seen))
    assert graphs[0] == graphs[1]
    assert torch.equal(*found)


def test_blocks_compiled_one_by_one_are_updated_one_by_one() -> None:
    trained = Trained("blocks", decoupled=True).run(6)
    pending: list[int] = []
    for block in trained.model.module:
        block.register_forward_hook(
            uncompiled(lambda *_: pending.append(trained.state.stats()["deferred"]))
        )
    trained.run(1)
    assert pending == sorted(pending, reverse=True)
    trained.close()


def test_a_module_compiled_during_training_is_noticed() -> None:
    trainings = []
    for decoupled in (True, False):
        trained = Trained("later", decoupled=decoupled).run(5)
        for block in trained.model.module[1:]:
            block.compile(backend=trained.counter)
        trainings.append(trained.run(5))
    ours, plain = trainings
    assert ours.graphs == plain.graphs and plain.graphs[-1] > 0
    assert_same(ours, plain)
    ours.close()
