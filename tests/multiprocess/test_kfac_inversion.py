"""Who makes solvers and when: each rank its own only, and in the background without holding anybody up."""

import itertools
import threading
from typing import Any

import pytest
import torch

from crossover_ddp import ExchangeError
from crossover_ddp._kfac.factors import DampedInverse, Eigenbasis
from tests.harness import run_ranks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp

WIDTHS = (WIDTH, 7, 9, 11, 13, OUTPUTS)  # no two layers alike
SIZES = [(inputs + 1, outputs) for inputs, outputs in itertools.pairwise(WIDTHS)]
TIMEOUT_S = 30.0


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


class Gate:
    """Holds `DampedInverse.compute` back, on whatever thread, and notes what it was asked for."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.threads: list[str] = []
        self._compute = DampedInverse.compute

    def compute(self, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self.open.wait(TIMEOUT_S)
        return self._compute(*arguments, **options)


def invert_in_background(rank: int, world_size: int) -> list[bool]:
    gate = Gate()
    training = Training(rank, inversion="background", inv_update_steps=2)
    curvatures = list(training.state._preconditioner.curvatures.values())

    def solvers() -> list[Any]:
        return [curvature._solver for curvature in curvatures]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DampedInverse, "compute", staticmethod(gate.compute))
        training.step()
        assert not any(name == "crossover-invert" for name in gate.threads), "the first are made at once"
        first = solvers()
        training.step()
        gate.open.clear()
        training.step()  # due; returns although the gate is closed
        training.step()
        checks = [all(c._pending is not None for c in curvatures), same(solvers(), first)]
        gate.open.set()
        for curvature in curvatures:
            assert curvature._pending is not None and curvature._pending._ended.wait(TIMEOUT_S)
        checks.append(same(solvers(), first))  # nobody takes them before a bucket comes
        gate.open.clear()
        training.step()  # due again: takes the new ones, begins with the next
        second = solvers()
        checks.append(none_same(second, first))
        training.step()
        checks.append(same(solvers(), second))
        timer = threading.Timer(0.3, gate.open.set)
        timer.start()
        training.step()  # due: waits for those that are being made
        checks.append(gate.open.is_set())
        checks.append(none_same(solvers(), second))
        timer.join()
        training.state.state_dict()  # waits as well
        checks.append(all(c._pending is None for c in curvatures))
    background = [name for name in gate.threads if name == "crossover-invert"]
    checks.append(len(background) == 3 * len(curvatures))
    training.state.close()
    inverter = training.state._setup.inverter
    assert inverter is not None and inverter.join(TIMEOUT_S)
    return checks


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(one is other for one, other in zip(ours, theirs, strict=True))


def none_same(ours: list[Any], theirs: list[Any]) -> bool:
    return not any(one is other for one, other in zip(ours, theirs, strict=True))


def test_solvers_in_the_background_hold_nobody_up_until_the_next_are_due() -> None:
    for checks in run_ranks(invert_in_background, 2):
        assert all(checks), checks


def fail_in_background(rank: int, world_size: int) -> str:
    """A solver that cannot be made in the background is an error of the step that would use it."""
    training = Training(rank, inversion="background", inv_update_steps=1)
    training.step()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such inverse")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DampedInverse, "compute", fail)
        # In the step that begins it if it fails at once, else in the next one.
        with pytest.raises(ExchangeError) as caught:
            for _ in range(2):
                training.step()
    training.state.close()
    return str(caught.value)


def test_a_failure_in_the_background_is_an_error_of_backward() -> None:
    (message,) = run_ranks(fail_in_background, 1)
    assert message.startswith("rank 0 of 1: the ")
    assert "no such inverse" in message
