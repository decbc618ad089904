"""Known defects of codecs: shared states, other arguments on ranks, residuals, plans, copies."""

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, crossover_hook
from crossover_ddp.codecs import CompressedState, Half, Int8, PerPair, SIDCo, compressed_hook
from tests.harness import in_ranks
from tests.harness.oracles import error_of, heard
from tests.multiprocess.compressed_training import Coded
from tests.multiprocess.identity_codec import Identity

STEPS = 6


class Weights(nn.Module):
    """A matrix whose gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 40))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(40, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def walk(model: DistributedDataParallel, rank: int, step: int) -> torch.Tensor:
    """Return what the rank's optimizer would see."""
    model.zero_grad()
    model(gradient(rank, step)).backward()
    return model.module.weight.grad.clone()


def compressed(state: CompressedState, module: nn.Module | None = None, **options: Any) -> Any:
    model = DistributedDataParallel(module or Weights(), **options)
    model.register_comm_hook(state, compressed_hook)
    return model


@pytest.mark.defect("codecs-S2", "strangers-9")
@in_ranks(2)
def test_one_state_serves_one_model_or_loses_nothing(rank: int) -> None:
    state = CompressedState(SIDCo(0.05))
    models = [compressed(state) for _ in range(2)]

    def train() -> None:
        for step in range(STEPS):
            for model in models:
                walk(model, rank, step)

    assert "a state for each model" in error_of(train)


@pytest.mark.defect("codecs-S3", "codecs-S16", "strangers-14")
@in_ranks(2)
def test_a_plan_looks_at_the_users_steps_alone(rank: int) -> None:
    """A user who plans twice gets the same plan, and no warning of a gc.freeze() that nobody has called."""
    state = CompressedState(None)
    model = compressed(state)
    with heard() as said:
        for step in range(4):
            time.sleep(0.1)  # what the step computes, with any machine
            walk(model, rank, step)
        assert min(state.plan_codec([None, Half()]).compute_s for _ in range(2)) > 0.05
    assert not any("gc.freeze" in each for each in said)


@pytest.mark.defect("codecs-S5")
@pytest.mark.parametrize("choices", [[Int8(), Half()], [None, Int8()]], ids=["other", "none"])
@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled"])
@in_ranks(2)
def test_ranks_with_other_codecs_are_told(rank: int, name: str, choices: list[Any]) -> None:
    """A user whose ranks have different codecs gets an error on all ranks, and no abort of the process."""
    message = error_of(lambda: Coded(name, rank, choices[rank]).run(3))
    assert message.startswith("expected the same codec on all ranks, got codec by rank {0: ")
    assert "Int8(block=256)" in message


class Mine:
    """A codec of a user's own that does not say what it is."""

    multiple = 1
    nbytes, encode, add_decoded = Identity.nbytes, Identity.encode, Identity.add_decoded

    def __init__(self, note: int = 0) -> None:
        self.note = note


def other_than_rank_0s(rank: int, *arguments: Any) -> Mine:
    """Return a codec that prints otherwise than that of rank 0."""
    made, told = [Mine(*arguments) for _ in range(4)], [None, None]
    dist.all_gather_object(told, repr(made[0]))
    return next(each for each in made if rank == 0 or repr(each) != told[0])


@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled", "kfac"])
@in_ranks(2)
def test_a_codec_of_a_users_own_needs_no_repr(rank: int, name: str) -> None:
    one = other_than_rank_0s(rank)
    choices = [one] if name == "kfac" else [one, (Int8(), one), (PerPair(((one, None), (None, one))), Int8())]
    for codec in choices:
        Coded(name, rank, codec).run(2)
    message = error_of(lambda: Coded(name, rank, other_than_rank_0s(rank, rank)).run(2))
    assert message.startswith("expected the same codec on all ranks, got codec by rank {0: ")
    assert "'note': 0" in message and "'note': 1" in message


