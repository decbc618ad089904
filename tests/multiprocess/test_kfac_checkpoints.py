"""K-FAC's checkpoints: what two ranks save goes on exactly with two, and on the same path with one or four."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.multiprocess.kfac_oracle import Oracle, Settings, errors_beside
from tests.multiprocess.kfac_training import LR, OUTPUTS, WIDTH, Training, mlp, same

SAVED_AFTER, MORE = 6, 8
# Solvers were last made at step 4, of the factors of step 4; the next are due at steps 8 and 6.
SETTINGS = Settings(factor_update_steps=2, inv_update_steps=4, kl_clip=1e-4)
RELATIVE = 1e-4
KINDS: dict[str, dict[str, Any]] = {
    "seldom": asdict(SETTINGS),
    "eigen": asdict(replace(SETTINGS, solver="eigen")),
    # The factors of step 4 are on their way.
    "late": {"kl_clip": 1e-4, "factor_update_steps": 4, "inv_update_steps": 8},
    "spread": asdict(SETTINGS),
}


def training_of(rank: int, kind: str) -> Training:
    widths = (WIDTH, 300, 230, OUTPUTS) if kind == "spread" else (WIDTH, 8, 8, 8, OUTPUTS)
    return Training(rank, mlp(*widths), **KINDS[kind])


def save_and_resume(rank: int, world_size: int, kind: str, path: Path) -> None:
    """Go on after saving, and from what was saved, as if nothing was saved."""
    whole, saving, resuming = (training_of(rank, kind) for _ in range(3))
    expected = whole.trained(SAVED_AFTER + MORE)[SAVED_AFTER:]
    saving.trained(SAVED_AFTER)
    held = saving.kfac.memory_usage()["buffers"]
    saved = saving.save()
    if rank == 1:  # any rank can save it
        torch.save(saved, path)
    assert (saving.kfac.memory_usage()["buffers"] < held) == (kind == "late"), "what was late has arrived"
    dist.barrier()
    resuming.load(torch.load(path))
    assert all(same(each.trained(MORE), expected) for each in (saving, resuming))
    assert bool(resuming.spread()) == (kind == "spread")


def resume_beside_the_oracle(rank: int, world_size: int, kind: str, path: Path) -> None:
    training, saved = training_of(rank, kind), torch.load(path)
    training.load(saved)
    layers = saved["state"]["layers"]
    running = {name: [each["a"].double(), each["g"].double()] for name, each in layers.items()}
    oracle = Oracle(SETTINGS, LR, running=running, frozen=dict(running), steps=SAVED_AFTER)
    assert max(errors_beside(oracle, training, MORE, world_size)) < RELATIVE
    assert oracle.least_scale < 1, "the clip is to be seen at work"


@pytest.mark.parametrize(("kind", "others"), [("seldom", 4), ("eigen", None), ("late", None), ("spread", 1)])
def test_two_ranks_go_on_exactly_and_others_with_the_same_factors(
    kind: str, others: int | None, tmp_path: Path
) -> None:
    args = kind, tmp_path / "checkpoint"
    run_ranks(save_and_resume, 2, args=args)
    if others is not None:
        run_ranks(resume_beside_the_oracle, others, args=args)
