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


EQUAL = (6, *(6,) * 12)  # twelve layers
UNEQUAL = (6, 40, 8, 30, 6, 20, 5)


def usage(rank: int, world_size: int, widths: tuple[int, ...], solver: str) -> dict[str, int]:
    training = Training(rank, mlp(*widths), solver=solver)
    training.step()
    training.step()
    return training.state.memory_usage()


@pytest.mark.parametrize(
    ("widths", "solver"), [(EQUAL, "inverse"), (EQUAL, "eigen"), (UNEQUAL, "inverse")], ids=str
)
def test_nobody_keeps_what_another_rank_has(widths: tuple[int, ...], solver: str) -> None:
    of_ranks = run_ranks(usage, 4, args=(widths, solver))
    (alone,) = run_ranks(usage, 1, args=(widths, solver))
    assert alone["factors"] == 4 * sum((i + 1) ** 2 + o**2 for i, o in itertools.pairwise(widths))
    for kind in ("factors", "solvers"):
        assert sum(each[kind] for each in of_ranks) == alone[kind]
        assert widths is UNEQUAL or len({each[kind] for each in of_ranks}) == 1
