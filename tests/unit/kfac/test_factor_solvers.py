"""Both solvers with factors that no solver likes; against dense algebra on others: tests/multiprocess/test_kfac.py."""

import itertools
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from crossover_ddp._kfac.curvature import SOLVERS as BY_NAME
from crossover_ddp._kfac.curvature import DampedInverse, Eigenbasis, Solver
from crossover_ddp._kfac.layers import LayerShape
from crossover_ddp._kfac.spread import SpreadSolver, rounding
from tests.multiprocess.kfac_oracle import direction

SOLVERS: tuple[type[Solver], ...] = tuple(BY_NAME.values())


def factor_of(seed: int, groups: int, size: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(groups, size, rank or 2 * size, generator=generator, dtype=torch.float64)
    return rows @ rows.mT / rows.shape[-1]


def gradient_of(seed: int, groups: int, g: int, a: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(groups, g, a, generator=generator, dtype=torch.float64)


SIZE = 12
RANK_1 = factor_of(3, 1, SIZE, rank=1).float()
ALIVE = torch.arange(SIZE) % 3 == 0
DEAD = factor_of(4, 1, SIZE).float() * ALIVE * ALIVE.unsqueeze(-1)
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
    "well": factor_of(5, 1, SIZE).float(),
}


@pytest.mark.parametrize("a", STRANGE)
@pytest.mark.parametrize("solver", SOLVERS)
def test_strange_factors_give_finite_steps(solver: type[Solver], a: str) -> None:
    gradient = gradient_of(0, 1, SIZE, SIZE).float()
    for g, pi, damping in itertools.product(STRANGE, (True, False), (1e-8, 0.003)):
        made = solver.compute(STRANGE[a], STRANGE[g], damping, pi=pi)
        assert made.precondition(gradient).isfinite().all(), (g, pi, damping)


def test_a_group_that_fails_is_damped_further_and_counted_the_others_are_not() -> None:
    a, g = factor_of(0, 3, 4).float(), factor_of(1, 3, 2).float()
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
    assert torch.equal(made.a_inverse[0], torch.diag(made.a_inverse[0].diagonal())), "taken for its diagonal"
    assert made.a_inverse[0].diagonal().gt(0).all()


class FailingEigh:
    """Fails the first calls as LAPACK does, by an error or by numbers that are none."""

    def __init__(self, failures: int, *, raising: bool) -> None:
        self.failures, self.raising, self.eigh = failures, raising, torch.linalg.eigh

    def __call__(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = self.eigh(factor)
        # The second group is the bad one, unless it is a diagonal.
        if self.failures and float(factor[-1, 0, 0]) >= 100 and float(factor[-1, 0, 1]):
            self.failures -= 1
            if self.raising:
                raise torch.linalg.LinAlgError("did not converge")
            values[-1], vectors[-1] = math.nan, math.nan
        return values, vectors


@pytest.mark.parametrize(("failures", "raising", "strained"), [(3, True, 2), (3, False, 3), (1000, True, 9)])
def test_a_failing_eigenvalue_problem_is_damped_further(failures: int, raising: bool, strained: int) -> None:
    """And is diagonal at last."""
    a, g, gradient = factor_of(0, 2, 4), factor_of(1, 2, 3), gradient_of(0, 2, 3, 4)
    a[1] += 100 * torch.eye(4)
    with mock.patch.object(torch.linalg, "eigh", FailingEigh(failures, raising=raising)):
        made = Eigenbasis.compute(a, g, 0.1, pi=False)
    assert made.strained == strained
    got, expected = made.precondition(gradient), direction("eigen", gradient, a, g, 0.1)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=0.2, atol=0.1 * float(expected[1].abs().max()))


@pytest.mark.parametrize("zero", [0, 1])
def test_without_a_trace_pi_is_one(zero: int) -> None:
    factors, gradient = [factor_of(0, 1, 4), factor_of(1, 1, 3)], gradient_of(0, 1, 3, 4)
    factors[zero] *= 0
    got = DampedInverse.compute(*factors, 0.01, pi=True).precondition(gradient)
    torch.testing.assert_close(got, direction("inverse", gradient, *factors, 0.01, pi=False))


def test_an_inverse_that_rounding_left_without_a_root_has_the_nearest() -> None:
    columns = torch.randn(40, 80, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(columns @ columns.mT)
    values[:3] = torch.tensor([-1e-12, 0.0, 1e-13])
    broken = (vectors * values) @ vectors.mT
    assert int(torch.linalg.cholesky_ex(broken).info) != 0
    larger = torch.eye(60, dtype=torch.float64)
    root = SpreadSolver.of(larger.unsqueeze(0), broken.unsqueeze(0), LayerShape(1, 60, 40, False)).root
    torch.testing.assert_close(root.mT @ root, broken, rtol=0, atol=1e-10 * float(values.max()))


def test_roundings_are_told_apart() -> None:
    shapes = [LayerShape(1, 64, 200, False), LayerShape(1, 200, 64, False)]
    cpu, seen = torch.device("cpu"), torch.get_rng_state()
    assert rounding(shapes, cpu) == rounding(shapes[:1], cpu)
    assert rounding(shapes, cpu) != rounding([LayerShape(1, 65, 200, False)], cpu)
    assert torch.equal(torch.get_rng_state(), seen)
