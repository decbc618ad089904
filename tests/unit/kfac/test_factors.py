"""Factors of every kind of layer against sums written from the definition, position by position, in float64."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

from crossover_ddp._kfac import factors as factors_module
from crossover_ddp._kfac.factors import (
    WeightSharing,
    gradient_matrix,
    input_columns,
    output_columns,
    pack_triangle,
    split_gradient,
    unpack_triangle,
    update_running,
)
from crossover_ddp._kfac.layers import LayerShape, layer_shape

# An even kernel with "same" is the one case of unequal sides; torch warns of what that costs.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

SHARINGS: tuple[WeightSharing, ...] = ("expand", "reduce", "kfac-pytorch")


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    channels_last: bool = False

    @property
    def unbatched(self) -> bool:
        return len(self.input) == 1 or (isinstance(self.make(), nn.Conv2d) and len(self.input) == 3)


CASES = {
    "linear": Case(lambda: nn.Linear(5, 3), (4, 5)),
    "linear without bias": Case(lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "linear, a sequence": Case(lambda: nn.Linear(5, 3), (4, 6, 5)),
    "linear, two more dimensions": Case(lambda: nn.Linear(5, 3, bias=False), (2, 3, 4, 5)),
    "linear, one sample": Case(lambda: nn.Linear(5, 3), (5,)),
    "conv": Case(lambda: nn.Conv2d(2, 3, 3), (4, 2, 5, 6)),
    "conv without bias": Case(lambda: nn.Conv2d(2, 3, (3, 2), bias=False), (3, 2, 5, 6)),
    "stride, padding": Case(lambda: nn.Conv2d(2, 3, 3, stride=(2, 3), padding=(1, 2)), (3, 2, 6, 7)),
    "dilation": Case(lambda: nn.Conv2d(2, 3, (3, 2), dilation=(2, 3), padding=1), (3, 2, 7, 6)),
    "groups": Case(lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 5, 4)),
    "depthwise": Case(lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1), (2, 3, 4, 5)),
    "same": Case(lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (2, 2, 5, 5)),
    "valid": Case(lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 5, 5)),
    "reflect": Case(lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), (2, 2, 5, 5)),
    "replicate": Case(lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 2, 4, 5)),
    "circular, same": Case(
        lambda: nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="circular"), (2, 2, 4, 5)
    ),
    "channels last": Case(lambda: nn.Conv2d(3, 2, 3, stride=2, padding=1), (3, 3, 5, 6), channels_last=True),
    "1x1": Case(lambda: nn.Conv2d(4, 3, 1), (3, 4, 3, 3)),
    "1x1 with stride and groups": Case(lambda: nn.Conv2d(4, 2, 1, stride=2, groups=2), (3, 4, 4, 3)),
    "conv, one sample": Case(lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 5)),
}


def sides_of(conv: nn.Conv2d, dim: int) -> tuple[int, int]:
    """Padding before and after."""
    if conv.padding == "same":
        total = conv.dilation[dim] * (conv.kernel_size[dim] - 1)
        return total // 2, total - total // 2
    return (0, 0) if isinstance(conv.padding, str) else (conv.padding[dim], conv.padding[dim])


def pixel(image: Tensor, channel: int, place: tuple[int, int], mode: str) -> float:
    inside = []
    for i, size in zip(place, image.shape[1:], strict=True):
        if mode == "zeros" and not 0 <= i < size:
            return 0.0
        mapped = {"zeros": i, "reflect": abs(i), "replicate": min(max(i, 0), size - 1), "circular": i % size}[
            mode
        ]
        inside.append(2 * (size - 1) - mapped if mode == "reflect" and mapped >= size else mapped)
    return image[channel, inside[0], inside[1]].item()


def rows_of_sample(module: nn.Module, x: Tensor) -> Tensor:
    """Return what each output position of one sample is computed from: [positions, groups, a_dim]."""
    if isinstance(module, nn.Linear):
        rows = x.reshape(-1, 1, x.shape[-1])
    else:
        assert isinstance(module, nn.Conv2d)
        per_group = module.in_channels // module.groups
        counts = [
            (
                x.shape[1 + dim]
                + sum(sides_of(module, dim))
                - module.dilation[dim] * (module.kernel_size[dim] - 1)
                - 1
            )
            // module.stride[dim]
            + 1
            for dim in (0, 1)
        ]

        def place(out: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
            row, column = (
                out[dim] * module.stride[dim] + kernel[dim] * module.dilation[dim] - sides_of(module, dim)[0]
                for dim in (0, 1)
            )
            return row, column

        rows = torch.tensor(
            [
                [
                    [
                        pixel(x, group * per_group + channel, place((i, j), (ki, kj)), module.padding_mode)
                        for channel in range(per_group)
                        for ki in range(module.kernel_size[0])
                        for kj in range(module.kernel_size[1])
                    ]
                    for group in range(module.groups)
                ]
                for i in range(counts[0])
                for j in range(counts[1])
            ],
            dtype=torch.float64,
        )
    if module.bias is None:
        return rows
    return torch.cat([rows, torch.ones(*rows.shape[:2], 1, dtype=rows.dtype)], dim=-1)


def gradients_of_sample(module: nn.Module, output_gradient: Tensor) -> Tensor:
    """Return [positions, groups, g_dim]."""
    if isinstance(module, nn.Conv2d):
        return output_gradient.flatten(1).T.reshape(-1, module.groups, module.out_channels // module.groups)
    return output_gradient.reshape(-1, 1, output_gradient.shape[-1])


@dataclass
class Reference:
    """A layer in float64, what it was called with, and what each sample by itself has to do with it."""

    module: nn.Module
    input: Tensor
    raw: Tensor  # gradient of the mean loss with respect to the output
    rows: list[Tensor]
    own: list[Tensor]  # gradients of each sample's own loss
    weight_gradients: list[dict[str, Tensor]]

    def factors(self, sharing: WeightSharing) -> tuple[Tensor, Tensor]:
        """Return A and G from the definition, one outer product after the other."""
        n, s = len(self.rows), len(self.rows[0])
        conv = isinstance(self.module, nn.Conv2d)
        if sharing == "reduce":
            a = [rows.mean(0) for rows in self.rows]
            g = [own.sum(0) for own in self.own]
            return outer_sum(a) / n, outer_sum(g) / n
        a = [row for rows in self.rows for row in rows]
        g = [row for own in self.own for row in own]
        if sharing == "expand":
            return outer_sum(a) / len(a), outer_sum(g) / n
        if conv:
            a, g = [row / s for row in a], [row / s for row in g]
        return outer_sum(a) / len(a), outer_sum([row / n for row in g]) / len(g)


def outer_sum(rows: list[Tensor]) -> Tensor:
    total = torch.zeros(*rows[0].shape, rows[0].shape[-1], dtype=torch.float64)
    for row in rows:
        for group, values in enumerate(row):
            total[group] += torch.outer(values, values)
    return total


def reference_of(case: Case) -> Reference:
    torch.manual_seed(0)
    module = case.make().double()
    x = torch.randn(case.input, dtype=torch.float64)
    samples = [x] if case.unbatched else list(x)
    coefficients = [torch.randn_like(module(sample)) for sample in samples]

    def loss(output: Tensor, which: int) -> Tensor:
        return (coefficients[which] * output.sin()).sum()

    own, weight_gradients = [], []
    for which, sample in enumerate(samples):
        output = module(sample)
        names = [name for name, _ in module.named_parameters()]
        gradients = torch.autograd.grad(loss(output, which), [output, *module.parameters()])
        own.append(gradients_of_sample(module, gradients[0]))
        weight_gradients.append(dict(zip(names, gradients[1:], strict=True)))
    called_with = x.to(memory_format=torch.channels_last) if case.channels_last else x
    output = module(called_with)
    outputs = [output] if case.unbatched else list(output)
    mean = torch.stack([loss(o, i) for i, o in enumerate(outputs)]).mean()
    (raw,) = torch.autograd.grad(mean, output)
    rows = [rows_of_sample(module, sample).detach() for sample in samples]
    return Reference(module, called_with, raw, rows, own, weight_gradients)


def shape_of(module: nn.Module) -> LayerShape:
    shape = layer_shape(module)
    assert shape is not None
    return shape


@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients_make_up_the_gradient_of_the_weight(name: str) -> None:
    reference = reference_of(CASES[name])
    shape = shape_of(reference.module)
    for rows, own, expected in zip(reference.rows, reference.own, reference.weight_gradients, strict=True):
        summed = torch.einsum("sgi,sgj->gij", own, rows)
        matrix = gradient_matrix(shape, expected["weight"], expected.get("bias"))
        torch.testing.assert_close(matrix, summed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", CASES)
def test_factors_are_the_sums_of_their_definition(
    name: str, sharing: WeightSharing, dtype: torch.dtype
) -> None:
    reference = reference_of(CASES[name])
    module = reference.module
    shape = shape_of(module)
    a = input_columns(module, shape, reference.input.to(dtype).requires_grad_(), sharing).factor()
    g = output_columns(module, shape, reference.raw.to(dtype), sharing).factor()
    assert a.shape == (shape.groups, shape.a_dim, shape.a_dim)
    assert g.shape == (shape.groups, shape.g_dim, shape.g_dim)
    for got, expected in zip((a, g), reference.factors(sharing), strict=True):
        assert got.dtype == dtype
        assert not got.requires_grad
        assert torch.equal(got, got.mT)
        scale = expected.abs().max().item()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", ["conv", "stride, padding", "groups"])
def test_unfolding_in_parts_and_multiplying_in_strips_gives_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(CASES[name])
    shape = shape_of(reference.module)
    whole = input_columns(reference.module, shape, reference.input, "expand").factor()
    monkeypatch.setattr(factors_module, "_CHUNK_NUMEL", 200)
    monkeypatch.setattr(factors_module, "_GRAM_STRIP", 4)
    parts = input_columns(reference.module, shape, reference.input, "expand").factor()
    torch.testing.assert_close(parts, whole)
    assert torch.equal(parts, parts.mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear, a sequence", "groups"])
def test_factors_of_half_precision_are_float32_also_under_autocast(name: str, dtype: torch.dtype) -> None:
    reference = reference_of(CASES[name])
    shape = shape_of(reference.module)
    x, raw = reference.input.to(dtype), reference.raw.to(dtype)
    plain = (
        input_columns(reference.module, shape, x.float(), "expand").factor(),
        output_columns(reference.module, shape, raw.float(), "expand").factor(),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = input_columns(reference.module, shape, x, "expand").factor()
        g = output_columns(reference.module, shape, raw, "expand").factor()
    assert a.dtype == g.dtype == torch.float32
    assert torch.equal(a, plain[0])
    assert torch.equal(g, plain[1])


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    ("module", "input", "output"),
    [
        (nn.Linear(3, 2), (0, 3), (0, 2)),
        (nn.Linear(3, 2), (2, 0, 3), (2, 0, 2)),
        (nn.Conv2d(2, 4, 3, groups=2), (0, 2, 5, 5), (0, 4, 3, 3)),
    ],
)
def test_an_empty_batch_gives_finite_factors(
    module: nn.Module, input: tuple[int, ...], output: tuple[int, ...], sharing: WeightSharing
) -> None:
    shape = shape_of(module)
    a = input_columns(module, shape, torch.zeros(input), sharing).factor()
    g = output_columns(module, shape, torch.zeros(output), sharing).factor()
    assert a.isfinite().all()
    assert not g.any()


class Renamed(nn.Linear):
    """A subclass that computes the same."""


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OtherConv(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


def frozen(module: nn.Module, name: str) -> nn.Module:
    getattr(module, name).requires_grad_(False)
    return module


def patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


SHAPES: dict[str, tuple[Callable[[], nn.Module], LayerShape | None]] = {
    "linear": (lambda: nn.Linear(5, 3), LayerShape(1, 6, 3, True)),
    "no bias": (lambda: nn.Linear(5, 3, bias=False), LayerShape(1, 5, 3, False)),
    "frozen bias": (lambda: frozen(nn.Linear(5, 3), "bias"), LayerShape(1, 5, 3, False)),
    "conv": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2), LayerShape(2, 13, 3, True)),
    "subclass": (lambda: Renamed(5, 3), LayerShape(1, 6, 3, True)),
    "frozen": (lambda: frozen(nn.Linear(5, 3), "weight"), None),
    "other forward": (lambda: Doubled(5, 3), None),
    "other convolution": (lambda: OtherConv(2, 2, 1), None),
    "patched": (patched, None),
    "lazy": (lambda: nn.LazyLinear(3), None),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), None),
    "pruned": (lambda: prune.identity(nn.Linear(2, 2), "weight"), None),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), None),
    "attention": (lambda: nn.MultiheadAttention(4, 2).out_proj, None),
    "transposed": (lambda: nn.ConvTranspose2d(2, 2, 1), None),
    "conv1d": (lambda: nn.Conv1d(2, 2, 1), None),
    "norm": (lambda: nn.LayerNorm(3), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of_a_layer(name: str) -> None:
    make, expected = SHAPES[name]
    assert layer_shape(make()) == expected


def test_a_lazy_layer_has_a_shape_once_it_has_run() -> None:
    lazy = nn.LazyLinear(3)
    lazy(torch.zeros(1, 4))
    assert layer_shape(lazy) == LayerShape(1, 5, 3, True)


def symmetric(groups: int, size: int) -> Tensor:
    torch.manual_seed(size)
    upper = torch.randn(groups, size, size).triu()
    return upper + upper.triu(1).mT


@pytest.mark.parametrize("groups", [1, 3])
def test_triangles_survive_packing(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors_module, "_PACK_BLOCK", 16)
    for size in range(1, 71):
        factor = symmetric(groups, size)
        flat = torch.full((groups * size * (size + 1) // 2,), torch.nan)
        pack_triangle(factor, flat)
        assert torch.equal(unpack_triangle(flat, groups, size), factor)
        assert torch.equal(flat.sort().values, factor[torch.ones_like(factor).triu().bool()].sort().values)


@given(groups=st.integers(1, 4), size=st.integers(1, 300), gap=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_triangles_survive_packing_into_a_part_of_a_buffer(groups: int, size: int, gap: int) -> None:
    factor, numel = symmetric(groups, size), groups * size * (size + 1) // 2
    buffer = torch.full((numel + 2 * gap,), torch.nan)
    pack_triangle(factor, buffer[gap : gap + numel])
    assert buffer[:gap].isnan().all()
    assert buffer[gap + numel :].isnan().all()
    assert torch.equal(unpack_triangle(buffer[gap : gap + numel], groups, size), factor)


@pytest.mark.parametrize("start", ["batch", "identity"])
def test_running_mean_keeps_the_decay_of_the_old(start: Literal["batch", "identity"]) -> None:
    batches = [symmetric(2, 4) * (step + 1) for step in range(3)]
    running = None
    expected = batches[0].clone() if start == "batch" else torch.eye(4).expand(2, 4, 4)
    for step, batch in enumerate(batches):
        before = running
        running = update_running(running, batch.clone(), 0.9, start=start)
        assert before is None or running is before
        if step or start == "identity":
            expected = 0.9 * expected + 0.1 * batch
        torch.testing.assert_close(running, expected)


@pytest.mark.parametrize("name", ["linear", "linear without bias", "groups", "channels last"])
def test_a_gradient_split_again_is_what_it_was(name: str) -> None:
    module = CASES[name].make()
    if CASES[name].channels_last:
        module = module.to(memory_format=torch.channels_last)
    shape = shape_of(module)
    gradients = {key: torch.randn_like(parameter) for key, parameter in module.named_parameters()}
    matrix = gradient_matrix(shape, gradients["weight"], gradients.get("bias"))
    assert matrix.shape == (shape.groups, shape.g_dim, shape.a_dim)
    out = {key: torch.zeros_like(value) for key, value in copy.deepcopy(gradients).items()}
    split_gradient(shape, matrix, out["weight"], out.get("bias"))
    assert all(torch.equal(out[key], gradients[key]) for key in gradients)


def test_a_frozen_bias_is_no_column() -> None:
    matrix = torch.randn(1, 3, 5)
    out, bias = torch.zeros(3, 5), torch.zeros(3)
    split_gradient(LayerShape(1, 5, 3, False), matrix, out, bias)
    assert torch.equal(out, matrix[0])
    assert not bias.any()
