"""Decoupled training in real ranks: what one rank may do alone."""

import copy
import time
from collections.abc import Callable
from typing import Any

import timm.utils
import torch
from torch.nn.utils import clip_grad_norm_

from tests.harness import in_ranks
from tests.harness.training import Training
from tests.multiprocess.averaging_oracle import MAKERS, loss_of, network


def training_of(rank: int, optimizer: str, *, decoupled: bool = True, **options: Any) -> Training:
    return Training(
        "decoupled" if decoupled else None,
        rank,
        module=network(),
        optimizers=lambda model: [MAKERS[optimizer](model.parameters())],
        loss=loss_of,
        **{"bucket_cap_mb": 0.002, **options},
    )


def end(training: Training) -> torch.Tensor:
    training.model.eval()
    training.model(torch.zeros(1, 1, 6, 6))  # between two steps buffers may differ
    flat = torch.cat([value.flatten().double() for value in training.weights()])
    training.close()
    return flat


@in_ranks(2)
def test_one_rank_may_flush_before_all_clip(rank: int) -> None:
    """``flush`` asks nobody, so the ranks that have not called it must not wait for rank 0's parts."""
    training, plain = training_of(rank, "momentum"), training_of(rank, "momentum", decoupled=False)
    for _ in range(6):
        training.backward()
        plain.backward()
        if rank == 0:
            training.state.flush()
        norm = training.state.clip_grad_norm_(0.5)
        # Ours is summed in float64, so that deferred steps have the same.
        assert torch.allclose(norm, clip_grad_norm_(plain.model.parameters(), 0.5), rtol=1e-6)
        training.update()
        plain.update()
    assert torch.allclose(end(training), end(plain), rtol=1e-5, atol=1e-6)


@in_ranks(2)
def test_one_rank_may_look_alone(rank: int) -> None:
    """Checkpoints, averages and evaluations of one rank need no other rank."""
    training, plain = training_of(rank, "adamw"), training_of(rank, "adamw", decoupled=False)
    average = timm.utils.ModelEmaV3(training.model.module, decay=0.9) if rank == 0 else None
    looks: list[Callable[[], object]] = [
        lambda: training.model.state_dict(),
        lambda: training.optimizer.state_dict(),
        lambda: average.update(training.model.module),
        lambda: copy.deepcopy(training.model.module)(torch.ones(2, 1, 6, 6)),
        lambda: time.sleep(0.05),
    ]
    for step in range(12):
        training.step()
        plain.step()
        if rank == 0:
            looks[step % len(looks)]()
    assert torch.equal(end(training), end(plain))


@in_ranks(2)
def test_gradients_without_bucket_views_are_those_of_plain_ddp_after_forward(rank: int) -> None:
    """Without bucket views, what the user holds by then is copied; what he has dropped is not."""
    one, plain = (
        training_of(rank, "momentum", decoupled=decoupled, gradient_as_bucket_view=False)
        for decoupled in (True, False)
    )
    for step in range(8):
        losses = [each.loss(step) for each in (one, plain)]
        if step:
            for a, b in zip(one.held[1:], plain.held[1:], strict=True):
                assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
        for training, loss in zip((one, plain), losses, strict=True):
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            training.held[0].grad = None
    assert one.state.stats()["steps_deferred"] > 5
    assert torch.equal(end(one), end(plain))
