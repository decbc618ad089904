"""K-FAC in decoupled training: the same training as with `kfac_hook`, bit for bit, in the next forward's time."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp, same

OPTIONS: dict[str, Any] = {"damping": 0.03, "kl_clip": 1e-4}
LATE: dict[str, Any] = {**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 12
NOT_SETTLED = 2  # backward passes before DDP's buckets stay as they are


def both(rank: int, **options: Any) -> tuple[Training, Training]:
    """Make the same training twice: deferred, and not."""
    widths = options.pop("widths", (WIDTH, 8, 8, 8, OUTPUTS))
    deferred, plain = (Training(rank, mlp(*widths), decoupled=each, **options) for each in (True, False))
    return deferred, plain


def compare(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Return how many steps were deferred."""
    (ours, plain), deferred = both(rank, **options), 0
    for _ in range(STEPS):
        assert ours.step() == plain.step()
        deferred += bool(ours.state.stats()["deferred"])
    assert torch.equal(ours.parameters(), plain.parameters())
    return deferred


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, OPTIONS),
        (2, OPTIONS),
        (2, LATE | {"kl_clip": None, "solver": "eigen", "factors": "local"}),
        (2, LATE | {"widths": (WIDTH, 300, 230, OUTPUTS), "ddp": {"bucket_cap_mb": 0.1}}),
        (4, LATE | {"ddp": {"gradient_as_bucket_view": True}}),
    ],
    ids=["alone", "riding", "local", "spread", "late"],
)
def test_it_trains_as_kfac_hook_does(world_size: int, options: dict[str, Any]) -> None:
    for deferred in run_ranks(compare, world_size, args=(options,)):
        assert deferred == STEPS - NOT_SETTLED


def train_in_other_ways(rank: int, world_size: int) -> dict[str, bool]:
    """Accumulate, clip, skip a step, look at gradients, close the state; return what is as it is without deferring."""
    found = {}
    ours, plain = both(rank, **LATE)
    free = Training(rank, **{**LATE, "kl_clip": None}).run(4)

    def equal() -> bool:
        return torch.equal(ours.parameters(), plain.parameters())

    for each in (ours, plain):
        each.run(4)
    found["waits"] = bool(ours.state.stats()["deferred"])
    found["clipped"] = float((ours.parameters() - free.parameters()).abs().max()) > 1e-3
    for each in (ours, plain):
        for _ in range(2):
            each.backward(parts=2)
            each.update()
    found["accumulated"] = equal()
    for _ in range(2):
        plain.backward()
        ours.backward()
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        found["norm"] = bool(ours.state.clip_grad_norm_(0.01) == norm) and bool(norm > 0.01)
        plain.update()
        ours.update()
    found["clipped by norm"] = equal()
    for each in (ours, plain):
        each.backward()  # its step is not taken
        each.step()
    found["skipped"] = equal()
    for each in (ours, plain):
        each.backward()
    ours.state.flush()
    found["flushed"] = same([ours.gradients()], [plain.gradients()])
    for each in (ours, plain):
        each.update()
        each.step()
    ours.state.close()
    for each in (ours, plain):
        each.run(2)
    found["closed"] = equal()
    return found


def test_what_else_a_loop_does_has_the_same_results() -> None:
    for found in run_ranks(train_in_other_ways, 2):
        assert found == dict.fromkeys(found, True)
