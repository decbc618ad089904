"""Spread layers against the owner's own product: the same direction, the same clip, whoever has which rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossover_ddp._kfac.curvature import DampedInverse
from crossover_ddp._kfac.layers import LayerShape
from crossover_ddp._kfac.spread import SpreadSolver, rounding, rows_of, sides, spread_numel

RELATIVE = 1e-10  # in float64


def factor(dim: int, generator: torch.Generator, rank: int = 0) -> Tensor:
    columns = torch.randn(1, dim, rank or dim, generator=generator, dtype=torch.float64)
    return columns @ columns.mT / dim


def made(shape: LayerShape, seed: int, damping: float = 0.03) -> tuple[DampedInverse, Tensor]:
    """Return a solver and a gradient, [1, g, a]."""
    generator = torch.Generator().manual_seed(seed)
    a, g = factor(shape.a_dim, generator), factor(shape.g_dim, generator)
    solver = DampedInverse.compute(a, g, damping, pi=True)
    assert solver is not None
    return solver, torch.randn(1, shape.g_dim, shape.a_dim, generator=generator, dtype=torch.float64)


shapes = st.builds(LayerShape, st.just(1), st.integers(1, 90), st.integers(1, 90), has_bias=st.just(False))


@settings(max_examples=25, deadline=None)
@given(shape=shapes, world_size=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_of_all_ranks_make_the_owners_direction(shape: LayerShape, world_size: int, seed: int) -> None:
    solver, gradient = made(shape, seed)
    expected = solver.precondition(gradient)[0]
    of_owner = SpreadSolver.of(solver.a_inverse, solver.g_inverse, shape)
    packed = torch.full((spread_numel(shape),), float("nan"), dtype=torch.float64)
    of_owner.pack(packed)
    spread = SpreadSolver.unpack(packed, shape)  # what all have
    assert spread is not None
    assert torch.equal(spread.root, of_owner.root)
    torch.testing.assert_close(spread.right, of_owner.right, rtol=1e-14, atol=0)
    assert SpreadSolver.unpack(torch.zeros_like(packed), shape) is None
    made_rows, clip = [], 0.0
    for rows in rows_of(shape, world_size):
        turned = gradient.new_empty(rows.numel, sides(shape)[1])
        spread.before(gradient[0], rows, turned)
        of_rank = turned @ spread.right
        clip += float((of_rank * turned).sum())
        made_rows.append(of_rank)
    direction = spread.after(made_rows)
    scale = float(expected.abs().max())
    torch.testing.assert_close(direction, expected, rtol=0, atol=RELATIVE * scale)
    assert clip == pytest.approx(float((expected * gradient[0]).sum()), rel=1e-8, abs=1e-12)


def test_an_inverse_that_rounding_left_without_a_root_has_the_nearest() -> None:
    shape = LayerShape(1, 60, 40, has_bias=False)
    solver, _ = made(shape, 2)
    values, vectors = torch.linalg.eigh(solver.g_inverse[0])
    values[:3] = torch.tensor([-1e-12, 0.0, 1e-13])
    broken = (vectors * values) @ vectors.mT
    assert int(torch.linalg.cholesky_ex(broken).info) != 0
    root = SpreadSolver.of(solver.a_inverse, broken.unsqueeze(0), shape).root
    torch.testing.assert_close(root.mT @ root, broken, rtol=0, atol=1e-10 * float(values.max()))


def test_roundings_are_told_apart() -> None:
    shapes = [LayerShape(1, 64, 200, False), LayerShape(1, 200, 64, False)]
    cpu = torch.device("cpu")
    assert rounding(shapes, cpu) == rounding(shapes[:1], cpu)
    assert rounding(shapes, cpu) != rounding([LayerShape(1, 65, 200, False)], cpu)
    seen = torch.get_rng_state()
    rounding(shapes, cpu)
    assert torch.equal(torch.get_rng_state(), seen)
