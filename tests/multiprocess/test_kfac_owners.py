"""Each rank makes solvers of its own layers only, in the steps in which they are due, and keeps nothing else."""

import itertools
from typing import Any

import pytest
import torch

from crossover_ddp._kfac.curvature import DampedInverse, Eigenbasis
from tests.harness import run_ranks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp

WIDTHS = (WIDTH, 7, 9, 11, 13, OUTPUTS)  # no two layers alike
SIZES = [(inputs + 1, outputs) for inputs, outputs in itertools.pairwise(WIDTHS)]


def made_of_rank(
    rank: int, world_size: int, solver: str
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]], dict[str, int]]:
    """Return what this rank inverted in each step, its own layers, both as sizes, and the memory of them."""
    chosen = {"inverse": DampedInverse, "eigen": Eigenbasis}[solver]
    compute = chosen.compute
    made: list[list[tuple[int, int]]] = []

    def counted(a: torch.Tensor, g: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        made[-1].append((a.shape[-1], g.shape[-1]))
        return compute(a, g, *arguments, **options)

    training = Training(rank, mlp(*WIDTHS), solver=solver, inv_update_steps=3)
    owners = training.kfac.owners.values()
    own = [size for size, owner in zip(SIZES, owners, strict=True) if owner == rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen, "compute", staticmethod(counted))
        for _ in range(7):
            made.append([])
            training.step()
    return made, own, training.kfac.memory_usage()


@pytest.mark.parametrize(("solver", "world_size"), [("inverse", 4), ("eigen", 2)])
def test_each_rank_makes_and_keeps_what_is_of_its_own_layers_only(solver: str, world_size: int) -> None:
    everybodys = []
    for made, own, memory in run_ranks(made_of_rank, world_size, args=(solver,)):
        assert own, "more layers than ranks"
        for step, of_step in enumerate(made):
            assert sorted(of_step) == (sorted(own) if step % 3 == 0 else [])
        everybodys += own
        factors = 4 * sum(a**2 + g**2 for a, g in own)
        eigenvalues = 4 * sum(a + g + 1 for a, g in own) if solver == "eigen" else 0  # and the damping
        assert (memory["factors"], memory["solvers"]) == (factors, factors + eigenvalues)
    assert sorted(everybodys) == sorted(SIZES)
