"""Measured profiles: bytes against autograd's own, copies on the device, tokens, tied parameters."""

import gc
import logging
import random
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from crossover_ddp.pipeline import LayerProfile, Profile, measuring
from crossover_ddp.pipeline.chain import LayerChain, one_tensor
from tests.harness.campaign import IN_CAMPAIGN

CHAINS = 150 if IN_CAMPAIGN else 40
SEEDS = st.integers(0, 10**6)
# The axes of samples: batch, tokens or height, width.
CHANNELS, SIZE = 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.projections(x).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return x + attended


class Discarding(nn.Module):
    """It computes a branch whose result is dropped, so autograd frees the branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.sigmoid(x).square()
        return x.square()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIZE, 8 * SIZE), nn.Tanh(), nn.Linear(8 * SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Tupled(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None, ()


class Part(nn.Module):
    """It returns a part of a larger storage: that of its input, or another one."""

    def __init__(self, *, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1 if self.is_own else x)[:, :, 0]


KINDS: dict[str, Any] = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "frozen conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).requires_grad_(False),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "no bias": lambda: nn.Linear(SIZE, SIZE, bias=False),
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "layer norm": lambda: nn.LayerNorm(SIZE),
    "dropout": lambda: nn.Dropout(0.3),
    "no dropout": lambda: nn.Dropout(0.0),
    "attention": Attention,
    "identity": nn.Identity,
    "view": lambda: nn.Flatten(0, 0),
    "discarding": Discarding,
    "checkpointed": Checkpointed,
    "tuple": lambda: Tupled(SIZE, SIZE),
}
PASSING = ("identity", "view", "no dropout")


def random_chain(dice: random.Random) -> tuple[list[str], list[nn.Module]]:
    """Return the kinds and the layers of a chain that autograd accepts.

    A layer may not change in place the output that the layer before it saves.
    """
    names: list[str] = []
    for name in dice.choices([*KINDS], k=dice.randint(1, 10)):
        working = [each for each in names if each not in PASSING]
        if name != "relu in place" or working[-1:] not in (["sigmoid"], ["relu"]):
            names.append(name)
    names = names or ["linear"]
    return names, [KINDS[name]() for name in names]


def kept_bytes(layers: Sequence[nn.Module], inputs: torch.Tensor) -> int:
    """Return the size of the storages that autograd keeps for these layers' backward."""
    kept: weakref.WeakValueDictionary[int, Box] = weakref.WeakValueDictionary()

    def pack(tensor: torch.Tensor) -> Box:
        box = Box(tensor)
        kept[id(box)] = box
        return box

    chain = LayerChain(*layers)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        output = chain(inputs.clone())
    found = {box.storage.data_ptr(): box.storage.nbytes() for box in kept.values()}
    for tensor in (*chain.parameters(), *chain.buffers()):
        found.pop(tensor.untyped_storage().data_ptr(), None)
    assert output.isfinite().all()
    return sum(found.values())


class Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()


def stage_bytes(layers: Sequence[LayerProfile]) -> float:
    stored_bytes = sum(layer.stored_bytes for layer in layers)
    return stored_bytes - sum(layer.shared_bytes for layer in layers[1:])


def sample(*, needs_gradient: bool = False) -> torch.Tensor:
    return torch.randn(2, CHANNELS, SIZE, SIZE, requires_grad=needs_gradient)


@given(SEEDS, st.booleans())
@settings(max_examples=CHAINS, deadline=None)
def test_every_stage_stores_the_bytes_that_autograd_keeps(seed: int, needs_gradient: bool) -> None:
    dice = random.Random(seed)
    names, layers = random_chain(dice)
    profile = Profile.measure(layers, sample(needs_gradient=needs_gradient), repeats=1)
    assert stage_bytes(profile.layers) == kept_bytes(layers, sample(needs_gradient=needs_gradient))
    start, stop = sorted(dice.sample(range(len(layers) + 1), 2))
    if all(name in PASSING for name in names[start:stop]):
        return
    # A gradient reaches the stage if a layer before it is trained.
    before = nn.Sequential(*layers[:start]).parameters()
    needs_gradient = needs_gradient or any(each.requires_grad for each in before)
    expected = kept_bytes(layers[start:stop], sample(needs_gradient=needs_gradient))
    assert stage_bytes(profile.layers[start:stop]) == expected, names


