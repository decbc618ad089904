"""K-FAC in decoupled training: the same training as with `kfac_hook`, bit for bit, in the next forward's time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp

OPTIONS: dict[str, Any] = {"damping": 0.03, "kl_clip": 1e-4}
LATE: dict[str, Any] = {**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 12
NOT_SETTLED = 2  # backward passes before DDP's buckets stay as they are


def both(rank: int, **options: Any) -> tuple[Training, Training]:
    """Make the same training twice: deferred, and not."""
    seed = options.pop("widths", None)
    return (
        Training(rank, None if seed is None else mlp(*seed), decoupled=True, **options),
        Training(rank, None if seed is None else mlp(*seed), **options),
    )


def compare(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Return how many steps were deferred."""
    (ours, plain), deferred = both(rank, **options), 0
    for _ in range(STEPS):
        assert ours.step() == plain.step()
        deferred += bool(ours.outer.stats()["deferred"])
    assert torch.equal(ours.parameters(), plain.parameters())
    return deferred


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, OPTIONS),
        (2, OPTIONS),
        (2, LATE | {"ddp": {"gradient_as_bucket_view": True}}),
        (2, LATE | {"kl_clip": None, "solver": "eigen", "factors": "local"}),
        (2, LATE | {"widths": (WIDTH, 300, 230, OUTPUTS), "ddp": {"bucket_cap_mb": 0.1}}),
        (4, LATE),
    ],
    ids=["alone", "riding", "late", "local", "spread", "four"],
)
def test_it_trains_as_kfac_hook_does(world_size: int, options: dict[str, Any]) -> None:
    for deferred in run_ranks(compare, world_size, args=(options,)):
        assert deferred == STEPS - NOT_SETTLED


def train_in_other_ways(rank: int, world_size: int) -> dict[str, bool]:
    """Accumulate, clip, skip a step, look at gradients, close the state; return what is as it is without deferring."""
    found = {}
    ours, plain = both(rank, **LATE)

    def same() -> bool:
        return torch.equal(ours.parameters(), plain.parameters())

    for each in (ours, plain):
        for _ in range(4):
            each.step()
        for _ in range(2):
            each.backward(parts=2)
            each.optimizer.step()
    found["accumulated"] = same()
    for _ in range(2):
        plain.backward()
        ours.backward()
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        found["norm"] = bool(ours.outer.clip_grad_norm_(0.01) == norm) and bool(norm > 0.01)
        plain.optimizer.step()
        ours.optimizer.step()
    found["clipped"] = same()
    for each in (ours, plain):
        each.backward()  # its step is not taken
        each.step()
    found["skipped"] = same()
    for each in (ours, plain):
        each.backward()
    ours.outer.flush()
    found["flushed"] = equal(ours.gradients(), plain.gradients())
    for each in (ours, plain):
        each.optimizer.step()
        each.step()
    ours.outer.close()
    for each in (ours, plain):
        each.step()
        each.step()
    found["closed"] = same()
    return found


def equal(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)


def test_what_else_a_loop_does_has_the_same_results() -> None:
    for found in run_ranks(train_in_other_ways, 2):
        assert found == dict.fromkeys(found, True)


def clips(rank: int, world_size: int) -> list[float]:
    """Return how far parameters are from those without a clip, and how early they arrive before the next forward."""
    clipped, free = Training(rank, decoupled=True, **LATE), Training(rank, **{**LATE, "kl_clip": None})
    for each in (clipped, free):
        for _ in range(4):
            each.step()
    waiting = bool(clipped.outer.stats()["deferred"])
    return [float((clipped.parameters() - free.parameters()).abs().max()), float(waiting)]


def test_the_clip_is_at_work_and_updates_wait_for_forward() -> None:
    for distance, waiting in run_ranks(clips, 2):
        assert distance > 1e-3
        assert waiting
