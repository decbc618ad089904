"""What real ranks seldom meet of spread layers."""

import torch

from crossover_ddp._kfac.layers import LayerShape
from crossover_ddp._kfac.spread import SpreadSolver, rounding


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
    cpu = torch.device("cpu")
    assert rounding(shapes, cpu) == rounding(shapes[:1], cpu)
    assert rounding(shapes, cpu) != rounding([LayerShape(1, 65, 200, False)], cpu)
    seen = torch.get_rng_state()
    rounding(shapes, cpu)
    assert torch.equal(torch.get_rng_state(), seen)
