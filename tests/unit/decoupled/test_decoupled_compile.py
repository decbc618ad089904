"""Under torch.compile, decoupled training makes as many graphs as plain DDP, and has its weights."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, decoupled_hook
from crossover_ddp._ddp.compiled import called_by_compiled_code, uncompiled
from crossover_ddp._decoupled.clock import END
from tests.unit.decoupled.decoupled_training import inputs, network, sgd

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]

Compile = Callable[[Any], Any]
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


def ddp(net: nn.Module) -> DistributedDataParallel:
    # torch's own optimizer of compiled DDP models asks for buckets of a megabyte at least.
    return DistributedDataParallel(net, bucket_cap_mb=1, gradient_as_bucket_view=True)


def the_network(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    model = ddp(compiled(Net()))
    return model, model


def the_networks_method(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    net = Net()
    net.compile(backend=compiled.keywords["backend"])  # type: ignore[attr-defined]
    model = ddp(net)
    return model, model


def the_networks_forward(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    net = Net()
    net.forward = compiled(net.forward)  # type: ignore[method-assign]
    model = ddp(net)
    return model, model


def the_model(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    model = ddp(Net())
    return model, compiled(model)


def the_models_method(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    model = ddp(Net())
    model.compile(backend=compiled.keywords["backend"])  # type: ignore[attr-defined]
    return model, model


def a_function_around_it(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    model = ddp(Net())
    return model, compiled(lambda features: model(features) + 1.0)


def each_block(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    net = Blocks()
    net.blocks = nn.ModuleList(compiled(block) for block in net.blocks)
    model = ddp(net)
    return model, model


def each_blocks_method(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    net = Blocks()
    for block in net.blocks:
        block.compile(backend=compiled.keywords["backend"])  # type: ignore[attr-defined]
    model = ddp(net)
    return model, model


def nothing(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    model = ddp(Net())
    return model, model


def blocks_as_they_are(compiled: Compile) -> tuple[DistributedDataParallel, Any]:
    model = ddp(Blocks())
    return model, model


WAYS = [
    the_network,
    the_networks_method,
    the_networks_forward,
    the_model,
    the_models_method,
    a_function_around_it,
    each_block,
    each_blocks_method,
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Trained:
    """A compiled model that is trained, step by step."""

    def __init__(
        self,
        way: Callable[[Compile], tuple[DistributedDataParallel, Any]],
        *,
        decoupled: bool,
        defer: Literal["auto", "always"] = "always",
    ) -> None:
        self.counter = CompileCounter()
        self.model, self.called = way(functools.partial(torch.compile, backend=self.counter))
        self.optimizer = sgd(self.model)
        self.state = DecoupledState(self.optimizer, defer=defer) if decoupled else None
        if self.state is not None:
            self.model.register_comm_hook(self.state, decoupled_hook)
        self.steps = 0
        self.graphs: list[int] = []
        self.deferred = 0

    def run(self, steps: int = STEPS, between: Callable[["Trained"], object] | None = None) -> "Trained":
        for _ in range(steps):
            self.called(inputs(self.steps)).square().mean().backward()
            self.optimizer.step()
            self.deferred += bool(self.state is not None and self.state.stats()["deferred"])
            self.optimizer.zero_grad()
            if between is not None:
                between(self)
            self.steps += 1
            self.graphs.append(self.counter.frame_count)
        return self

    def end(self) -> dict[str, torch.Tensor]:
        weights = {name: value.clone() for name, value in self.model.module.state_dict().items()}
        if self.state is not None:
            self.state.close()
        return weights


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_there_are_as_many_graphs_as_without_the_hook(way: Callable[[Compile], Any]) -> None:
    plain = Trained(way, decoupled=False).run()
    torch._dynamo.reset()
    decoupled = Trained(way, decoupled=True).run()
    assert decoupled.graphs == plain.graphs
    assert decoupled.deferred == STEPS - 2
    assert_equal(decoupled.end(), plain.end())


@pytest.mark.parametrize("way", [the_network, the_model, each_block], ids=lambda way: way.__name__)
def test_steps_deferred_and_not_deferred_share_their_graphs(way: Callable[[Compile], Any]) -> None:
    plain = Trained(way, decoupled=False).run(END + STEPS)
    torch._dynamo.reset()
    tried = Trained(way, decoupled=True, defer="auto").run(END + STEPS)
    assert tried.graphs == plain.graphs
    assert 0 < tried.deferred < END
    assert_equal(tried.end(), plain.end())


@pytest.mark.parametrize("way", [the_network, the_model, each_blocks_method], ids=lambda way: way.__name__)
def test_who_looks_between_step_and_forward_sees_the_update_and_makes_no_graph(
    way: Callable[[Compile], Any],
) -> None:
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def look(trained: Trained) -> None:
        sums = [value.double().sum() for value in trained.model.module.state_dict().values()]
        seen[trained.state is not None].append(torch.stack(sums))

    plain = Trained(way, decoupled=False).run(between=look)
    torch._dynamo.reset()
    decoupled = Trained(way, decoupled=True).run(between=look)
    assert decoupled.graphs == plain.graphs
    assert torch.equal(torch.stack(seen[True]), torch.stack(seen[False]))
    decoupled.end()


def test_blocks_compiled_one_by_one_are_updated_one_by_one() -> None:
    trained = Trained(each_blocks_method, decoupled=True).run(6)
    blocks = trained.model.module.blocks
    pending: list[int] = []
    assert trained.state is not None
    for block in (trained.model.module.first, *blocks):  # type: ignore[union-attr]
        block.register_forward_hook(  # type: ignore[union-attr]
            uncompiled(lambda *_: pending.append(trained.state.stats()["deferred"]))  # type: ignore[union-attr]
        )
    trained.run(1)
    assert pending == sorted(pending, reverse=True)
    trained.end()


def test_a_module_compiled_during_training_is_noticed() -> None:
    plain, decoupled = (Trained(blocks_as_they_are, decoupled=decoupled) for decoupled in (False, True))
    graphs = []
    for trained in (plain, decoupled):
        torch._dynamo.reset()
        trained.run(5)
        counter = CompileCounter()
        for block in trained.model.module.blocks:  # type: ignore[union-attr]
            block.compile(backend=counter)
        trained.run(5)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]
    assert_equal(decoupled.end(), plain.end())


def test_a_network_compiled_apart_reads_what_is_up_to_date() -> None:
    """An evaluation through another compiled copy of the network, between step and forward."""
    found: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def evaluate(trained: Trained) -> None:
        apart = vars(trained).setdefault("apart", torch.compile(trained.model.module, backend="eager"))
        with torch.no_grad():
            found[trained.state is not None].append(apart(inputs(99)))

    for decoupled in (False, True):
        torch._dynamo.reset()
        Trained(nothing, decoupled=decoupled).run(between=evaluate).end()
    assert torch.equal(torch.stack(found[True]), torch.stack(found[False]))


def test_a_whole_step_that_is_compiled_is_that_of_plain_ddp() -> None:
    plain = Trained(nothing, decoupled=False).run()
    trained = Trained(nothing, decoupled=True)

    @torch.compile(backend="eager")
    def step(features: torch.Tensor) -> None:
        trained.model(features).square().mean().backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    for number in range(STEPS):
        step(inputs(number))
    assert_equal(trained.end(), plain.end())


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
