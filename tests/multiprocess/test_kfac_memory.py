"""K-FAC's memory: each rank keeps the factors and solvers of its own layers only."""

import itertools

import pytest

from tests.harness import run_ranks
from tests.multiprocess.kfac_training import Training, mlp

EQUAL = (6, *(6,) * 12)  # twelve layers
UNEQUAL = (6, 40, 8, 30, 6, 20, 5)


def usage(rank: int, world_size: int, widths: tuple[int, ...], solver: str) -> dict[str, int]:
    training = Training(rank, mlp(*widths), solver=solver)
    training.step()
    training.step()
    return training.state.memory_usage()


def factors_bytes(widths: tuple[int, ...]) -> int:
    return 4 * sum((i + 1) ** 2 + o**2 for i, o in itertools.pairwise(widths))


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_equal_layers_are_shared_out_equally(solver: str) -> None:
    of_ranks = run_ranks(usage, 4, args=(EQUAL, solver))
    (alone,) = run_ranks(usage, 1, args=(EQUAL, solver))
    assert alone["factors"] == factors_bytes(EQUAL)
    for each in of_ranks:
        assert 4 * each["factors"] == alone["factors"]
        assert 4 * each["solvers"] == alone["solvers"]


def test_nobody_keeps_what_another_rank_has() -> None:
    of_ranks = run_ranks(usage, 4, args=(UNEQUAL, "inverse"))
    (alone,) = run_ranks(usage, 1, args=(UNEQUAL, "inverse"))
    assert alone["factors"] == factors_bytes(UNEQUAL)
    for kind in ("factors", "solvers"):
        assert sum(each[kind] for each in of_ranks) == alone[kind]