def test_stored_bytes_are_those_of_the_saved_tensors() -> None:
    layers = [nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4), nn.Sigmoid(), nn.GELU()]
    profile = Profile.measure(layers, torch.randn(3, 8), repeats=1)
    first, relu, second, sigmoid, gelu = profile.layers
    # The input, which needs no gradient, is saved for the gradient of the weight.
    assert (first.stored_bytes, first.shared_bytes) == (3 * 8 * 4, 0)
    # A ReLU saves its output, which the next layer saves as its input.
    assert (relu.stored_bytes, relu.shared_bytes) == (3 * 16 * 4, 0)
    assert (second.stored_bytes, second.shared_bytes) == (3 * 16 * 4, 3 * 16 * 4)
    assert (sigmoid.stored_bytes, sigmoid.shared_bytes) == (3 * 4 * 4, 0)
    assert (gelu.stored_bytes, gelu.shared_bytes) == (3 * 4 * 4, 3 * 4 * 4)


def test_a_view_between_two_layers_that_save_it_counts_once_in_a_stage() -> None:
    layers = [nn.Sigmoid(), nn.Flatten(), nn.Identity(), nn.GELU()]
    profile = Profile.measure(layers, torch.randn(2, 3, 4, requires_grad=True), repeats=1)
    size = 2 * 3 * 4 * 4
    assert [each.stored_bytes for each in profile.layers] == [size] * 4
    assert [each.shared_bytes for each in profile.layers] == [0, size, size, size]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_layer_that_returns_a_part_stores_the_whole(is_own: bool) -> None:
    layers = [nn.Linear(SIZE, SIZE), Part(is_own=is_own), nn.GELU()]
    profile = Profile.measure(layers, sample(), repeats=1)
    part_bytes = 2 * CHANNELS * SIZE * 4
    assert profile.layers[1].stored_bytes == SIZE * part_bytes
    assert profile.layers[2].stored_bytes == part_bytes, "behind a cut only the part exists"
    assert stage_bytes(profile.layers) == kept_bytes(layers, sample()) + part_bytes


def test_frozen_first_layers_need_no_backward() -> None:
    layers = [nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    profile = Profile.measure(layers, torch.randn(3, 8), repeats=2)
    frozen, activation, first, last = profile.layers
    for layer in (frozen, activation):
        assert (layer.backward_s, layer.weight_s, layer.stored_bytes) == (0, 0, 0)
    assert first.weight_s == first.backward_s > 0, "its input needs no gradient"
    assert last.weight_s == 0 < last.backward_s


def test_weights_take_a_part_of_backward() -> None:
    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    profile = Profile.measure(layers, torch.randn(256, 64), repeats=5)
    assert profile.layers[0].weight_s == profile.layers[0].backward_s
    for layer in profile.layers:
        assert layer.weight_s is not None
        assert 0 <= layer.weight_s <= layer.backward_s
    wanted = torch.randn(256, 64, requires_grad=True)
    with_gradient = Profile.measure(layers, wanted, repeats=5).layers[0]
    assert (with_gradient.weight_s or 0) < with_gradient.backward_s
    assert wanted.grad is None


class Watched(nn.Linear):
    """It counts its copies that exist at the same time."""

    alive: ClassVar["weakref.WeakSet[Watched]"] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def __deepcopy__(self, memo: Any) -> "Watched":
        made = Watched(self.in_features, self.out_features)
        Watched.alive.add(made)
        Watched.most = max(Watched.most, len(Watched.alive))
        return made


def test_one_copy_of_a_layer_exists_at_a_time() -> None:
    layers = [Watched(4, 4) for _ in range(5)]
    gc.disable()  # a cycle would keep a copy on the device
    try:
        Profile.measure(layers, torch.randn(2, 4), repeats=1)
        assert (Watched.most, len(Watched.alive)) == (1, 0)
    finally:
        gc.enable()


def test_layers_on_the_meta_device_are_measured_with_values() -> None:
    with torch.device("meta"):
        deep = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.BatchNorm1d(64))] * 12
        tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tied[1].weight = tied[0].weight
    deep[0].eval()  # outputs depend on the running variance
    profile = Profile.measure([(str(k), layer) for k, layer in enumerate([*deep, tied])],
                              torch.randn(8, 64), device="cpu", repeats=1)  # fmt: skip
    assert profile.layers[-1].parameter_bytes == 4 * (64 * 64 + 2 * 64)
    assert deep[0][0].weight.is_meta
    assert all(buffer.is_meta for buffer in deep[0].buffers())
    values = torch.randn(8, 64)
    for layer in deep:
        values = measuring.placed("x", layer, torch.device("cpu"), None)(values)
    assert values.abs().max() > 1e-6, "tiny values would be slow subnormal numbers"
    assert values.isfinite().all()


