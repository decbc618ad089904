"""Each rank makes solvers of its own layers only, in the steps in which they are due, and keeps nothing else."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp._kfac.curvature import DampedInverse, Eigenbasis
from crossover_ddp._owners.kept import tensors_in
from tests.harness import in_ranks, run_ranks
from tests.harness.turn import RecordingTurn
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


class Mixed(nn.Module):
    """A layer of float64 before one of float32 that all ranks precondition together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 300, dtype=torch.float64)
        self.others = mlp(300, 230, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.others(self.first(inputs.double()).tanh().float())  # type: ignore[no-any-return]


@in_ranks(2)
def test_a_spread_layer_is_the_same_on_all_ranks_beside_layers_of_another_dtype(rank: int) -> None:
    torch.manual_seed(4)
    training = Training(rank, Mixed(), damping=0.1, compare_replicas=False).run(6)
    assert training.spread() == ["others.0"]
    told: list[Any] = [None, None]
    dist.all_gather_object(told, training.parameters())
    assert torch.equal(*told)


@in_ranks(2)
def test_a_turn_is_asked_for_once_where_solvers_are_shared(rank: int) -> None:
    turn = RecordingTurn()
    training = Training(rank, mlp(WIDTH, 300, 230, OUTPUTS), ddp={"bucket_cap_mb": 25}, mutex=turn)
    training.run(2)
    assert training.spread()
    assert turn.order == ["release", "request", "acquire"] * 2


@in_ranks(2)
def test_a_wider_layers_state_is_refused_on_all_ranks_and_nothing_is_lost(rank: int) -> None:
    wider, training = (Training(rank, mlp(WIDTH, 8, 8, width)).run(2) for width in (OUTPUTS + 1, OUTPUTS))
    saved, before = wider.kfac.state_dict(), copy.deepcopy(training.kfac.state_dict())
    with pytest.raises(
        ValueError, match=r"expected a factor of shape \(1, 5, 5\) for layer '4', got \(1, 6, 6\)"
    ):
        training.kfac.load_state_dict(saved)
    after = training.kfac.state_dict()
    assert after["steps"] == 2
    assert all(map(torch.equal, tensors_in(after["layers"]), tensors_in(before["layers"])))
    training.run(2)
