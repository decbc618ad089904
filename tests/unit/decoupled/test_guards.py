"""Every way of reading a parameter through a module is seen; copies and leavers are not."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm.utils
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations

from tests.harness import training as harness
from tests.harness.networks import mlp
from tests.harness.training import decoupled

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]
WIDTH = 6


class Tied(nn.Module):
    """Reads another module's weight, without that module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(32))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.embedding(x.long().abs(), self.embedding.weight) * self.scale + self.extra[0]
        return nn.functional.linear(hidden, self.embedding.weight)


class Pending:
    """A network whose parameters are all to be updated, each in a bucket of its own; tells which of them were."""

    def __init__(self, network: nn.Module) -> None:
        def loss(model: nn.Module, *_: Any) -> torch.Tensor:
            output: Any = model(torch.ones(2, WIDTH))
            return (output[0] if isinstance(output, tuple) else output).square().mean()

        self.network = network
        self.training = harness.Training(decoupled(), module=network, loss=loss)
        self.training.run(4)
        self.names = [name for name, _ in network.named_parameters()]
        self.step()

    def step(self) -> None:
        """Have all parameters to be updated again."""
        self.training.backward()
        self.before = [parameter.detach().clone() for parameter in self.training.held]
        self.training.update()
        assert self.training.is_pending

    def updated(self) -> list[str]:
        pairs = zip(self.names, self.training.held, self.before, strict=True)
        return [name for name, now, before in pairs if not torch.equal(now, before)]


@pytest.fixture
def pending() -> Pending:
    return Pending(mlp(WIDTH, 32, 32, seed=3))


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]
SPARE = mlp(WIDTH, 32, 32, seed=4).state_dict()
READS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "forward": (lambda m: m(torch.ones(1, 6)), ALL),
    "forward without gradients": (lambda m: torch.no_grad()(m)(torch.ones(1, 6)), ALL),
    "evaluation": (lambda m: m.eval()(torch.ones(1, 6)), ALL),
    "a compiled module": (lambda m: torch.compile(m, backend="eager")(torch.ones(1, 6)), ALL),
    "one module": (lambda m: m[2](torch.ones(1, 32)), ALL[2:]),
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
    "load_state_dict": (lambda m: m.load_state_dict(SPARE), ALL),
    "a dictionary of them": (lambda m: dict(m[0]._parameters), ALL[:2]),
    "their values": (lambda m: list(m[0]._parameters.values()), ALL[:2]),
    "one by name": (lambda m: m[0]._parameters.get("bias"), ALL[1:2]),
    "representation": (repr, [ALL[1], ALL[3]]),
    "removal": (lambda m: m[0]._parameters.pop("bias"), ALL[1:2]),
    "functional_call": (lambda m: torch.func.functional_call(m, {}, torch.ones(1, 6)), ALL),
    "moving average": (lambda m: timm.utils.ModelEmaV3(m), ALL),
    # These read no parameter.
    "training mode": (lambda m: m.train().eval(), []),
    "a missing name": (lambda m: m[0]._parameters.get("missing"), []),
    "buffers": (lambda m: list(m.buffers()), []),
    "names": (lambda m: [*m[0]._parameters, "weight" in m[0]._parameters], []),
}


@pytest.mark.parametrize("way", READS)
def test_reading_brings_up_to_date_what_is_read(way: str, pending: Pending) -> None:
    read, names = READS[way]
    read(pending.network)
    assert pending.updated() == names
    assert pending.training.is_pending == (names != ALL)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "weights read by another module": (Tied, lambda m: m(torch.tensor([1, 2]))),
    "references of its own": (lambda: nn.LSTM(6, 4), lambda m: m(torch.ones(2, 1, 6))),
    "a parametrized weight": (lambda: parametrizations.weight_norm(nn.Linear(6, 2, bias=False)), lambda m: m.weight),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_all_parameters_of_other_networks_are_seen(name: str) -> None:
    make, read = OTHERS[name]
    pending = Pending(make())
    read(pending.network)
    assert not pending.training.is_pending


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_an_ordinary_module(copied: Callable[[nn.Module], nn.Module], pending: Pending) -> None:
    twin = copied(pending.network)
    pending.step()
    twin(torch.ones(1, WIDTH))
    assert pending.updated() == []
    assert all(type(module._parameters) is dict for module in twin.modules())


def test_a_module_looks_as_before_when_its_guards_are_down_with_what_was_set_meanwhile(
    pending: Pending,
) -> None:
    module: Any = pending.network.get_submodule("0")
    pending.training.state.flush()
    plain, hooks = vars(module)["_parameters"], dict(module._forward_pre_hooks)
    for _ in range(2):
        pending.step()
        assert vars(module)["_parameters"] is not plain
        assert len(module._forward_pre_hooks) == 1 + len(hooks)
        pending.training.state.flush()
        assert vars(module)["_parameters"] is plain, "dynamo guards on what the dictionary is"
        assert dict(module._forward_pre_hooks) == hooks
    pending.step()
    module.register_parameter("late", nn.Parameter(torch.ones(1)))
    module.weight = weight = nn.Parameter(torch.ones(32, WIDTH))
    del module.bias
    pending.training.state.close()
    assert type(module._parameters) is dict
    assert list(module._parameters) == ["weight", "late"]
    assert module.weight is weight
    assert not module._forward_pre_hooks


class Moved(nn.Linear):
    """Has its weight in a module of its own, as parametrizations have."""

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        return self.inner[0]  # type: ignore[index, no-any-return]


def test_a_parameter_that_moves_to_a_new_module_is_guarded_there(pending: Pending) -> None:
    pending.training.state.flush()
    module: Any = pending.network.get_submodule("0")
    inner = nn.ParameterList([module.weight])
    del module.weight
    module.inner, module.__class__ = inner, Moved
    pending.step()
    assert module.weight is pending.training.held[0]
    assert pending.updated() == ALL[:1]


def test_replays_of_a_cuda_graph_read_what_is_up_to_date() -> None:
    """``torch.cuda.make_graphed_callables`` puts a function in the place of forward that asks no module."""
    network = mlp(WIDTH, 32, 32, seed=3)
    held, read = list(network.parameters()), []

    def replay(features: torch.Tensor) -> torch.Tensor:
        read.append([parameter.detach().clone() for parameter in held])
        return features @ held[0].t() @ held[2].t() + held[3] + held[1].sum()

    replay.__module__ = "torch.cuda.graphs"
    network.forward = replay  # type: ignore[method-assign]
    pending = Pending(network)
    network(torch.ones(1, WIDTH))
    assert not any(map(torch.equal, read[-1], pending.before))
