"""What the hooks record is what layers' inputs and their outputs' gradients make up by definition in float64."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from crossover_ddp._kfac.capture import FactorCapture
from crossover_ddp._kfac.factors import WeightSharing
from crossover_ddp._kfac.layers import Layer, LayerShape, find_layers
from tests.multiprocess.kfac_oracle import RankRun

pytestmark = pytest.mark.torch_version


class Captured(NamedTuple):
    """Both factors of one layer in a step: [groups, a_dim, a_dim] and [groups, g_dim, g_dim], or their columns."""

    a: Tensor
    g: Tensor


class Net(nn.Module):
    """A convolution, an in-place activation, a layer used ``uses`` times on tokens, and a head."""

    def __init__(self, uses: int = 1, reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.token = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.uses = uses
        self.reentrant = reentrant

    def tokens(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            # In place on what the layer returned: the gradient recorded is that before it.
            x = self.token(x).sin_()
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x)).flatten(2).mT
        kept = self.reentrant is None
        x = self.tokens(x) if kept else checkpoint(self.tokens, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


def net(uses: int = 1, reentrant: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(uses, reentrant).double()


def batch(size: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    return output.exp().sum(-1).mean()


def defined(
    model: nn.Module,
    x: Tensor,
    sharing: WeightSharing = "expand",
    loss: Callable[[Tensor], Tensor] = loss_of,
) -> dict[str, Captured]:
    """Return the factors of every layer."""
    run = RankRun(copy.deepcopy(model), x, loss)
    return {name: Captured(*run.factors(name, sharing)) for name in run.layers}


class OutOfPlace(Net):
    def tokens(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = self.token(x).sin()
        return x


def expected_of(model: Net, x: Tensor, *options: Any, **named: Any) -> dict[str, Captured]:
    plain = OutOfPlace(model.uses).double()
    plain.load_state_dict(model.state_dict())
    plain.act = nn.ReLU()
    return defined(plain, x, *options, **named)


@dataclass
class Recorded:
    """A model with its capture."""

    model: nn.Module
    layers: list[Layer]
    capture: FactorCapture

    def taken(self) -> dict[str, Captured | None]:
        """Take the factors of all layers by name; None: it was not called, or no gradient came."""
        found: dict[str, Captured | None] = {}
        for index, layer in enumerate(self.layers):
            a, g = self.capture.take(index)
            found[layer.name] = None if a is None or g is None else Captured(a, g)  # type: ignore[arg-type]
        return found


def recorded(model: nn.Module, sharing: WeightSharing = "expand", **options: object) -> Recorded:
    layers, _ = find_layers(model)
    return Recorded(model, layers, FactorCapture(layers, sharing=sharing, model=model, **options))  # type: ignore[arg-type]


def assert_same(got: dict[str, Captured | None], expected: dict[str, Captured]) -> None:
    assert got.keys() == expected.keys()
    for name, captured in got.items():
        assert captured is not None, name
        torch.testing.assert_close(captured.a, expected[name].a, msg=lambda m, n=name: f"A of {n}: {m}")
        torch.testing.assert_close(captured.g, expected[name].g, msg=lambda m, n=name: f"G of {n}: {m}")


@pytest.mark.parametrize(
    ("sharing", "uses", "accumulated"),
    [("expand", 1, "mean"), ("expand", 2, "sum"), ("reduce", 2, "mean"), ("kfac-pytorch", 2, "mean")],
)
def test_four_micro_batches_are_one_large_batch(sharing: WeightSharing, uses: int, accumulated: str) -> None:
    large = recorded(net(uses), sharing)
    loss_of(large.model(batch(8))).backward()
    small = recorded(net(uses), sharing, accumulated=accumulated)
    for part in batch(8).chunk(4):
        (loss_of(small.model(part)) / (4 if accumulated == "mean" else 1)).backward()
    assert small.capture.micro_batches == 4
    expected = {name: captured for name, captured in large.taken().items() if captured}
    assert_same(small.taken(), expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_every_call_once(reentrant: bool, uses: int, micro_batches: int) -> None:
    run = recorded(net(uses, reentrant))
    for part in batch().chunk(micro_batches):
        (loss_of(run.model(part)) / micro_batches).backward()
    assert run.capture.micro_batches == micro_batches
    assert_same(run.taken(), expected_of(net(uses), batch()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_the_whole_model(reentrant: bool) -> None:
    run = recorded(net())
    for part in batch().chunk(2):
        output = checkpoint(run.model, part.requires_grad_(), use_reentrant=reentrant)
        (loss_of(output) / 2).backward()
    assert run.capture.micro_batches == 2
    assert_same(run.taken(), expected_of(net(), batch()))


def test_losses_are_scaled_back_by_the_scale_of_their_backward_read_once() -> None:
    reads: list[float] = []
    scale = 0.0

    def read() -> float:
        reads.append(scale)
        return scale

    run = recorded(net(), loss_scale=read)
    for next_scale, part in zip((1024.0, 2.0), batch().chunk(2), strict=True):
        loss = loss_of(run.model(part)) / 2
        scale = next_scale
        (scale * loss).backward()
    assert reads == [1024.0, 2.0]
    assert_same(run.taken(), expected_of(net(), batch()))


def test_evaluation_captures_nothing() -> None:
    run = recorded(net())
    with torch.no_grad():
        run.model(batch())
    run.model.eval()
    loss_of(run.model(batch())).backward()
    run.model.train()
    run.capture.active = False
    loss_of(run.model(batch())).backward()
    run.capture.active = True
    run.model(batch())  # and no backward
    assert run.capture.micro_batches == 0
    assert set(run.taken().values()) == {None}


def test_what_another_hook_makes_of_the_output_is_not_the_layers() -> None:
    model = net()
    model.head.register_forward_hook(lambda module, args, output: output * 3)
    run = recorded(model)
    loss_of(model(batch()) / 3).backward()
    assert_same(run.taken(), expected_of(net(), batch()))


def test_copies_of_the_model_add_nothing() -> None:
    run = recorded(net())
    loss_of(run.model(batch())).backward()
    for other in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        loss_of(other(batch(seed=1))).backward()
    assert_same(run.taken(), expected_of(net(), batch()))


def test_nobody_is_kept_alive() -> None:
    run = recorded(net())
    loss_of(run.model(batch())).backward()
    model, capture = weakref.ref(run.model), weakref.ref(run.capture)
    kept = run.model
    del run
    gc.collect()
    assert capture() is None
    loss_of(kept(batch())).backward()
    del kept
    gc.collect()
    assert model() is None


def test_closing_removes_the_hooks() -> None:
    run = recorded(net())
    loss = loss_of(run.model(batch()))
    run.capture.close()
    run.capture.close()
    loss.backward()
    assert set(run.taken().values()) == {None}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())


class Zoo(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.twin = nn.Linear(4, 4)
        self.twin.weight, self.twin.bias = self.first.weight, self.first.bias
        self.tied = nn.Linear(4, 4)
        self.loose = nn.Linear(4, 4)
        self.loose.weight = self.tied.weight
        self.bias_twin = nn.Linear(4, 4)
        self.bias_twin_too = nn.Linear(4, 4)
        self.bias_twin_too.bias = self.bias_twin.bias
        self.norm = nn.LayerNorm(4)
        self.cold = nn.Linear(4, 4)
        self.cold.weight.requires_grad_(False)
        self.cold_bias = nn.Linear(4, 4)
        self.cold_bias.bias.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.conv = nn.Conv2d(4, 4, 1, groups=2)
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.embedding.weight


def test_layers_are_found_and_the_others_have_a_reason() -> None:
    model = Zoo()
    layers, others = find_layers(model, skip=("block",))
    assert [layer.name for layer in layers] == ["first", "cold_bias", "conv"]
    assert layers[0].modules == (model.first, model.twin)
    assert layers[0].weight is model.first.weight and layers[0].bias is model.first.bias
    assert layers[1].bias is None and layers[1].shape == LayerShape(1, 4, 4, False)
    assert layers[2].shape == LayerShape(2, 3, 2, True)
    assert others == {
        **{f"block.{name}": "named in skip" for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **dict.fromkeys(("norm.weight", "norm.bias"), "not Linear or Conv2d"),
        "embedding.weight": "shared with decoder.weight",
        "tied.weight": "shared with loose.weight",
        "tied.bias": "beside a shared parameter",
        "loose.bias": "beside a shared parameter",
        "bias_twin.weight": "beside a shared parameter",
        "bias_twin.bias": "shared with bias_twin_too.bias",
        "bias_twin_too.weight": "beside a shared parameter",
        "cold.weight": "frozen",
        "cold.bias": "beside a frozen weight",
        "cold_bias.bias": "frozen",
        "decoder.bias": "beside a shared parameter",
    }


def test_layers_are_skipped_by_patterns_or_names_any_of_a_shared_one() -> None:
    for pattern in ("again", "twin", "f*", "first"):
        layers, others = find_layers(Zoo(), skip=(pattern,))
        assert "first" not in [layer.name for layer in layers]
        assert others["first.weight"] == others["first.bias"] == "named in skip"
    for pattern, left in {"block.0": 1, "block.*": 0, "bl": 2, "*.1": 1}.items():
        layers, _ = find_layers(Zoo(), skip=(pattern,))
        assert sum(layer.name.startswith("block.") for layer in layers) == left


def test_two_modules_of_one_layer_are_summed() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    second.weight, second.bias = first.weight, first.bias
    x = torch.randn(4, 3, dtype=torch.float64)
    one = recorded(nn.Sequential(first, nn.Tanh(), second))
    loss_of(one.model(x)).backward()
    same = recorded(nn.Sequential(copy.deepcopy(first), nn.Tanh()))
    loss_of(same.model[0](same.model(x))).backward()  # type: ignore[index]
    expected = {name: captured for name, captured in same.taken().items() if captured}
    assert_same(one.taken(), expected)


def test_names_are_those_of_the_model_inside(process_group: dist.ProcessGroup) -> None:
    model = net()
    for wrapped in (
        DistributedDataParallel(model, process_group=process_group),
        torch.compile(model, backend="eager"),
    ):
        layers, others = find_layers(wrapped)
        assert [layer.name for layer in layers] == ["conv", "token", "head"]
        assert layers[0].weight is model.conv.weight
        assert others == {}
