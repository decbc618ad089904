"""Factors of every kind of layer equal sums written from the definition, by position, in float64.

Both solvers also solve degenerate factors. tests/multiprocess/test_kfac.py compares solvers with
dense algebra on usual factors.
"""

import itertools
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from crossover_ddp._kfac import curvature as curvature_module
from crossover_ddp._kfac.curvature import (
    SOLVERS,
    DampedInverse,
    Eigenbasis,
    Solver,
    SpreadSolver,
    WeightSharing,
    input_columns,
    output_columns,
    rounding,
)
from crossover_ddp._kfac.layers import LayerShape, find_layers, layer_shape
from tests.harness.training import default_dtype
from tests.multiprocess.kfac_oracle import direction, factors_of_rows, input_rows, output_rows

# An even kernel with "same" is the one case of unequal sides. torch warns that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

SHARINGS: tuple[WeightSharing, ...] = ("expand", "reduce", "kfac-pytorch")


# A function that makes a layer, and the size of its input.
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "linear, a sequence": (lambda: nn.Linear(5, 3), (4, 6, 5)),
    "linear, two more dimensions": (lambda: nn.Linear(5, 3, bias=False), (2, 3, 4, 5)),
    "linear, one sample": (lambda: nn.Linear(5, 3), (5,)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), (4, 2, 5, 6)),
    "conv without bias": (lambda: nn.Conv2d(2, 3, (3, 2), bias=False), (3, 2, 5, 6)),
    "stride, padding": (lambda: nn.Conv2d(2, 3, 3, stride=(2, 3), padding=(1, 2)), (3, 2, 6, 7)),
    "dilation": (lambda: nn.Conv2d(2, 3, (3, 2), dilation=(2, 3), padding=1), (3, 2, 7, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 5, 4)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1), (2, 3, 4, 5)),
    "same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), (2, 2, 5, 5)),
    "valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 5, 5)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), (2, 2, 5, 5)),
    "replicate": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 2, 4, 5)),
    "circular": (
        lambda: nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="circular"),
        (2, 2, 4, 5),
    ),
    "1x1": (lambda: nn.Conv2d(4, 3, 1), (3, 4, 3, 3)),
    "1x1 with stride and groups": (lambda: nn.Conv2d(4, 2, 1, stride=2, groups=2), (3, 4, 4, 3)),
    "conv, one sample": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 5)),
}


def called(name: str) -> tuple[nn.Module, Tensor, Tensor, Tensor, bool]:
    """Return a layer in float64, its input, and gradients of the mean loss.

    The gradients are those of its output, and of weight and bias as a matrix. The last element is
    whether the input is one sample without a dimension for samples.
    """
    torch.manual_seed(0)
    make, size = CASES[name]
    module = make().double()
    x = torch.randn(size, dtype=torch.float64)
    output = module(x)
    unbatched = name.endswith("one sample")
    loss = (torch.randn_like(output) * output.sin()).sum() / (1 if unbatched else len(x))
    y, *gradients = torch.autograd.grad(loss, [output, *module.parameters()])
    return module, x, y, curvature_module.gradient_matrix(shape_of(module), *gradients), unbatched


def factors_of(
    module: nn.Module, a: Tensor, g: Tensor, sharing: WeightSharing
) -> tuple[Tensor, Tensor]:
    """Return both factors from [samples, positions, groups, features] of each sample's own loss."""
    if sharing != "kfac-pytorch":
        return factors_of_rows(a, g, sharing)
    # Plain means over samples and positions.
    samples, positions = a.shape[:2]
    share = positions if isinstance(module, nn.Conv2d) else 1
    a, g = factors_of_rows(a / share, g / share, "expand")
    return a, g / (samples**2 * positions)


def shape_of(module: nn.Module) -> LayerShape:
    shape = layer_shape(module)
    assert shape is not None
    return shape


@pytest.mark.parametrize("name", CASES)
def test_factors_are_the_sums_of_their_definition(name: str) -> None:
    module, x, y, matrix, unbatched = called(name)
    shape = shape_of(module)
    inputs, outputs = (each.unsqueeze(0) if unbatched else each for each in (x, y))
    rows, own = input_rows(module, inputs), output_rows(module, outputs) * len(inputs)
    summed = torch.einsum("nsgi,nsgj->gij", own, rows) / len(rows)
    torch.testing.assert_close(
        matrix, summed, msg="rows and gradients make up the weight's gradient"
    )
    for sharing in SHARINGS:
        a = input_columns(module, shape, x.requires_grad_(), sharing).factor()
        g = output_columns(module, shape, y, sharing).factor()
        assert a.shape == (shape.groups, shape.a_dim, shape.a_dim)
        assert g.shape == (shape.groups, shape.g_dim, shape.g_dim)
        for got, expected in zip((a, g), factors_of(module, rows, own, sharing), strict=True):
            assert not got.requires_grad
            assert torch.equal(got, got.mT)
            torch.testing.assert_close(
                got, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item()
            )


