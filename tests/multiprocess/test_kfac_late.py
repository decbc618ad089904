"""Factors that follow behind the gradients of later steps: the same training, bit for bit, in other steps' time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, decoupled_hook
from crossover_ddp._kfac.factor_traffic import FactorTraffic
from tests.harness import run_ranks
from tests.multiprocess.kfac_training import LR, OUTPUTS, WIDTH, Training, batch, mlp

OPTIONS = {"damping": 0.03, "kl_clip": 1e-4, "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 18
SAVED_AFTER = 6  # the factors of step 4 are on their way


def train_both_ways(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return how many factors left in each step, late and in the buckets; compare the gradients."""
    counts: list[int] = []
    leave = FactorTraffic.leave

    def count(traffic: FactorTraffic, after: Any = None, *, all_groups: bool = False) -> None:
        before = sum(map(len, traffic._late))
        leave(traffic, after, all_groups=all_groups)
        counts.append(before - sum(map(len, traffic._late)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "leave", count)
        late = Training(rank, **OPTIONS).trained(STEPS)
        in_late, counts = counts, []
        patch.setattr(FactorTraffic, "can_trail", False)
        riding = Training(rank, **OPTIONS).trained(STEPS)
    for one, other in zip(late, riding, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    return in_late, counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_late_factors_train_the_same(world_size: int) -> None:
    for late, riding in run_ranks(train_both_ways, world_size):
        assert not any(riding)
        # Asked before each step. Four layers' factors of steps 4 and 12, one layer after each step, before 8 and 16.
        assert late == [0] * 5 + [2] * 4 + [0] * 4 + [2] * 4 + [0] * 2


def save_and_go_on(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    training = Training(rank, **OPTIONS)
    training.trained(SAVED_AFTER)
    held = training.state.memory_usage()["buffers"]
    training.save(path)
    assert training.state.memory_usage()["buffers"] < held
    return training.trained(STEPS - SAVED_AFTER)


def resume(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    training = Training(rank, **OPTIONS)
    training.load(path)
    return training.trained(STEPS - SAVED_AFTER)


def go_on_without_saving(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    return Training(rank, **OPTIONS).trained(STEPS)[SAVED_AFTER:]


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
    return training.trained(steps)


def test_periods_may_change_and_are_not_asked_for_ahead() -> None:
    one, other = run_ranks(train_with_a_schedule, 2)
    for ours, theirs in zip(one, other, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def train_two_models(rank: int, world_size: int) -> None:
    """Two models in turns on one process group: what follows of one's factors is on its way in the other's steps."""
    pair = [Training(rank, **OPTIONS) for _ in range(2)]
    in_turns: list[list[dict[str, torch.Tensor]]] = [[], []]
    for _ in range(STEPS):
        for found, training in zip(in_turns, pair, strict=True):
            found += training.trained(1)
    alone = Training(rank, **OPTIONS).trained(STEPS)
    for found in in_turns:
        for one, other in zip(found, alone, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


def test_two_models_of_one_process_train_as_each_alone() -> None:
    run_ranks(train_two_models, 2)


def train_beside_decoupled(rank: int, world_size: int) -> None:
    """A model with late factors and a decoupled one, whose gathers are deferred, on one process group."""
    kfac = Training(rank, **OPTIONS)
    torch.manual_seed(3)
    model = DistributedDataParallel(mlp(WIDTH, 8, OUTPUTS), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
    plain = DistributedDataParallel(mlp(WIDTH, 8, OUTPUTS))
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    found = []
    for step in range(STEPS):
        inputs, targets = batch(rank, step)
        for each, updates in ((model, optimizer), (plain, reference)):
            updates.zero_grad()
            nn.functional.cross_entropy(each(inputs), targets).backward()
            updates.step()
        found += kfac.trained(1)
    state.flush()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for one, other in zip(found, Training(rank, **OPTIONS).trained(STEPS), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    state.close()


def test_late_factors_and_deferred_gathers_do_not_disturb_each_other() -> None:
    run_ranks(train_beside_decoupled, 2)
