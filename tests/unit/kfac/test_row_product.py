"""Rows of a layer's gradient are multiplied as they come: the same bits in whatever pieces they came."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._kfac.columns import LayerShape
from crossover_ddp._kfac.factors import (
    DampedInverse,
    Eigenbasis,
    Solver,
    gradient_matrix,
    precondition,
)
from crossover_ddp._kfac.row_product import RowProduct, block_rows, goes_by_rows


def solver_of(kind: type[Solver], shape: LayerShape) -> Solver:
    torch.manual_seed(1)
    columns = [torch.randn(1, dim, 2 * dim) for dim in (shape.a_dim, shape.g_dim)]
    a, g = (each @ each.mT / each.shape[-1] for each in columns)
    made = kind.compute(a, g, 0.1, pi=True)
    assert made is not None
    return made


def flat_gradient(shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return weight and bias as they lie in an owner's part, one behind the other."""
    torch.manual_seed(2)
    flat = torch.randn(shape.g_dim * shape.a_dim)
    weight_numel = shape.g_dim * (shape.a_dim - shape.has_bias)
    return flat, flat[:weight_numel].view(shape.g_dim, -1), flat[weight_numel:] if shape.has_bias else None


SHAPES = st.builds(
    LayerShape,
    groups=st.just(1),
    a_dim=st.integers(2, 400),
    g_dim=st.integers(2, 300),
    has_bias=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(
    shape=SHAPES, kind=st.sampled_from([DampedInverse, Eigenbasis]), cuts=st.lists(st.integers(0, 130_000))
)
def test_pieces_change_no_bit_and_give_the_same_as_the_whole(
    shape: LayerShape, kind: type[Solver], cuts: list[int]
) -> None:
    solver = solver_of(kind, shape)
    flat, weight, bias = flat_gradient(shape)
    at_once = torch.cat([values for _, values in RowProduct(shape, solver, weight, bias).results()])
    there = torch.full_like(flat, float("nan"))  # not arrived yet
    later_weight = there[: weight.numel()].view_as(weight)
    product = RowProduct(shape, solver, later_weight, None if bias is None else there[weight.numel() :])
    for cut in sorted(cuts):
        there[:cut] = flat[:cut]
        product.advance(cut)
    there.copy_(flat)
    places, values = zip(*product.results(), strict=True)
    assert torch.equal(torch.cat(values), at_once)
    assert [each.start for each in places] == [0, *(each.stop for each in places[:-1])]
    expected = precondition(solver, gradient_matrix(shape, weight, bias))[0]
    torch.testing.assert_close(at_once, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (LayerShape(1, 1121, 155, True), True),
        (LayerShape(1, 512, 512, False), True),
        (LayerShape(4, 1121, 155, True), False),  # groups
        (LayerShape(1, 4096, 10, True), False),  # too few rows to be worth it
        (LayerShape(1, 65, 64, True), False),  # small
    ],
)
def test_large_layers_without_groups_go_by_rows(shape: LayerShape, expected: bool) -> None:
    assert goes_by_rows(shape) == expected
    if expected:
        assert shape.g_dim > block_rows(shape)
