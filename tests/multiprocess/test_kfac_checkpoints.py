"""K-FAC's checkpoints: what two ranks save goes on exactly with two, and on the same path with one or four."""

from dataclasses import asdict, replace
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


def save_and_resume(rank: int, world_size: int, directory: str) -> dict[str, list[bool]]:
    """Tell by kind whether going on after saving, and resuming, are as if nothing was saved."""
    found = {}
    for kind in KINDS:
        path = f"{directory}/{kind}.pt"
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
        found[kind] = [same(each.trained(MORE), expected) for each in (saving, resuming)]
        assert bool(resuming.spread()) == (kind == "spread")
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, list[bool]]]]:
    path = str(tmp_path_factory.mktemp("checkpoint"))
    return path, run_ranks(save_and_resume, 2, args=(path,))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_go_on_exactly(kind: str, saved: tuple[str, list[dict[str, list[bool]]]]) -> None:
    assert [of_rank[kind] for of_rank in saved[1]] == [[True, True]] * 2


def resume_beside_the_oracle(rank: int, world_size: int, directory: str, kind: str) -> list[float]:
    """Return the greatest relative error of each step."""
    training = training_of(rank, kind)
    saved = torch.load(f"{directory}/{kind}.pt")
    training.load(saved)
    layers = saved["state"]["layers"]
    running = {name: [each["a"].double(), each["g"].double()] for name, each in layers.items()}
    oracle = Oracle(SETTINGS, LR, running=running, frozen=dict(running), steps=SAVED_AFTER)
    errors = list(errors_beside(oracle, training, MORE, world_size))
    assert oracle.least_scale < 1, "the clip is to be seen at work"
    return errors


@pytest.mark.parametrize(("world_size", "kind"), [(1, "spread"), (4, "seldom")])
def test_any_number_of_ranks_goes_on_with_the_same_factors(
    world_size: int, kind: str, saved: tuple[str, list[dict[str, list[bool]]]]
) -> None:
    for of_rank in run_ranks(resume_beside_the_oracle, world_size, args=(saved[0], kind)):
        assert max(of_rank) < RELATIVE, of_rank
