"""Muon on its owners in real ranks: the bits of plain DDP and torch's Muon, work done once, a quarter of the state."""

import math
from typing import Any

import pytest
import torch

from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.muon_training import (
    ByOwners,
    Training,
    batch,
    equal,
    loss_of,
    mixture,
)

pytestmark = pytest.mark.torch_version

STEPS = 200 if IN_CAMPAIGN else 24
FEW = 12 if IN_CAMPAIGN else 8
OWNERS_WALKS = [(4, FEW), (3, STEPS), (4, STEPS)] if IN_CAMPAIGN else []
OTHER: dict[str, Any] = {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}


def many_steps(rank: int, world_size: int, steps: int, settings: dict[str, Any]) -> list[int]:
    """Return the steps after which a parameter differs from plain DDP's."""
    ours = Training(mixture(), hook=True, **settings)
    plain = Training(mixture(), hook=False, **settings)
    different = []
    for step in range(steps):
        for each in (ours, plain):
            each.step(batch(rank, step))
        if not equal(ours.parameters(), plain.parameters()):
            different.append(step)
    return different


@pytest.mark.parametrize(
    ("world_size", "steps", "settings"), [(1, FEW, {}), (2, STEPS, {}), (2, FEW, OTHER)], ids=str
)
def test_parameters_are_those_of_ddp_and_muon_to_the_last_bit(
    world_size: int, steps: int, settings: dict[str, Any]
) -> None:
    assert run_ranks(many_steps, world_size, args=(steps, settings)) == [[]] * world_size


def by_owners(rank: int, world_size: int, steps: int) -> tuple[list[int], int, list[float]]:
    """Return the steps after which a parameter differs, the calls of Newton-Schulz, and both norms of one step."""
    ours = Training(mixture(), hook=True)
    assert ours.state is not None
    theirs = ByOwners(mixture())
    different, norms = [], []
    for step in range(steps):
        loss_of(ours.model, batch(rank, step)).backward()
        others = [None if p.grad is None else p.grad.clone() for p in ours.module.parameters()]
        theirs.backward(batch(rank, step), others)
        gradients = [matrix.grad.flatten() for matrix in theirs.module.matrices() if matrix.grad is not None]
        norms = [float(ours.state.grad_norm()), float(torch.cat(gradients).double().norm())]
        assert all(m.grad is not None and not m.grad.any() for m in ours.module.matrices())
        ours.update()
        theirs.update()
        if not equal(ours.parameters(), theirs.parameters()):
            different.append(step)
    return different, ours.state.newton_schulz_calls, norms


@pytest.mark.parametrize(("world_size", "steps"), [(3, FEW), *OWNERS_WALKS])
def test_parameters_are_those_of_muon_fed_the_owners_sums(world_size: int, steps: int) -> None:
    results = run_ranks(by_owners, world_size, args=(steps,))
    assert [different for different, _, _ in results] == [[]] * world_size
    assert sum(calls for _, calls, _ in results) == steps * 5, "once per matrix, all ranks together"
    for _, _, (ours, theirs) in results:
        assert ours == pytest.approx(theirs, rel=1e-12)
        assert ours == results[0][2][0]


def scaled(rank: int, world_size: int) -> tuple[list[int], list[float], list[bool]]:
    """Train with a GradScaler; on step 4 the loss of rank 1 overflows in the layer whose matrix rank 0 or 1 owns."""
    found = []
    for hook in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        training = Training(mixture(), hook=hook, loss_scale=scaler.get_scale if hook else 1.0)
        walk, scales, nans = [], [], []
        for step in range(FEW):
            loss = loss_of(training.model, batch(rank, step))
            if (step, rank) == (4, 1):
                loss = loss + training.module.tall.weight.sum() * torch.inf
            scaler.scale(loss).backward()
            assert training.module.tall.weight.grad is not None
            nans.append(bool(training.module.tall.weight.grad.isfinite().all()))
            for each in (training.muon, training.adamw):
                scaler.step(each)
            scaler.update()
            scales.append(scaler.get_scale())
            training.muon.zero_grad()
            training.adamw.zero_grad()
            walk.append(training.parameters())
        found.append((walk, scales, nans))
    (ours, our_scales, our_nans), (theirs, their_scales, their_nans) = found
    assert our_scales == their_scales and our_nans == their_nans
    return [step for step in range(FEW) if not equal(ours[step], theirs[step])], our_scales, our_nans


def test_an_overflow_on_one_rank_skips_the_step_on_all_of_them() -> None:
    results = run_ranks(scaled, 2)
    for different, scales, finite in results:
        assert different == []
        assert finite == [step != 4 for step in range(FEW)]
        assert len(set(scales)) > 2, "the scale is to have changed both ways"
    assert results[0][1] == results[1][1]


def skipped(rank: int, world_size: int) -> list[str]:
    """Skip steps: by zero_grad, by a mean that is not finite, and by nothing, which is an error."""
    ours, plain = (Training(mixture(), hook=hook) for hook in (True, False))
    messages = []
    for step in range(FEW):
        for each in (ours, plain):
            if step % 4 == 1:
                loss_of(each.model, batch(rank, 700 + step)).backward()
                each.muon.zero_grad()
                each.adamw.zero_grad()
            if step % 4 == 2:
                (loss_of(each.model, batch(rank, 700 + step)) * (torch.nan if rank else 1)).backward()
                each.model.zero_grad()
            if step % 4 == 3 and each is ours:
                loss_of(each.model, batch(rank, 700 + step)).backward()
                with pytest.raises(UnsupportedConfigurationError) as error:
                    loss_of(each.model, batch(rank, 700 + step)).backward()
                messages.append(str(error.value))
                each.muon.zero_grad()
                each.adamw.zero_grad()
            each.step(batch(rank, step))
        assert equal(ours.parameters(), plain.parameters()), step
    return messages


def test_a_skipped_step_changes_nothing_and_a_forgotten_one_is_an_error() -> None:
    for messages in run_ranks(skipped, 2):
        assert len(messages) == FEW // 4
        assert all("expected muon.step() between two exchanges" in message for message in messages)


def with_closure(rank: int, world_size: int) -> bool:
    trainings = [Training(mixture(), hook=hook) for hook in (True, False)]
    for step in range(FEW):
        for each in trainings:

            def closure(each: Training = each, step: int = step) -> torch.Tensor:
                each.muon.zero_grad()
                each.adamw.zero_grad()
                loss = loss_of(each.model, batch(rank, step))
                loss.backward()
                return loss

            loss = each.muon.step(closure)
            each.adamw.step()
            assert loss is not None and math.isfinite(float(loss))
    return equal(trainings[0].parameters(), trainings[1].parameters())


def test_a_closure_works() -> None:
    assert run_ranks(with_closure, 2) == [True, True]


def loads(rank: int, world_size: int) -> dict[str, int]:
    training = Training(mixture(), hook=True)
    training.step(batch(rank, 0))
    assert training.state is not None
    return training.state.memory_usage()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_momentum_is_kept_once_by_all_ranks_together(world_size: int) -> None:
    usages = run_ranks(loads, world_size)
    whole = 4 * sum(matrix.numel() for matrix in mixture().matrices())
    assert sum(usage["momentum"] for usage in usages) == whole
    assert sum(usage["next_momentum"] for usage in usages) <= whole
