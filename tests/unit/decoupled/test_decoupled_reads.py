"""Parameters are read and updated as with plain DDP, whichever way a model or a script reads them.

Every read through a module is guarded; reads through copies and references are not.
"""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import timm.utils
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations

from tests.harness.networks import mlp
from tests.harness.oracles import heard
from tests.unit.decoupled.decoupled_training import Training, assert_same, both, inputs, network

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


class Remembering(nn.Module):
    """Reads the parameters of some layers past the dictionaries that hold them."""

    def __init__(self, *past: int) -> None:
        super().__init__()
        self.layers = network()
        self.references = {place: [*self.layers[place].parameters()] for place in past}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            held = self.references.get(place)
            features = layer(features) if held is None else nn.functional.linear(features, *held)
        return features


def test_a_forward_that_reads_past_its_modules_warns_once() -> None:
    with heard() as said:
        Training(decoupled=True, net=lambda: Remembering(0, 2, 4)).run(4)
    assert ["forward does not read" in each for each in said] == [True]


def test_references_kept_elsewhere_are_updated_before_forward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training, plain = both(net=lambda: Remembering(0))
    assert [training.step() for _ in range(10)] == [plain.step() for _ in range(10)]
    assert training.is_pending
    (told,) = [r.getMessage() for r in caplog.records if "does not read" in r.message]
    assert "2 parameters (layers.0.bias, layers.0.weight)" in told
    pending: list[bool] = []
    training.model.module.layers[1].register_forward_pre_hook(
        lambda *_: pending.append(training.is_pending)
    )
    for each in (training, plain):
        each.step()
    assert pending == [True], (
        "a bucket that is read through its module is still deferred into forward"
    )
    with torch.no_grad():  # past DDP
        assert torch.equal(*(each.model.module.eval()(inputs(9)) for each in (training, plain)))
    assert_same(training, plain)


def test_reads_by_another_thread_are_not_forwards_own_reads() -> None:
    """The thread reads in the middle of forward, after the reference was read."""
    training, plain = (each.run(1) for each in both(net=lambda: Remembering(0)))

    def save(*_: Any) -> None:
        saver = threading.Thread(target=training.model.module.state_dict)
        saver.start()
        saver.join(60)

    training.model.module.layers[1].register_forward_pre_hook(save)
    assert [training.step() for _ in range(6)] == [plain.step() for _ in range(6)]
    assert_same(training, plain)


def test_a_module_that_replaces_another_is_guarded() -> None:
    training, plain = (each.run() for each in both())
    for each in (training, plain):
        net, new = each.model.module, nn.Linear(6, 6)
        new.weight, new.bias = net[2].weight, net[2].bias
        net[2] = new
    assert [training.step() for _ in range(6)] == [plain.step() for _ in range(6)]
    assert training.is_pending
    assert_same(training, plain)


class First(nn.Module):
    def forward(self, several: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return several[0]


def test_no_warning_where_modules_read_their_own_parameters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.LSTM(6, 6), First(), parametrizations.weight_norm(nn.Linear(6, 6)))

    training, plain = (each.run(8) for each in both(net=net))
    assert "does not read" not in caplog.text
    assert torch.equal(*(each.model.module[2].weight for each in (training, plain)))
    assert training.is_pending
    assert_same(training, plain)


class Pending(Training):
    """Has updates of all parameters of a network pending, each in a bucket of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(decoupled=True, net=lambda: network)
        self.network = network
        self.names = [name for name, _ in network.named_parameters()]
        self.run(4)
        self.pend()

    def pend(self) -> None:
        """Make the updates of all parameters pending again."""
        self.backward()
        self.before = [parameter.detach().clone() for parameter in self.held]
        self.update()
        assert self.is_pending

    def updated(self) -> list[str]:
        pairs = zip(self.names, self.held, self.before, strict=True)
        return [name for name, now, before in pairs if not torch.equal(now, before)]


@pytest.fixture
def pending() -> Pending:
    return Pending(mlp(6, 32, 32, seed=3))


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]
SPARE = mlp(6, 32, 32, seed=4).state_dict()
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
def test_a_read_updates_the_parameters_that_are_read(way: str, pending: Pending) -> None:
    read, names = READS[way]
    read(pending.network)
    assert pending.updated() == names
    assert pending.is_pending == (names != ALL)


def test_without_guards_a_module_has_its_own_dictionary_with_later_parameters(
    pending: Pending,
) -> None:
    module: Any = pending.network.get_submodule("0")
    module.register_parameter("late", nn.Parameter(torch.ones(1)))
    module.weight = weight = nn.Parameter(torch.ones(32, 6))
    del module.bias
    pending.state.close()
    assert type(module._parameters) is dict
    assert list(module._parameters) == ["weight", "late"]
    assert module.weight is weight
    assert not module._forward_pre_hooks


def test_a_parameter_that_moves_to_a_new_module_is_guarded_there(pending: Pending) -> None:
    pending.state.flush()
    module: Any = pending.network.get_submodule("0")
    inner = nn.ParameterList([module.weight])
    del module.weight
    # As parametrizations have it.
    module.__class__ = type("Moved", (nn.Linear,), {"weight": property(lambda self: self.inner[0])})
    module.inner = inner
    pending.pend()
    assert module.weight is pending.held[0]
    assert pending.updated() == ALL[:1]


def test_replays_of_a_cuda_graph_read_updated_parameters() -> None:
    """``torch.cuda.make_graphed_callables`` replaces forward by a function that reads no module."""
    network = mlp(6, 32, 32, seed=3)
    held, read = list(network.parameters()), []

    def replay(features: torch.Tensor) -> torch.Tensor:
        read.append([parameter.detach().clone() for parameter in held])
        return features @ held[0].t() @ held[2].t() + held[3] + held[1].sum()

    replay.__module__ = "torch.cuda.graphs"
    network.forward = replay  # type: ignore[method-assign]
    pending = Pending(network)
    network(torch.ones(1, 6))
    assert not any(map(torch.equal, read[-1], pending.before))
