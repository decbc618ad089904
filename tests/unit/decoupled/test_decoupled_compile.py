"""Under torch.compile, decoupled training makes as many graphs as plain DDP, and has its weights."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from crossover_ddp._ddp.compiled import uncompiled
from tests.harness import inside
from tests.harness import training as harness
from tests.unit.decoupled.decoupled_training import assert_same, inputs

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]
STEPS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.inner(features).tanh()


class Blocks(nn.Module):
    """A stack whose blocks may be compiled one by one, as those of many large models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.first(features)
        for block in self.blocks:
            features = block(features)
        return features


def compiled(module: Any, way: str, counter: Any) -> Any:
    """Return what takes the module's place."""
    if way == "by method":
        module.compile(backend=counter)
    elif way == "by forward":
        module.forward = torch.compile(module.forward, backend=counter)
    else:
        called = (lambda features: module(features) + 1.0) if way == "around" else module
        return torch.compile(called, backend=counter)
    return module


# What is compiled, and how.
NOTHING, BLOCKS, MODEL = ("", ""), ("blocks", "by method"), ("model", "itself")
WAYS = [
    *(("network", how) for how in ("itself", "by method", "by forward")),
    *(MODEL, ("model", "by method"), ("model", "around")),
    *(BLOCKS, ("blocks", "itself")),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Trained(harness.Training):
    """A compiled model that is trained, step by step, in fresh graphs."""

    def __init__(self, way: tuple[str, str], *, decoupled: bool, defer: str = "always") -> None:
        torch._dynamo.reset()
        self.counter, (place, how), net = CompileCounter(), way, Blocks()
        if place == "blocks":
            net.blocks = nn.ModuleList(compiled(block, how, self.counter) for block in net.blocks)
        super().__init__(
            harness.decoupled(defer=defer) if decoupled else None,
            module=compiled(net, how, self.counter) if place == "network" else net,
            loss=lambda model, rank, step: self.called(inputs(step)).square().mean(),
            # torch's own optimizer of compiled DDP models asks for buckets of a megabyte at least.
            bucket_cap_mb=1,
        )
        self.called = compiled(self.model, how, self.counter) if place == "model" else self.model
        self.graphs: list[int] = []
        self.deferred = 0
        self.between: Callable[[], object] = lambda: None

    def update(self) -> None:
        self.optimizer.step()
        self.deferred += self.is_pending
        self.drop()
        self.between()
        self.steps += 1
        self.graphs.append(self.counter.frame_count)


@pytest.mark.parametrize(
    ("way", "defer"),
    [*((way, "always") for way in WAYS), (WAYS[0], "auto"), (BLOCKS, "auto")],
)
def test_as_many_graphs_as_without_the_hook_deferred_or_not(way: tuple[str, str], defer: str) -> None:
    steps = STEPS + (inside.TRIAL[-1] if defer == "auto" else 0)
    plain = Trained(way, decoupled=False).run(steps)
    decoupled = Trained(way, decoupled=True, defer=defer)
    if defer == "auto":
        inside.pretend_times(decoupled.state, deferred_s=3.0, whole_s=2.0)
    decoupled.run(steps)
    assert decoupled.graphs == plain.graphs
    assert decoupled.deferred == STEPS - 2 if defer == "always" else 0 < decoupled.deferred < steps
    assert_same(decoupled, plain)
    decoupled.close()


def weights(trained: Trained) -> Callable[[], torch.Tensor]:
    return lambda: torch.stack([value.double().sum() for value in trained.weights()])


def evaluation(trained: Trained) -> Callable[[], torch.Tensor]:
    """Evaluate another compiled copy of the network."""
    apart = torch.compile(trained.model.module, backend="eager")
    return lambda: apart(inputs(99)).detach()


@pytest.mark.parametrize(("way", "look"), [(MODEL, weights), (BLOCKS, weights), (NOTHING, evaluation)])
def test_who_looks_between_step_and_forward_sees_the_update_and_makes_no_graph(
    way: tuple[str, str], look: Callable[[Trained], Callable[[], torch.Tensor]]
) -> None:
    graphs, found = [], []
    for decoupled in (True, False):
        trained, seen = Trained(way, decoupled=decoupled), []
        looked = look(trained)
        trained.between = lambda seen=seen, looked=looked: seen.append(looked())  # type: ignore[misc]
        trained.run(STEPS).close()
        graphs.append(trained.graphs)
        found.append(torch.stack(seen))
    assert graphs[0] == graphs[1]
    assert torch.equal(*found)


def test_blocks_compiled_one_by_one_are_updated_one_by_one() -> None:
    trained = Trained(BLOCKS, decoupled=True).run(6)
    pending: list[int] = []
    for block in (trained.model.module.first, *trained.model.module.blocks):
        block.register_forward_hook(uncompiled(lambda *_: pending.append(trained.state.stats()["deferred"])))
    trained.run(1)
    assert pending == sorted(pending, reverse=True)
    trained.close()


def test_a_module_compiled_during_training_is_noticed() -> None:
    graphs, trainings = [], [Trained(NOTHING, decoupled=decoupled) for decoupled in (True, False)]
    for trained in trainings:
        torch._dynamo.reset()
        trained.run(5)
        counter = CompileCounter()
        for block in trained.model.module.blocks:
            block.compile(backend=counter)
        trained.run(5)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]
    assert_same(*trainings)
    trainings[0].close()


def test_a_whole_step_that_is_compiled_is_that_of_plain_ddp() -> None:
    plain, trained = Trained(NOTHING, decoupled=False).run(STEPS), Trained(NOTHING, decoupled=True)
    model, optimizer = trained.model, trained.optimizer

    @torch.compile(backend="eager")
    def step(features: torch.Tensor) -> None:
        model(features).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        step(inputs(number))
    assert_same(trained, plain)
    trained.close()
