"""K-FAC in decoupled training: the same training as with `kfac_hook`, bit for bit, in the next forward's time."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from tests.harness import in_ranks
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
@in_ranks()
def test_it_trains_as_kfac_hook_does(rank: int, options: dict[str, Any]) -> None:
    (ours, plain), deferred = both(rank, **options), 0
    for _ in range(STEPS):
        assert ours.step() == plain.step()
        deferred += bool(ours.state.stats()["deferred"])
    assert torch.equal(ours.parameters(), plain.parameters())
    assert deferred == STEPS - NOT_SETTLED


@in_ranks(2)
def test_what_else_a_loop_does_has_the_same_results(rank: int) -> None:
    """Accumulate, clip, skip a step, look at gradients, close the state."""
    ours, plain = both(rank, **LATE)
    free = Training(rank, **{**LATE, "kl_clip": None}).run(4)

    def equal() -> bool:
        return torch.equal(ours.parameters(), plain.parameters())

    for each in (ours, plain):
        each.run(4)
    assert ours.state.stats()["deferred"]
    assert float((ours.parameters() - free.parameters()).abs().max()) > 1e-3, "clipped"
    for each in (ours, plain):
        for _ in range(2):
            each.backward(parts=2)
            each.update()
    assert equal(), "accumulated"
    for _ in range(2):
        plain.backward()
        ours.backward()
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        assert ours.state.clip_grad_norm_(0.01) == norm > 0.01
        plain.update()
        ours.update()
    assert equal(), "clipped by norm"
    for each in (ours, plain):
        each.backward()  # its step is not taken
        each.step()
    assert equal(), "skipped"
    for each in (ours, plain):
        each.backward()
    ours.state.flush()
    assert same([ours.gradients()], [plain.gradients()]), "flushed"
    for each in (ours, plain):
        each.update()
        each.step()
    ours.state.close()
    for each in (ours, plain):
        each.run(2)
    assert equal(), "closed"


@in_ranks(2)
def test_join_with_uneven_inputs_ends_with_the_same_model(rank: int) -> torch.Tensor:
    """Without `decoupled_hook` in tests/conformance."""
    training = Training(rank, decoupled=True, inv_update_steps=2).run(3)
    with Join([training.model]):
        training.run(2 if rank else 4)
    assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
    assert training.kfac.steps == 7
    return training.parameters()