def test_layers_are_measured_on_another_device_than_theirs_and_their_sample() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(4, 4)]
    with pytest.raises(ValueError, match="expected a device that computes, got device=meta"):
        Profile.measure(layers, torch.randn(2, 4), device="meta")
    with pytest.raises(ValueError, match="and a sample on meta; give a sample with values"):
        Profile.measure(layers, torch.zeros(2, 4, device="meta"), device="cpu")
    assert Profile.measure(layers, torch.randn(2, 4), repeats=1).layers[0].parameter_bytes == 80


def test_a_dtype_converts_parameters_and_floating_inputs() -> None:
    layers = [nn.Linear(8, 8), nn.LayerNorm(8)]
    profile = Profile.measure(layers, torch.randn(2, 8), dtype=torch.bfloat16, repeats=1)
    assert [each.dtype for each in profile.layers] == ["bfloat16"] * 2
    assert [each.parameter_bytes for each in profile.layers] == [2 * 72, 2 * 16]
    assert [each.activation_bytes for each in profile.layers] == [2 * 2 * 8] * 2
    assert layers[0].weight.dtype == torch.float32


def test_autocast_changes_outputs_and_leaves_parameters() -> None:
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)]
    profile = Profile.measure(layers, torch.randn(2, 8), autocast=torch.bfloat16, repeats=1)
    assert [profile.layers[k].dtype for k in (0, 2)] == ["bfloat16"] * 2
    assert [each.parameter_bytes for each in profile.layers] == [4 * 72, 4 * 16, 4 * 72]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stage_bytes(profile.layers) == kept_bytes(layers, torch.randn(2, 8))


class Outputs(nn.Module):
    def __init__(self, rest: Any) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, x: torch.Tensor) -> Any:
        return (x * 2, *self.rest)


@pytest.mark.parametrize("rest", [(), (None,), (None, (), {}, [])])
def test_tuples_with_one_tensor_are_accepted(rest: Any) -> None:
    layer, inputs = Outputs(rest), torch.ones(2, 3)
    assert Profile.measure([layer, layer], inputs, repeats=1).layers[0].shape == (2, 3)
    assert torch.equal(LayerChain(layer, layer)(inputs), inputs * 4)


@pytest.mark.parametrize("output", [(), (None, torch.ones(1)), (torch.ones(1), 1), {}, 1.0, None])
def test_other_outputs_are_refused(output: Any) -> None:
    with pytest.raises(TypeError, match=r"that returns one tensor, got .* of layer 'head'"):
        one_tensor(output, "head")
    with pytest.raises(TypeError, match="got tuple of layer '0'"):
        LayerChain(Outputs((torch.ones(1),)))(torch.ones(1))


