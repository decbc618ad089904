"""Every way of reading a parameter through a module is seen; copies and leavers are not."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm.utils
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations

from crossover_ddp._decoupled.guards import GuardedParameters, Guards
from crossover_ddp._decoupled.pending import Pending

pytestmark = pytest.mark.torch_version


class Tied(nn.Module):
    """Reads another module's weight, without that module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(3))])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.embedding(tokens, self.embedding.weight) * self.scale + self.extra[0]
        return nn.functional.linear(hidden, self.embedding.weight)


class Watched(Pending):
    """A network with all its parameters stale; counts which were brought up to date."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(())
        self.network = network
        self.names = {id(p): name for name, p in network.named_parameters()}
        self.updated: list[str] = []
        self.guards: Guards = Guards(network, is_fresh=self.is_fresh, reads=self.reads, before=lambda: None)
        self.guards.up()
        self.held = list(network.parameters())
        self.make_stale()

    def make_stale(self) -> None:
        self.stale.update({id(p): p for p in self.held})  # type: ignore[misc]

    def _bring_up_to_date(self, parameter: Any) -> None:
        del self.stale[id(parameter)]
        self.updated.append(self.names[id(parameter)])


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    yield found
    found.guards.close()


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]
READS: dict[str, tuple[Callable[[nn.Sequential], object], list[str]]] = {
    "forward": (lambda m: m(torch.ones(1, 3)), ALL),
    "forward without gradients": (lambda m: torch.no_grad()(m)(torch.ones(1, 3)), ALL),
    "evaluation": (lambda m: m.eval()(torch.ones(1, 3)), ALL),
    "one module": (lambda m: m[2](torch.ones(1, 4)), ALL[2:]),
    "state_dict": (lambda m: m.state_dict(), ALL),
    "state_dict of a module": (lambda m: m[0].state_dict(), ALL[:2]),
    "parameters": (lambda m: list(m.parameters()), ALL),
    "named_parameters": (lambda m: list(m.named_parameters()), ALL),
    "an attribute": (lambda m: m[0].weight, ALL[:1]),
    "get_parameter": (lambda m: m.get_parameter("2.bias"), ALL[3:]),
    "as a vector": (lambda m: parameters_to_vector(m.parameters()), ALL),
    "deep copy": (copy.deepcopy, ALL),
    "pickle": (pickle.dumps, ALL),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), ALL),
    "another dtype": (lambda m: m.double(), ALL),
    "load_state_dict": (lambda m: m.load_state_dict({name: torch.zeros_like(p) for name, p in SPARE}), ALL),
    "a dictionary of them": (lambda m: dict(m[0]._parameters), ALL[:2]),
    "their values": (lambda m: list(m[0]._parameters.values()), ALL[:2]),
    "one by name": (lambda m: m[0]._parameters.get("bias"), ALL[1:2]),
    "representation": (repr, [ALL[1], ALL[3]]),
    "removal": (lambda m: m[0]._parameters.pop("bias"), ALL[1:2]),
    "functional_call": (lambda m: torch.func.functional_call(m, {}, torch.ones(1, 3)), ALL),
    "moving average": (lambda m: timm.utils.ModelEmaV3(m), ALL),
}
SPARE = list(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).named_parameters())


@pytest.mark.parametrize("way", READS)
def test_reading_brings_up_to_date_what_is_read(way: str, watched: Watched) -> None:
    read, names = READS[way]
    read(watched.network)  # type: ignore[arg-type]
    assert watched.updated == names


INDIFFERENT: dict[str, Callable[[nn.Sequential], object]] = {
    "training mode": lambda m: m.train().eval(),
    "a missing name": lambda m: m[0]._parameters.get("missing"),
    "buffers": lambda m: list(m.buffers()),
    "names": lambda m: [*m[0]._parameters, "weight" in m[0]._parameters],
}


@pytest.mark.parametrize("way", INDIFFERENT)
def test_what_reads_no_parameter_waits_for_none(way: str, watched: Watched) -> None:
    INDIFFERENT[way](watched.network)  # type: ignore[arg-type]
    assert watched.updated == []


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object]]] = {
    "weights read by another module": (Tied, lambda m: m(torch.tensor([1, 2]))),
    "references of its own": (lambda: nn.LSTM(3, 4), lambda m: m(torch.ones(2, 1, 3))),
    "a parametrized weight": (lambda: parametrizations.weight_norm(nn.Linear(3, 2, bias=False)), lambda m: m.weight),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_all_parameters_of_other_networks_are_seen(name: str) -> None:
    make, read = OTHERS[name]
    watched = Watched(make())
    read(watched.network)
    assert sorted(watched.updated) == sorted(watched.names.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_an_ordinary_module(copied: Callable[[nn.Module], nn.Module], watched: Watched) -> None:
    twin = copied(watched.network)
    watched.make_stale()
    watched.updated.clear()
    twin(torch.ones(1, 3))
    assert watched.updated == []
    assert not any(isinstance(module._parameters, GuardedParameters) for module in twin.modules())


def test_the_order_of_the_first_reads_is_recorded(watched: Watched) -> None:
    watched.stale.clear()
    watched.recording = True
    watched.network(torch.ones(1, 3))
    watched.recording = False
    assert watched.names_in_order() == ALL


def test_new_and_deleted_parameters_are_kept_after_the_end(watched: Watched) -> None:
    module = watched.network.get_submodule("0")
    module.register_parameter("late", nn.Parameter(torch.ones(1)))
    del module.bias
    watched.guards.close()
    assert type(module._parameters) is dict
    assert list(module._parameters) == ["weight", "late"]
    assert not module._forward_pre_hooks
    watched.updated.clear()
    watched.network.get_submodule("2")(torch.ones(1, 4))
    assert watched.updated == []


def test_compiled_modules_read_what_is_up_to_date(watched: Watched) -> None:
    compiled = torch.compile(watched.network, backend="eager")
    compiled(torch.ones(1, 3))
    assert sorted(watched.updated) == sorted(ALL)
    watched.make_stale()
    watched.updated.clear()
    compiled(torch.ones(1, 3))
    assert sorted(watched.updated) == sorted(ALL)


def test_a_module_looks_as_before_when_its_guards_are_down(watched: Watched) -> None:
    module = watched.network.get_submodule("0")
    watched.guards.down()
    plain, hooks = vars(module)["_parameters"], dict(module._forward_pre_hooks)
    for _ in range(2):
        watched.guards.up()
        assert isinstance(module._parameters, GuardedParameters)
        assert len(module._forward_pre_hooks) == 1
        watched.guards.down()
        assert vars(module)["_parameters"] is plain, "dynamo guards on what the dictionary is"
        assert dict(module._forward_pre_hooks) == hooks


def test_what_is_set_while_guards_are_up_stays(watched: Watched) -> None:
    module = watched.network.get_submodule("0")
    weight = nn.Parameter(torch.ones(4, 3))
    module.weight = weight
    watched.guards.down()
    assert module.weight is weight


def test_a_parameter_that_moves_to_a_new_module_is_guarded_there(watched: Watched) -> None:
    watched.guards.down()
    parametrizations.weight_norm(watched.network.get_submodule("0"))
    watched.held = list(watched.network.parameters())
    watched.names = {id(p): name for name, p in watched.network.named_parameters()}
    watched.make_stale()
    watched.guards.up()
    watched.network(torch.ones(1, 3))
    assert sorted(watched.updated) == sorted(watched.names.values())


def test_replays_of_a_cuda_graph_read_what_is_up_to_date() -> None:
    """``torch.cuda.make_graphed_callables`` puts a function in the place of forward that asks no module."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    held = list(network.parameters())
    updated_at_replay: list[int] = []

    def replay(features: torch.Tensor) -> torch.Tensor:
        updated_at_replay.append(len(watched.updated))
        return features @ held[0].t() @ held[2].t()

    replay.__module__ = "torch.cuda.graphs"
    network.forward = replay  # type: ignore[method-assign]
    watched = Watched(network)
    network(torch.ones(1, 3))
    assert updated_at_replay == [4]
    watched.guards.close()