@in_ranks(2)
def test_complex_matrices_keep_their_residuals(rank: int) -> None:
    state = CompressedState(SIDCo(0.05))
    model = compressed(state, nn.Linear(6, 6, dtype=torch.complex64))

    def walked(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(4, 6, dtype=torch.complex64, generator=generator)
        model.zero_grad()
        model(inputs).real.sum().backward()
        return model.module.weight.grad.clone()  # type: ignore[no-any-return]

    with_codec = sum(walked(step) for step in range(4))
    (kept,) = state.state_dict()["residuals"].values()
    assert kept.numel() == 2 * 6 * 6 and kept.any()
    state.drain()
    with_codec += walked(4)
    state.checkpoint(())
    model = compressed(CompressedState(None), nn.Linear(6, 6, dtype=torch.complex64))
    exact = sum(walked(step) for step in range(5))
    assert float((with_codec - exact).abs().max()) < 1e-3


@pytest.mark.usefixtures("process_group")
def test_a_state_dict_of_nothing_is_refused_by_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"'residuals' and 'loss_scale', got keys \[\]; "):
        CompressedState(Int8()).load_state_dict({})


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.elsewhere = Weights(), Weights()

    def forward(self, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        return self.used(gradient) + weight * self.elsewhere(gradient)


@pytest.mark.defect("codecs-S6")
@in_ranks(2)
def test_a_drained_step_leaves_no_residual(rank: int) -> None:
    state = CompressedState(SIDCo(0.05))
    model = compressed(state, Branches())
    for step in range(4):
        if step == 3:
            state.drain()
        model.zero_grad()
        model(gradient(rank, step), 1.0 if step < 3 or rank == 0 else 0.0).backward()
    assert not any(each.any() for each in state.state_dict()["residuals"].values())


@pytest.mark.defect("codecs-S8")
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "another."])
@in_ranks(2)
def test_loaded_residuals_arrive_or_are_refused(rank: int, prefix: str) -> None:
    """A user who resumes in another wrapping gets what was left out, or is told that the names are others'."""
    former, state = CompressedState(SIDCo(0.05)), CompressedState(SIDCo(0.05))
    model = compressed(former)
    total = sum(walk(model, rank, step) for step in range(STEPS - 1))
    saved = former.state_dict()
    renamed = {f"{prefix}{name}": each for name, each in saved["residuals"].items()}
    state.load_state_dict({**saved, "residuals": renamed})
    model = compressed(state)
    if prefix == "another.":
        assert "another.weight" in error_of(lambda: walk(model, rank, STEPS - 1))
    else:
        everything = [gradient(each, step) for step in range(STEPS) for each in range(2)]
        mean = torch.stack(everything).sum(0) / 2
        assert float((total + walk(model, rank, STEPS - 1) - mean).norm()) < 1e-3


@pytest.mark.defect("codecs-S11", "strangers-13", "turns-11")
@pytest.mark.parametrize("kind", [CompressedState, CrossoverState])
@in_ranks(2)
def test_a_copy_keeps_the_loss_scale(rank: int, kind: type) -> None:
    """A user's copied or pickled state scales residuals by the loss's scale, as the original does."""
    state = kind(codec=Int8(), loss_scale=1024.0, compare_replicas=False)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        model = DistributedDataParallel(Weights())
        model.register_comm_hook(copied, crossover_hook if kind is CrossoverState else compressed_hook)
        walk(model, rank, 0)
        assert copied.state_dict()["loss_scale"] == 1024.0 and not copied.compare_replicas
        if kind is CrossoverState:
            copied.close()


@pytest.mark.defect("codecs-S17")
@in_ranks(2)
def test_a_hidden_model_is_not_searched_for_in_every_step(rank: int) -> None:
    model = compressed(CompressedState(Int8()))
    gc.freeze()
    asked, get_referrers = [0], gc.get_referrers

    def counted(*objects: Any) -> list[Any]:
        asked[-1] += 1
        return get_referrers(*objects)

    gc.get_referrers = counted  # type: ignore[assignment]
    try:
        for step in range(4):
            walk(model, rank, step)
            asked.append(0)
    finally:
        gc.get_referrers = get_referrers
        gc.unfreeze()
    assert asked[0] > 0 and asked[2:] == [0, 0, 0]
