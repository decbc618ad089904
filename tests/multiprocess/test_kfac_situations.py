"""K-FAC in situations that the conformance table has not, against the float64 computation, between two ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import timm
import torch
import torchvision
import tqdm
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import run_ranks
from tests.multiprocess.kfac_oracle import Oracle, Settings, step_for_all
from tests.multiprocess.test_kfac import relative_error

LR = 0.05
STEPS = 4
EXACT, COARSE = 1e-4, 0.05  # float32 and bfloat16 against float64


class Network(nn.Module):
    """Convolutions and linear layers without a norm, so that parts of a batch are a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 4, 3, stride=2)
        self.hidden = nn.Linear(36, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Situation:
    """How the model is wrapped and called.

    Args:
        model: makes the network; the oracle computes with a plain `Network`.
        ddp: options of DDP.
        wrap: around the DDP model.
        dtype: of parameters and inputs.
        autocast: whether forward runs in bfloat16.
        tolerance: of the greatest error of a layer, relative to its greatest element.
    """

    model: Callable[[], nn.Module] = Network
    ddp: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    channels_last: bool = False
    tolerance: float = EXACT


SITUATIONS = {
    "channels last": Situation(channels_last=True),
    "autocast": Situation(autocast=True, tolerance=COARSE),
    "bfloat16 parameters": Situation(dtype=torch.bfloat16, tolerance=COARSE),
}
COMPILED = {
    "compiled inside": Situation(model=lambda: compiled(Network()), ddp={"bucket_cap_mb": 25.0}),
    "compiled outside": Situation(wrap=lambda model: compiled(model), ddp={"bucket_cap_mb": 25.0}),
}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 7, 7, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def errors(situation: Situation, rank: int, world_size: int) -> Iterator[float]:
    """Train; return the greatest relative error of each step."""
    torch.manual_seed(3)
    network = situation.model().to(situation.dtype)
    if situation.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ddp = DistributedDataParallel(network, **({"bucket_cap_mb": 0.002} | situation.ddp))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9)
    settings = Settings()
    state = KFACState(ddp, optimizer, damping=settings.damping, factor_decay=settings.factor_decay,
                      kl_clip=settings.kl_clip, inv_update_steps=1)  # fmt: skip
    ddp.register_comm_hook(state, kfac_hook)
    model = situation.wrap(ddp)
    plain = getattr(network, "_orig_mod", network)
    oracle = Oracle(settings, LR)
    for step in range(STEPS):
        replicas = [reference(plain) for _ in range(0 if rank else world_size)]
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        if situation.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=situation.autocast):
            loss = nn.functional.cross_entropy(model(inputs.to(situation.dtype, copy=True)), targets)
        loss.backward()
        wide = [(x.double(), y) for x, y in (batch(each, step) for each in range(world_size))]
        yield relative_error(plain, step_for_all(oracle, replicas, wide, plain))
        optimizer.step()
    assert oracle.least_scale < 1, "the clip is to be seen at work"
    state.close()


def reference(network: nn.Module) -> nn.Module:
    replica = Network()
    replica.load_state_dict(network.state_dict())
    return replica.double()


def errors_of_rank(rank: int, world_size: int, compiled: bool) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    if compiled:
        tqdm.tqdm.monitor_interval = (
            0  # torch.compile shows its progress by it; no thread shall be left behind
        )
    chosen = COMPILED if compiled else SITUATIONS
    return {name: list(errors(situation, rank, world_size)) for name, situation in chosen.items()}


@cache
def findings(compiled: bool) -> list[dict[str, list[float]]]:
    return run_ranks(errors_of_rank, 2, args=(compiled,), timeout_s=240)


@pytest.mark.parametrize("name", [*SITUATIONS, *COMPILED])
def test_gradients_are_those_of_an_independent_computation(name: str) -> None:
    situation = (SITUATIONS | COMPILED)[name]
    for of_rank in findings(name in COMPILED):
        assert max(of_rank[name]) < situation.tolerance, of_rank[name]


def train_unevenly(rank: int, world_size: int, way: str) -> list[float]:
    """Rank 1 has inputs for fewer steps; return the greatest gradient of each step, or its loss if deferred."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Network(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    state = KFACState(model, optimizer, inv_update_steps=2)
    if way == "decoupled":
        model.register_comm_hook(DecoupledState(optimizer, kfac=state), decoupled_hook)
    else:
        model.register_comm_hook(state, kfac_hook)
    found: list[float] = []

    def train(step: int) -> None:
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if way == "decoupled":
            found.append(float(loss))
        else:
            found.append(max(float(p.grad.abs().max()) for p in model.parameters()))  # type: ignore[union-attr]
        optimizer.step()

    for step in range(3):
        train(step)
    if way == "early":
        state.plan_factors(early=True)
    with Join([model]):
        for step in range(3, 7 if rank == 0 else 5):
            train(step)
    assert state.stats() == {"strained": 0, "dropped": 0}
    assert state.steps == 7
    found.append(float(torch.cat([p.detach().flatten() for p in model.parameters()]).sum()))
    return found


@pytest.mark.parametrize("way", ["in the buckets", "early", "decoupled"])
def test_join_with_uneven_inputs_ends_with_the_same_model(way: str) -> None:
    first, second = run_ranks(train_unevenly, 2, args=(way,))
    assert (len(first), len(second)) == (8, 6)
    assert all(0 < value < float("inf") for value in first[:-1])
    assert first[-1] == second[-1]


def smoke(rank: int, world_size: int, name: str) -> tuple[str, int, list[float]]:
    """Train three steps; return the report, the number of layers, and a sum over all gradients of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "vit":
        network = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10, drop_path_rate=0.0
        )
    else:
        network = torchvision.models.resnet18(num_classes=10)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # The widest layers take seconds each to invert.
    state = KFACState(model, optimizer, damping=0.03, inv_update_steps=2, skip=["layer[34]*"])
    model.register_comm_hook(state, kfac_hook)
    generator = torch.Generator().manual_seed(rank)
    sums = []
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(4, 3, 32, 32, generator=generator)
        targets = torch.randint(0, 10, (4,), generator=generator)
        nn.functional.cross_entropy(model(images), targets).backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        sums.append(sum(float(p.grad.double().sum()) for p in model.parameters()))  # type: ignore[union-attr]
        optimizer.step()
    assert state.stats()["dropped"] == 0
    return state.report(), len(state.owners), sums


@pytest.mark.parametrize(("name", "layers"), [("vit", 1 + 2 * 4 + 1), ("resnet18", 1 + 4 + 5 + 1)])
def test_models_of_other_libraries(name: str, layers: int) -> None:
    (report, count, sums), (_, _, of_other) = run_ranks(smoke, 2, args=(name,), timeout_s=120)
    assert sums == of_other
    assert count == layers
    expected = {
        "vit": ["blocks.1.mlp.fc2: A 769, G 192, rank "],
        "resnet18": [
            "layer2.1.conv2: A 1152, G 128, rank ",
            "layer4.1.conv2.weight passes through: named in skip",
        ],
    }
    for line in [*expected[name], "passes through: not Linear or Conv2d", "rank 1 works for "]:
        assert line in report
