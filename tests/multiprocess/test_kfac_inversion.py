"""Who makes solvers and when: each rank its own only, in the steps in which they are due."""

import itertools
from typing import Any

import pytest
import torch

from crossover_ddp._kfac.factors import DampedInverse, Eigenbasis
from tests.harness import run_ranks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp

WIDTHS = (WIDTH, 7, 9, 11, 13, OUTPUTS)  # no two layers alike
SIZES = [(inputs + 1, outputs) for inputs, outputs in itertools.pairwise(WIDTHS)]


def made_of_rank(rank: int, world_size: int, solver: str) -> tuple[list[list[tuple[int, int]]], list[Any]]:
    """Return for each step the sizes of what this rank inverted, and the sizes of its own layers."""
    chosen = {"inverse": DampedInverse, "eigen": Eigenbasis}[solver]
    compute = chosen.compute
    made: list[list[tuple[int, int]]] = []

    def counted(a: torch.Tensor, g: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        made[-1].append((a.shape[-1], g.shape[-1]))
        return compute(a, g, *arguments, **options)

    training = Training(rank, mlp(*WIDTHS), solver=solver, inv_update_steps=3)
    own = [size for size, owner in zip(SIZES, training.owners, strict=True) if owner == rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen, "compute", staticmethod(counted))
        for _ in range(7):
            made.append([])
            training.step()
    return made, own


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_each_rank_makes_solvers_of_its_own_layers_only(solver: str, world_size: int) -> None:
    everybodys = []
    for made, own in run_ranks(made_of_rank, world_size, args=(solver,)):
        assert own, "more layers than ranks"
        for step, of_step in enumerate(made):
            assert sorted(of_step) == (sorted(own) if step % 3 == 0 else [])
        everybodys += own
    assert sorted(everybodys) == sorted(SIZES)