@pytest.mark.parametrize("name", ["conv", "stride, padding", "groups"])
def test_unfolding_and_multiplying_in_parts_does_not_change_the_factor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x, *_ = called(name)
    columns = input_columns(module, shape_of(module), x, "expand")
    whole = columns.factor()
    monkeypatch.setattr(curvature_module, "_CHUNK_NUMEL", 200)
    monkeypatch.setattr(curvature_module, "_GRAM_STRIP", 4)
    parts = columns.factor()
    torch.testing.assert_close(parts, whole)
    assert torch.equal(parts, parts.mT)


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (nn.Linear(3, 2), (0, 3)),
        (nn.Linear(3, 2), (2, 0, 3)),
        (nn.Conv2d(2, 4, 3, groups=2), (0, 2, 5, 5)),
    ],
)
def test_an_empty_batch_gives_finite_factors(module: nn.Module, size: tuple[int, ...]) -> None:
    shape, inputs = shape_of(module), torch.zeros(size)
    for sharing in SHARINGS:
        assert input_columns(module, shape, inputs, sharing).factor().isfinite().all()
        assert not output_columns(module, shape, module(inputs), sharing).factor().any()


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OtherConv(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


def patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


SHAPES: dict[str, tuple[Callable[[], nn.Module], LayerShape | None]] = {
    "linear": (lambda: nn.Linear(5, 3), LayerShape(1, 6, 3, True)),
    "no bias": (lambda: nn.Linear(5, 3, bias=False), LayerShape(1, 5, 3, False)),
    "conv": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2), LayerShape(2, 13, 3, True)),
    "subclass": (lambda: type("Renamed", (nn.Linear,), {})(5, 3), LayerShape(1, 6, 3, True)),
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


def test_layers_that_compute_the_same_as_their_class_are_found_and_no_others() -> None:
    layers, others = find_layers(
        nn.ModuleDict({name: make() for name, (make, _) in SHAPES.items()})
    )
    expected = {name: shape for name, (_, shape) in SHAPES.items() if shape}
    assert {layer.name: layer.shape for layer in layers} == expected
    reasons = {others[f"{name}.weight"] for name in ("other forward", "patched", "norm")}
    assert reasons == {"not Linear or Conv2d"}


def test_a_running_mean_may_begin_with_the_identity() -> None:
    """A mean that begins with a batch is tested in tests/multiprocess/test_kfac.py."""
    batch = torch.randn(2, 4, 4)
    got = curvature_module.update_running(None, batch.clone(), 0.9, start="identity")
    torch.testing.assert_close(got, 0.9 * torch.eye(4) + 0.1 * batch)