class NoCopy(nn.Module):
    def __deepcopy__(self, memo: Any) -> "NoCopy":
        raise RuntimeError("not me")


def test_layers_that_cannot_be_copied_and_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"that copy.deepcopy can copy, got layer '1' \(not me"):
        Profile.measure([nn.Identity(), NoCopy()], torch.ones(1))
    with pytest.raises(ValueError, match="expected repeats >= 1, got repeats=0"):
        Profile.measure([nn.Identity()], torch.ones(1), repeats=0)


def test_tied_parameters_are_found() -> None:
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    second.weight = third.weight = first.weight
    third.bias = first.bias
    frozen = [nn.Linear(4, 4).requires_grad_(False)] * 2
    layers = [first, nn.ReLU(), second, third, *frozen]
    profile = Profile.measure(layers, torch.randn(2, 4), repeats=1)
    # Each layer forms a pair with the next one that has the parameter. Frozen ones do not count.
    assert profile.tied == ((0, 2, 64.0), (0, 3, 16.0), (2, 3, 64.0))
    half = Profile.measure(layers, torch.randn(2, 4), repeats=1, dtype=torch.bfloat16)
    assert half.tied == ((0, 2, 32.0), (0, 3, 8.0), (2, 3, 32.0))
    assert Profile.from_json(profile.to_json()) == profile


def test_each_layer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "crossover_ddp.pipeline"):
        Profile.measure([("stem", nn.Linear(4, 4)), ("head", nn.ReLU())], torch.randn(2, 4))
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "layer 1 of 2, stem",
        "layer 2 of 2, head",
    ]


def test_gradients_of_weights_are_the_difference_of_two_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that only backward's parts advance: 5 s for the input, and 2 s for the weight."""
    now_s = 0.0

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x + weight

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            nonlocal now_s
            for_input, for_weight = ctx.needs_input_grad
            now_s += 5.0 * for_input + 2.0 * for_weight
            return gradients[0], gradients[0]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> Any:
            return Timed.apply(x, self.weight)

    monkeypatch.setattr(measuring, "perf_counter", lambda: now_s)
    first, second = Profile.measure([Layer(), Layer()], torch.ones(3)).layers
    assert (first.backward_s, first.weight_s) == (2.0, 2.0)
    assert (second.backward_s, second.weight_s) == (7.0, 2.0)


def language_model() -> list[nn.Module]:
    """Return a tiny language model as a chain, with one matrix as embedding and head."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the extra 'loops'"
    )
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    return [Embeddings(model.transformer), *model.transformer.h, Head(model)]


class Embeddings(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.wte, model.wpe, model.drop

    def forward(self, tokens: torch.Tensor) -> Any:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(places))


class Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.vocabulary = model.transformer.ln_f, model.lm_head

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.vocabulary(self.norm(hidden))


def test_a_language_model_of_transformers_is_measured() -> None:
    layers, tokens = language_model(), torch.randint(50, (2, 12))
    profile = Profile.measure(layers, tokens, repeats=1)
    assert [layer.shape for layer in profile.layers] == [(2, 12, 8)] * 3 + [(2, 12, 50)]
    assert profile.tied == ((0, 3, 50 * 8 * 4.0),), "the embedding is the head"
    embedding = profile.layers[0]
    assert embedding.weight_s == embedding.backward_s > 0, "tokens have no gradient"
    assert stage_bytes(profile.layers) == kept_bytes(layers, tokens)
    assert stage_bytes(profile.layers[2:]) == kept_bytes(
        layers[2:], torch.randn(2, 12, 8, requires_grad=True)
    )
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


def test_a_language_model_on_the_meta_device_is_measured() -> None:
    with torch.device("meta"):
        layers = language_model()
    profile = Profile.measure(layers, torch.randint(50, (2, 12)), dtype=torch.bfloat16, repeats=1)
    assert profile.tied == ((0, 3, 50 * 8 * 2.0),)
    assert {layer.dtype for layer in profile.layers} == {"bfloat16"}
