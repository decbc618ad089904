"""A GradScaler that meets an overflow on one rank alone: that rank skips its update, and nobody else notices."""

from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook
from tests.harness import run_ranks
from tests.multiprocess.averaging_oracle import Trainer, delayed_oracle
from tests.multiprocess.elastic_oracle import Replay, together_oracle

STEPS = 14
EVERY = 2
RATE = 0.45
# Where losses are infinite: in steps before, at and between exchanges, twice in a row, and never on both ranks at once.
OVERFLOWS = frozenset({(1, 3), (1, 4), (0, 7), (1, 9)})
SCALE = 2.0**10
LOCAL: dict[str, dict[str, int]] = {
    "blocking": {"sync_every": 4},
    "delayed": {"sync_every": 4, "delay": 3},
    "streamed": {"sync_every": 4, "delay": 1, "fragments": 4},
    "warm": {"sync_every": 3, "delay": 1, "warmup_steps": 5},
}


def scaled_step(trainer: Trainer, scaler: torch.amp.GradScaler, *, overflow: bool) -> None:
    images, labels = next(trainer.batches)
    loss = nn.functional.cross_entropy(trainer.model(images), labels)
    scaler.scale(loss * float("inf") if overflow else loss).backward()
    scaler.step(trainer.optimizer)
    scaler.update()
    trainer.optimizer.zero_grad()


def train_scaled(rank: int, world_size: int, kind: str) -> tuple[torch.Tensor, float, int, list[Any]]:
    torch.set_num_threads(1)
    state: Any = LocalSGDState(**LOCAL[kind]) if kind in LOCAL else ElasticState(EVERY, kind, RATE)  # type: ignore[arg-type]
    trainer = Trainer(rank, state, **({} if kind in LOCAL else {"hook": elastic_hook}))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    for step in range(STEPS):
        scaled_step(trainer, scaler, overflow=(rank, step) in OVERFLOWS)
    values, steps = trainer.values, state.stats()["steps"]
    state.close()
    return values, scaler.get_scale(), steps, [] if kind in LOCAL else state.rounds()


def expected_values(kind: str, rounds: list[list[Any]]) -> list[torch.Tensor]:
    if kind == "async":
        return Replay("momentum", rounds, RATE, OVERFLOWS).run([STEPS] * 2)
    if kind == "sync":
        return together_oracle(2, "momentum", STEPS, EVERY, RATE, OVERFLOWS)
    # In warm-up gradients are averaged, so that all ranks meet the overflow and skip.
    warm = LOCAL[kind].get("warmup_steps", 0)
    skips = {(rank, step) for guilty, step in OVERFLOWS for rank in (0, 1) if rank == guilty or step < warm}
    return delayed_oracle(2, "momentum", STEPS, skips=skips, **LOCAL[kind])


@pytest.mark.parametrize("kind", [*LOCAL, "sync", "async"])
def test_ranks_that_skip_updates_alone_walk_the_path_of_copies_that_do(kind: str) -> None:
    """To the last bit: scales are powers of two, so scaling and unscaling round nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = run_ranks(train_scaled, 2, args=(kind,))
        expected = expected_values(kind, [rounds for *_, rounds in found])
    finally:
        torch.set_num_threads(threads)
    for (values, _, steps, _), oracle in zip(found, expected, strict=True):
        assert torch.equal(values, oracle)
        assert steps == STEPS, "a skipped update has stopped the clock"
    scales = [scale for _, scale, *_ in found]
    # In warm-up both have met the overflows of steps 3 and 4.
    assert scales == ([SCALE / 8, SCALE / 8] if kind == "warm" else [SCALE / 2, SCALE / 8])


def train_wild(rank: int, world_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
    torch.set_num_threads(1)
    state = ElasticState(EVERY, "wild", RATE)
    trainer = Trainer(rank, state, hook=elastic_hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    for step in range(STEPS):
        scaled_step(trainer, scaler, overflow=(rank, step) in OVERFLOWS)
    state.average()
    values, stats = trainer.values, state.stats()
    state.close()
    return values, stats


def test_a_wild_rank_that_skips_updates_pulls_all_the_same() -> None:
    (one, stats), (other, of_other) = run_ranks(train_wild, 2)
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())
    for each in (stats, of_other):
        assert each["not_finite"] == 0
        assert each["own_pulls"] == STEPS // EVERY
