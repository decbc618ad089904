"""Factors that follow behind the gradients of later steps: the same training, bit for bit, in other steps' time."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from crossover_ddp._kfac.factor_traffic import FactorTraffic
from crossover_ddp._kfac.late import LateFactors
from tests.harness import run_ranks
from tests.multiprocess.kfac_training import Training

OPTIONS = {"damping": 0.03, "kl_clip": 1e-4, "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 18
SAVED_AFTER = 6  # the factors of step 4 are on their way


def gradients(training: Training, steps: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for _ in range(steps):
        training.backward()
        found.append(training.gradients())
        training.optimizer.step()
    return found


def train_both_ways(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return how many layers' factors left in each step, late and in the buckets; compare the gradients."""
    counts: list[int] = []
    leave = LateFactors.leave

    def count(late: LateFactors, *, all_groups: bool = False) -> None:
        before = sum(map(len, late._groups))
        leave(late, all_groups=all_groups)
        counts.append(before - sum(map(len, late._groups)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateFactors, "leave", count)
        late = gradients(Training(rank, **OPTIONS), STEPS)
        in_late, counts = counts, []
        patch.setattr(FactorTraffic, "can_trail", False)
        riding = gradients(Training(rank, **OPTIONS), STEPS)
    for one, other in zip(late, riding, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    return in_late, counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_late_factors_train_the_same(world_size: int) -> None:
    for late, riding in run_ranks(train_both_ways, world_size):
        assert not any(riding)
        # Four layers; those of steps 4 and 12, one after each step before solvers are made in steps 8 and 16.
        assert late == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [0] * 2


def save_and_go_on(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    training = Training(rank, **OPTIONS)
    gradients(training, SAVED_AFTER)
    held = training.state.memory_usage()["buffers"]
    state = training.state.state_dict()
    assert training.state.memory_usage()["buffers"] < held
    if rank == 0:
        saved = training.model.module.state_dict(), training.optimizer.state_dict(), state
        torch.save(saved, path)
    return gradients(training, STEPS - SAVED_AFTER)


def resume(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    network, optimizer, state = torch.load(path)
    training = Training(rank, **OPTIONS)
    training.model.module.load_state_dict(network)
    training.optimizer.load_state_dict(optimizer)
    training.state.load_state_dict(copy.deepcopy(state))
    training.steps = SAVED_AFTER
    return gradients(training, STEPS - SAVED_AFTER)


def go_on_without_saving(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    return gradients(Training(rank, **OPTIONS), STEPS)[SAVED_AFTER:]


def test_a_checkpoint_has_the_factors_that_were_on_their_way(tmp_path: Path) -> None:
    path = str(tmp_path / "kfac.pt")
    expected = run_ranks(go_on_without_saving, 2)
    for found in (run_ranks(save_and_go_on, 2, args=(path,)), run_ranks(resume, 2, args=(path,))):
        for ours, theirs in zip(found, expected, strict=True):
            for got, wanted in zip(ours, theirs, strict=True):
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def train_with_a_schedule(rank: int, world_size: int) -> list[dict[str, Any]]:
    steps = STEPS

    def every(step: int) -> int:
        assert step <= steps, "nobody asks for steps far ahead"
        return 3 if step < 9 else 2

    training = Training(rank, **{**OPTIONS, "factor_update_steps": every})
    return gradients(training, steps)


def test_periods_may_change_and_are_not_asked_for_ahead() -> None:
    one, other = run_ranks(train_with_a_schedule, 2)
    for ours, theirs in zip(one, other, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
