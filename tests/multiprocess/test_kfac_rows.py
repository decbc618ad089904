"""A layer that dominates its bucket, and has a part of its rows on each rank, against the float64 computation."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from crossover_ddp import kfac_hooks
from crossover_ddp._kfac import settings as kfac_settings
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.kfac_oracle import Oracle, Settings, step_for_all
from tests.multiprocess.kfac_training import LR, OUTPUTS, WIDTH, Training, batch, mlp
from tests.multiprocess.test_kfac import relative_error

SETTINGS = Settings(factor_update_steps=2, inv_update_steps=3, kl_clip=1e-4)
WIDE = {"tall": (WIDTH, 300, 230, OUTPUTS), "wide": (WIDTH, 230, 300, OUTPUTS)}
STEPS = 6
RELATIVE = 1e-4
SPREAD = [(2, "wide"), (3, "tall"), *([(2, "tall"), (3, "wide")] if IN_CAMPAIGN else [])]


class Seen(NamedTuple):
    """Of one rank, by step: greatest relative error, gradients, spread layers."""

    errors: list[float]
    gradients: list[dict[str, torch.Tensor]]
    spread: list[list[str]]


def train(rank: int, world_size: int, widths: tuple[int, ...]) -> Seen:
    seen = Seen([], [], [])
    training = training_of(rank, widths, 0.1)
    oracle = Oracle(SETTINGS, LR)
    for step in range(STEPS):
        replicas = [copy.deepcopy(training.model.module).double() for _ in range(0 if rank else world_size)]
        training.backward()
        batches = [(x.double(), y) for x, y in (batch(each, step) for each in range(world_size))]
        expected = step_for_all(oracle, replicas, batches, training.model.module)
        seen.errors.append(relative_error(training.model.module, expected))
        seen.gradients.append(training.gradients())
        seen.spread.append([line.split(":")[0].strip() for line in spread_lines(training)])
        training.optimizer.step()
    assert oracle.least_scale < 1, "the clip is to be seen at work"
    return seen


def training_of(rank: int, widths: tuple[int, ...], cap_mb: float = 25.0, **options: Any) -> Training:
    settings = {
        "damping": SETTINGS.damping,
        "factor_decay": SETTINGS.factor_decay,
        "kl_clip": SETTINGS.kl_clip,
        "factor_update_steps": SETTINGS.factor_update_steps,
        "inv_update_steps": SETTINGS.inv_update_steps,
    }
    return Training(rank, mlp(*widths), ddp={"bucket_cap_mb": cap_mb}, **{**settings, **options})


def spread_lines(training: Training) -> list[str]:
    return [line for line in training.state.report().splitlines() if "spread over all ranks" in line]


@pytest.mark.parametrize(("world_size", "widths"), SPREAD)
def test_a_dominant_layer_is_spread_to_the_same_direction(world_size: int, widths: str) -> None:
    torch.set_num_threads(1)
    ranks = run_ranks(train, world_size, args=(WIDE[widths],))
    for seen in ranks:
        assert max(seen.errors) < RELATIVE, seen.errors
        assert seen.spread == [["2"]] * STEPS
        for ours, theirs in zip(seen.gradients, ranks[0].gradients, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def train_otherwise(rank: int, world_size: int, options: dict[str, Any]) -> list[float]:
    """Return how far the spread layer's gradients are, relative to the greatest, from those of its owner."""
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        # With local factors the owner decides whose they are.
        patch.setattr(kfac_hooks, "place", lambda layers, *_: [0] * len(layers))
        spread = training_of(rank, WIDE["wide"], **options)
        patch.setattr(kfac_settings, "spreads", lambda *costs: False)
        whole = training_of(rank, WIDE["wide"], **options)
    for _ in range(STEPS):
        spread.step()
        whole.step()
        pairs = zip(spread.gradients().values(), whole.gradients().values(), strict=True)
        errors.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    assert len(spread_lines(spread)) == 1
    assert not spread_lines(whole)
    return errors


@pytest.mark.parametrize("options", [{"kl_clip": None}, {"factors": "local"}], ids=str)
def test_a_layer_is_spread_without_a_clip_and_with_local_factors_too(options: dict[str, Any]) -> None:
    for errors in run_ranks(train_otherwise, 2, args=(options,)):
        assert errors[0] == 0.0, "the first step makes the solvers"
        assert 0.0 < max(errors) < RELATIVE, errors


def train_after_a_bad_start(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    """Return of each step whether the layer was spread afterwards, and whether all gradients were finite."""
    training, found = training_of(rank, WIDE["tall"]), []
    inputs, targets = batch(rank, 0)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        rough = inputs * float("nan") if step == 0 else inputs
        torch.nn.functional.cross_entropy(training.model(rough), targets).backward()
        finite = all(bool(each.isfinite().all()) for each in training.gradients().values())
        found.append((bool(spread_lines(training)), finite))
    return found


def test_a_layer_whose_first_factors_were_no_numbers_is_spread_once_it_has_a_solver() -> None:
    for found in run_ranks(train_after_a_bad_start, 2):
        assert found[0] == (False, False)
        # The next factors are those of step 2; they come behind its gradients.
        assert found[1:] == [(False, True)] * 2 + [(True, True)] * (STEPS - 3)


def train_on_ranks_that_round_differently(rank: int, world_size: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kfac_settings, "rounding", lambda shapes, device: f"of rank {rank}")
        training = training_of(rank, WIDE["tall"])
    for _ in range(2):
        training.step()
    return spread_lines(training)


def train_in_its_eigenbasis(rank: int, world_size: int) -> list[str]:
    training = training_of(rank, WIDE["wide"], solver="eigen")
    training.trained(2)
    return spread_lines(training)


def test_in_its_eigenbasis_no_layer_is_spread() -> None:
    assert run_ranks(train_in_its_eigenbasis, 2) == [[], []]


def test_ranks_that_round_differently_spread_nothing() -> None:
    assert run_ranks(train_on_ranks_that_round_differently, 2) == [[], []]


def save_and_go_on(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    training = training_of(rank, WIDE["tall"])
    training.trained(2)
    training.save(path, writer=1)
    return training.trained(4)


def resume(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    training = training_of(rank, WIDE["tall"])
    training.load(path)
    found = training.trained(4)
    assert len(spread_lines(training)) == (world_size > 1)
    return found


def test_spread_layers_go_on_exactly_after_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "kfac.pt")
    expected = run_ranks(save_and_go_on, 2, args=(path,))
    for ours, theirs in zip(run_ranks(resume, 2, args=(path,)), expected, strict=True):
        for got, wanted in zip(ours, theirs, strict=True):
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    (alone,) = run_ranks(resume, 1, args=(path,))
    assert all(bool(each.isfinite().all()) for of_step in alone for each in of_step.values())
