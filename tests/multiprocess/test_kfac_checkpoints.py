"""K-FAC's checkpoints: what two ranks save goes on exactly with two, and on the same path with one or four."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_ranks
from tests.multiprocess.kfac_oracle import Oracle, Settings
from tests.multiprocess.kfac_training import LR, Training, batch
from tests.multiprocess.test_kfac import relative_error

SAVED_AFTER, MORE = 4, 4
# Solvers were last made at step 3, of the factors of step 2; the next are due at steps 6 and 4.
SETTINGS = Settings(factor_update_steps=2, inv_update_steps=3, kl_clip=1e-4)
RELATIVE = 1e-4


def training_of(rank: int) -> Training:
    return Training(
        rank,
        damping=SETTINGS.damping,
        factor_decay=SETTINGS.factor_decay,
        kl_clip=SETTINGS.kl_clip,
        factor_update_steps=SETTINGS.factor_update_steps,
        inv_update_steps=SETTINGS.inv_update_steps,
    )


def save_and_go_on(rank: int, world_size: int, path: str) -> list[dict[str, Tensor]]:
    """Return the gradients of the steps after the checkpoint."""
    training = training_of(rank)
    training.trained(SAVED_AFTER)
    training.save(path, writer=1)  # any rank can save it
    return training.trained(MORE)


def resumed(rank: int, path: str) -> tuple[Training, dict[str, Any]]:
    training = training_of(rank)
    return training, training.load(path)


def resume(rank: int, world_size: int, path: str) -> list[dict[str, Tensor]]:
    return resumed(rank, path)[0].trained(MORE)


def resume_beside_the_oracle(rank: int, world_size: int, path: str) -> list[float]:
    """Return the greatest relative error of each step."""
    training, state = resumed(rank, path)
    running = {name: [each["a"].double(), each["g"].double()] for name, each in state["layers"].items()}
    oracle = Oracle(SETTINGS, LR, running=running, frozen=dict(running), steps=SAVED_AFTER)
    errors = []
    for step in range(SAVED_AFTER, SAVED_AFTER + MORE):
        replicas = [copy.deepcopy(training.model.module).double() for _ in range(world_size)]
        training.backward()
        batches = [(x.double(), y) for x, y in (batch(each, step) for each in range(world_size))]
        errors.append(relative_error(training.model.module, oracle.step(replicas, batches)))
        training.optimizer.step()
    assert oracle.least_scale < 1, "the clip is to be seen at work"
    return errors


def resume_and_accumulate(rank: int, world_size: int, path: str) -> list[dict[str, Tensor]]:
    """Return the gradients of a step whose input factors left early: of the whole batch, and of its two parts."""
    found = []
    for parts in (1, 2):
        training, _ = resumed(rank, path)
        training.backward(parts)
        plan = training.state.plan_factors(early=True)
        assert plan.early
        for _ in range(SETTINGS.inv_update_steps):  # up to solvers of factors that left early
            training.backward(parts)
        found.append(training.gradients())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[dict[str, Tensor]]]]:
    path = str(tmp_path_factory.mktemp("checkpoint") / "kfac.pt")
    return path, run_ranks(save_and_go_on, 2, args=(path,))


def test_two_ranks_go_on_exactly(saved: tuple[str, list[list[dict[str, Tensor]]]]) -> None:
    path, expected = saved
    for ours, theirs in zip(run_ranks(resume, 2, args=(path,)), expected, strict=True):
        for got, wanted in zip(ours, theirs, strict=True):
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_goes_on_with_the_same_factors(
    world_size: int, saved: tuple[str, list[list[dict[str, Tensor]]]]
) -> None:
    for of_rank in run_ranks(resume_beside_the_oracle, world_size, args=(saved[0],)):
        assert max(of_rank) < RELATIVE, of_rank


def test_factors_of_an_accumulation_leave_once_after_resuming(
    saved: tuple[str, list[list[dict[str, Tensor]]]],
) -> None:
    for whole, accumulated in run_ranks(resume_and_accumulate, 2, args=(saved[0],)):
        for name, expected in whole.items():
            torch.testing.assert_close(accumulated[name], expected, rtol=RELATIVE, atol=1e-6)
