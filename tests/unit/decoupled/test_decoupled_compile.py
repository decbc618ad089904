"""Under torch.compile, decoupled training makes as many graphs as plain DDP, and has its weights."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from crossover_ddp._ddp.compiled import uncompiled
from crossover_ddp._decoupled.guards import called_by_compiled_code
from crossover_ddp._decoupled.trial import END
from tests.harness import training as harness
from tests.unit.decoupled.decoupled_training import assert_same, inputs, network

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]

# Of a module and torch.compile: what takes the module's place.
Compiled = Callable[[Any, Any], Any]
STEPS = 8


class Net(nn.Module):
    """A network in a file of its own: dynamo does not compile those of torch when they are the outermost."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(features)
        return hidden * 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.inner(features).tanh()


class Blocks(nn.Module):
    """A stack whose blocks are compiled one by one, as many large models are."""

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


def itself(module: Any, compiled: Any) -> Any:
    return compiled(module)


def by_method(module: Any, compiled: Any) -> Any:
    module.compile(backend=compiled.keywords["backend"])
    return module


def by_forward(module: Any, compiled: Any) -> Any:
    module.forward = compiled(module.forward)
    return module


def around(module: Any, compiled: Any) -> Any:
    return compiled(lambda features: module(features) + 1.0)


def each_block(compile_block: Compiled) -> Compiled:
    def blocks(net: Any, compiled: Any) -> Any:
        net.blocks = nn.ModuleList(compile_block(block, compiled) for block in net.blocks)
        return net

    return blocks


class Way(NamedTuple):
    """A network, and what is compiled before and after DDP is put around it."""

    net: Callable[[], nn.Module] = Net
    inner: Compiled = lambda module, compiled: module
    outer: Compiled = lambda module, compiled: module


NOTHING, BLOCKS = Way(), Way(Blocks)
WAYS = {
    "the network": Way(inner=itself),
    "the network's method": Way(inner=by_method),
    "the network's forward": Way(inner=by_forward),
    "the model": Way(outer=itself),
    "the model's method": Way(outer=by_method),
    "a function around it": Way(outer=around),
    "each block": Way(Blocks, inner=each_block(itself)),
    "each block's method": Way(Blocks, inner=each_block(by_method)),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Trained(harness.Training):
    """A compiled model that is trained, step by step."""

    def __init__(self, way: Way, *, decoupled: bool, defer: str = "always") -> None:
        self.counter = CompileCounter()
        compiled = functools.partial(torch.compile, backend=self.counter)
        super().__init__(
            harness.decoupled(defer=defer) if decoupled else None,
            module=way.inner(way.net(), compiled),
            loss=lambda model, rank, step: self.called(inputs(step)).square().mean(),
            # torch's own optimizer of compiled DDP models asks for buckets of a megabyte at least.
            bucket_cap_mb=1,
        )
        self.called = way.outer(self.model, compiled)
        self.graphs: list[int] = []
        self.deferred = 0
        self.between: Callable[[Trained], object] = lambda _: None

    def update(self) -> None:
        self.optimizer.step()
        self.deferred += self.is_pending
        self.drop()
        self.between(self)
        self.steps += 1
        self.graphs.append(self.counter.frame_count)


def assert_ends_are_same(one: Trained, other: Trained) -> None:
    assert_same(one, other)
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("way", "defer"), [*((way, "always") for way in WAYS), ("the network", "auto"), ("each block", "auto")]
)
def test_there_are_as_many_graphs_as_without_the_hook_whether_steps_are_deferred_or_not(
    way: str, defer: str
) -> None:
    steps = STEPS + (END if defer == "auto" else 0)
    plain = Trained(WAYS[way], decoupled=False).run(steps)
    torch._dynamo.reset()
    decoupled = Trained(WAYS[way], decoupled=True, defer=defer).run(steps)
    assert decoupled.graphs == plain.graphs
    assert decoupled.deferred == STEPS - 2 if defer == "always" else 0 < decoupled.deferred < steps
    assert_ends_are_same(decoupled, plain)


@pytest.mark.parametrize("way", ["the model", "each block's method"])
def test_who_looks_between_step_and_forward_sees_the_update_and_makes_no_graph(way: str) -> None:
    found = []
    for decoupled in (True, False):
        torch._dynamo.reset()
        trained, seen = Trained(WAYS[way], decoupled=decoupled), []
        trained.between = lambda each, seen=seen: seen.append(  # type: ignore[misc]
            torch.stack([value.double().sum() for value in each.weights()])
        )
        found.append((trained.run(STEPS).graphs, torch.stack(seen)))
        trained.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_blocks_compiled_one_by_one_are_updated_one_by_one() -> None:
    trained = Trained(WAYS["each block's method"], decoupled=True).run(6)
    pending: list[int] = []
    for block in (trained.model.module.first, *trained.model.module.blocks):
        block.register_forward_hook(uncompiled(lambda *_: pending.append(trained.state.stats()["deferred"])))
    trained.run(1)
    assert pending == sorted(pending, reverse=True)
    trained.close()


def test_a_module_compiled_during_training_is_noticed() -> None:
    plain, decoupled = (Trained(BLOCKS, decoupled=decoupled) for decoupled in (False, True))
    graphs = []
    for trained in (plain, decoupled):
        torch._dynamo.reset()
        trained.run(5)
        counter = CompileCounter()
        for block in trained.model.module.blocks:
            block.compile(backend=counter)
        trained.run(5)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]
    assert_ends_are_same(decoupled, plain)


def test_a_network_compiled_apart_reads_what_is_up_to_date() -> None:
    """An evaluation through another compiled copy of the network, between step and forward."""
    found = []
    for decoupled in (False, True):
        torch._dynamo.reset()
        trained, outputs = Trained(NOTHING, decoupled=decoupled), []
        apart = torch.compile(trained.model.module, backend="eager")
        trained.between = lambda _, outputs=outputs, apart=apart: outputs.append(apart(inputs(99)).detach())  # type: ignore[misc]
        trained.run(STEPS).close()
        found.append(torch.stack(outputs))
    assert torch.equal(*found)


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
    assert_ends_are_same(trained, plain)


def test_a_call_from_compiled_code_is_told_from_one_that_is_kept_out() -> None:
    told: list[bool] = []
    note = uncompiled(lambda: told.append(called_by_compiled_code()))

    def calls(features: torch.Tensor) -> torch.Tensor:
        note()
        return features + 1

    calls(torch.ones(1))
    torch.compile(calls, backend="eager")(torch.ones(1))
    uncompiled(calls)(torch.ones(1))
    assert told == [False, True, False]