def random_factor(seed: int, groups: int, size: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(groups, size, rank or 2 * size, generator=generator, dtype=torch.float64)
    return rows @ rows.mT / rows.shape[-1]


def random_gradient(seed: int, groups: int, g: int, a: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(groups, g, a, generator=generator, dtype=torch.float64)


SIZE = 12
RANK_1 = random_factor(3, 1, SIZE, rank=1).float()
ALIVE = torch.arange(SIZE) % 3 == 0
DEAD = random_factor(4, 1, SIZE).float() * ALIVE * ALIVE.unsqueeze(-1)
STRANGE = {
    "zeros": torch.zeros(1, SIZE, SIZE),
    "rank 1": RANK_1,
    "constant inputs": torch.ones(1, SIZE, SIZE),
    "dead units": DEAD,
    "tiny": RANK_1 * 1e-30,
    "huge": RANK_1 * 1e30,
    "largest": torch.full((1, SIZE, SIZE), torch.finfo(torch.float32).max),
    "smallest": torch.full((1, SIZE, SIZE), torch.finfo(torch.float32).tiny),
    "huge beside tiny": torch.diag_embed(torch.logspace(-30, 30, SIZE)).unsqueeze(0),
    "indefinite": -10 * torch.eye(SIZE).unsqueeze(0),
    "well": random_factor(5, 1, SIZE).float(),
}


@pytest.mark.parametrize("a", STRANGE)
@pytest.mark.parametrize("solver", SOLVERS.values())
def test_degenerate_factors_give_finite_directions(solver: type[Solver], a: str) -> None:
    gradient = random_gradient(0, 1, SIZE, SIZE).float()
    for g, pi, damping in itertools.product(STRANGE, (True, False), (1e-8, 0.003)):
        made = solver.compute(STRANGE[a], STRANGE[g], damping, pi=pi)
        assert made.precondition(gradient).isfinite().all(), (g, pi, damping)


def test_only_a_group_that_cannot_be_inverted_is_damped_further_and_counted() -> None:
    a, g = random_factor(0, 3, 4).float(), random_factor(1, 3, 2).float()
    a[1] = -0.05 * torch.eye(4)
    made = DampedInverse.compute(a, g, 1e-4, pi=False)
    assert made.strained == 1  # 0.01 is not enough, ten times that is
    torch.testing.assert_close(made.a_inverse[1], torch.eye(4) / 0.05)
    for group in (0, 2):
        expected = torch.linalg.inv(a[group] + 0.01 * torch.eye(4))
        torch.testing.assert_close(made.a_inverse[group], expected, rtol=1e-3, atol=1e-3)
    hopeless = torch.tensor([[[1.0, -1e25], [-1e25, 2.0]]])
    made = DampedInverse.compute(hopeless, torch.eye(2).unsqueeze(0), 0.01, pi=False)
    assert made.strained == 9
    assert torch.equal(made.a_inverse[0], torch.diag(made.a_inverse[0].diagonal())), (
        "taken for its diagonal"
    )
    assert made.a_inverse[0].diagonal().gt(0).all()


class FailingEigh:
    """Fails the first calls as LAPACK does, by an error or by NaN."""

    def __init__(self, failures: int, *, raising: bool) -> None:
        self.failures = failures
        self.raising = raising
        self.eigh = torch.linalg.eigh

    def __call__(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = self.eigh(factor)
        # The second group is the bad one, unless it is a diagonal.
        if self.failures and float(factor[-1, 0, 0]) >= 100 and float(factor[-1, 0, 1]):
            self.failures -= 1
            if self.raising:
                raise torch.linalg.LinAlgError("did not converge")
            values[-1], vectors[-1] = math.nan, math.nan
        return values, vectors


@pytest.mark.parametrize(
    ("failures", "raising", "strained"), [(3, True, 2), (3, False, 3), (1000, True, 9)]
)
def test_a_failing_eigenvalue_problem_is_damped_further_and_finally_replaced_by_its_diagonal(
    failures: int, raising: bool, strained: int
) -> None:
    a, g, gradient = random_factor(0, 2, 4), random_factor(1, 2, 3), random_gradient(0, 2, 3, 4)
    a[1] += 100 * torch.eye(4)
    with mock.patch.object(torch.linalg, "eigh", FailingEigh(failures, raising=raising)):
        made = Eigenbasis.compute(a, g, 0.1, pi=False)
    assert made.strained == strained
    got, expected = made.precondition(gradient), direction("eigen", gradient, a, g, 0.1)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(
        got[1], expected[1], rtol=0.2, atol=0.1 * float(expected[1].abs().max())
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_without_a_trace_pi_is_one(zero: int) -> None:
    factors = [random_factor(0, 1, 4), random_factor(1, 1, 3)]
    gradient = random_gradient(0, 1, 3, 4)
    factors[zero] *= 0
    got = DampedInverse.compute(*factors, 0.01, pi=True).precondition(gradient)
    torch.testing.assert_close(got, direction("inverse", gradient, *factors, 0.01, pi=False))


def test_an_inverse_that_rounding_has_made_indefinite_has_the_root_of_the_nearest() -> None:
    columns = torch.randn(40, 80, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(columns @ columns.mT)
    values[:3] = torch.tensor([-1e-12, 0.0, 1e-13])
    broken = (vectors * values) @ vectors.mT
    assert int(torch.linalg.cholesky_ex(broken).info) != 0
    larger = torch.eye(60, dtype=torch.float64)
    root = SpreadSolver.of(
        larger.unsqueeze(0), broken.unsqueeze(0), LayerShape(1, 60, 40, False)
    ).root
    torch.testing.assert_close(root.mT @ root, broken, rtol=0, atol=1e-10 * float(values.max()))


def test_roundings_of_other_sizes_differ_and_the_random_state_stays() -> None:
    shapes = [LayerShape(1, 64, 200, False), LayerShape(1, 200, 64, False)]
    cpu, seen = torch.device("cpu"), torch.get_rng_state()
    assert rounding(shapes, cpu) == rounding(shapes[:1], cpu)
    assert rounding(shapes, cpu) != rounding([LayerShape(1, 65, 200, False)], cpu)
    assert torch.equal(torch.get_rng_state(), seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_roundings_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    shapes, cpu = [LayerShape(1, 5, 7, False)], torch.device("cpu")
    usual = rounding(shapes, cpu)
    with default_dtype(dtype):
        assert rounding(shapes, cpu) == usual
