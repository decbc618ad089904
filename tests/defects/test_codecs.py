"""Known defects of codecs: shared states, other arguments on ranks, residuals, plans, copies."""

import gc
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.codecs import CompressedState, Half, Int8, PerPair, SIDCo, compressed_hook
from tests.harness import in_ranks
from tests.harness.oracles import error_of, heard
from tests.harness.training import Training
from tests.multiprocess.compressed_training import Coded, way_of
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


def compressed(
    rank: int, state: Any, module: nn.Module | None = None, hook: Any = None, **given: Any
) -> Any:
    given.setdefault("loss", lambda model, *place: model(gradient(*place)))
    return Training(
        lambda *_: (state, hook or compressed_hook), rank, module=module or Weights(), **given
    )


def walk(training: Training, step: int) -> torch.Tensor:
    training.drop()
    training.backward(step)
    return training.model.module.weight.grad.clone()  # type: ignore[no-any-return]


@pytest.mark.defect("codecs-S3", "codecs-S16", "strangers-14")
@in_ranks(2)
def test_a_plan_looks_at_the_users_steps_alone(rank: int) -> None:
    """A user who plans twice gets the same plan, and no warning of a gc.freeze() that nobody has called."""
    state = CompressedState(None)
    training = compressed(rank, state)
    with heard() as said:
        for step in range(4):
            time.sleep(0.1)  # what the step computes, with any machine
            walk(training, step)
        assert min(state.plan_codec([None, Half()]).compute_s for _ in range(2)) > 0.05
    assert not any("gc.freeze" in each for each in said)


@pytest.mark.defect("codecs-S5")
@pytest.mark.parametrize("choices", [[Int8(), Half()], [None, Int8()]], ids=["other", "none"])
@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled"])
@in_ranks(2)
def test_ranks_with_other_codecs_are_told(rank: int, name: str, choices: list[Any]) -> None:
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
    made, told = [Mine(*arguments) for _ in range(4)], [None, None]
    dist.all_gather_object(told, repr(made[0]))
    return next(each for each in made if rank == 0 or repr(each) != told[0])


@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled", "kfac"])
@in_ranks(2)
def test_a_codec_of_a_users_own_needs_no_repr(rank: int, name: str) -> None:
    one = other_than_rank_0s(rank)
    choices = (
        [one]
        if name == "kfac"
        else [one, (Int8(), one), (PerPair(((one, None), (None, one))), Int8())]
    )
    for codec in choices:
        Coded(name, rank, codec).run(2)
    message = error_of(lambda: Coded(name, rank, other_than_rank_0s(rank, rank)).run(2))
    assert message.startswith("expected the same codec on all ranks, got codec by rank {0: ")
    assert "'note': 0" in message and "'note': 1" in message


@in_ranks(2)
def test_complex_matrices_keep_their_residuals(rank: int) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(4, 6, dtype=torch.complex64, generator=generator)).real.sum()  # type: ignore[no-any-return]

    state, plain, kind = CompressedState(SIDCo(0.05)), CompressedState(None), torch.complex64
    ours, exact = (
        compressed(rank, each, nn.Linear(6, 6, dtype=kind), loss=loss) for each in (state, plain)
    )
    total = sum(walk(ours, step) - walk(exact, step) for step in range(4))
    (kept,) = state.state_dict()["residuals"].values()
    assert kept.numel() == 2 * 6 * 6 and kept.any()
    state.drain()
    assert float((total + walk(ours, 4) - walk(exact, 4)).abs().max()) < 1e-3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.elsewhere = Weights(), Weights()

    def forward(self, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        return self.used(gradient) + weight * self.elsewhere(gradient)


@pytest.mark.defect("codecs-S6")
@pytest.mark.parametrize(("unused", "drained"), [(True, False), (True, True), (False, True)])
@in_ranks(2)
def test_residuals_wait_while_unused_and_arrive_once(
    rank: int, unused: bool, drained: bool
) -> None:
    """What came before a checkpoint, and what one rank has kept since, add up, over any number of checkpoints.

    Where no parameter may be unused, a gradient of zeros takes its residual along.
    """
    uses = [1, 1, 1, 0, 0, 0, rank == 0, rank == 0, 0, 0, 1, unused or rank == 0]
    state = CompressedState(SIDCo(0.05))
    training = compressed(
        rank,
        state,
        Branches(),
        loss=lambda model, rank, step: model(gradient(rank, step), float(uses[step])),
        bucket_cap_mb=25,
        find_unused_parameters=unused,
    )
    arrived = torch.zeros(40, 40)
    for step in range(len(uses)):
        if step in (5, 9) or (drained and step == 3):
            state.checkpoint(())
        if step == 7 or (drained and step == len(uses) - 1):
            state.drain()
        training.drop()
        training.backward(step)
        arrived += training.model.module.elsewhere.weight.grad
    kept = state.state_dict()["residuals"].get("elsewhere.weight", torch.zeros(1600))
    assert bool(kept.any()) is not drained
    left = sum(use * gradient(rank, step) for step, use in enumerate(uses)) - kept.view(40, 40)
    dist.all_reduce(left)
    assert float((left / 2 - arrived).norm()) < 1e-3


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("codec", [SIDCo(0.05), (PerPair.by_node([0, 1], far=Int8()), Int8())])
@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled"])
def test_one_rank_takes_along_once_what_it_loads(name: str, codec: Any) -> None:
    """A user who goes on with one rank loses nothing, and later checkpoints do not hold it again."""
    training = Training(
        way_of(name, codec=codec),
        module=Weights(),
        loss=lambda model, *place: model(gradient(*place)),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=1.0)],
    )
    kept, applied = gradient(0, 9), torch.zeros(40, 40)
    for _ in range(2):
        given = {"residuals": {"weight": kept.flatten()}, "loss_scale": None}
        training.state.load_state_dict({"codec": given} if name == "decoupled" else given)
        applied += kept + gradient(0, training.steps) + gradient(0, training.steps + 1)
        training.run(2)
        saved = training.state.state_dict()
        assert saved.get("codec", saved)["residuals"] == {}
        torch.testing.assert_close(training.model.module.weight, -applied)


@pytest.mark.defect("codecs-S8")
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "another."])
@in_ranks(2)
def test_loaded_residuals_arrive_or_are_refused(rank: int, prefix: str) -> None:
    """A user who resumes in another wrapping gets what was left out, or is told that the names are others'."""
    former, state = CompressedState(SIDCo(0.05)), CompressedState(SIDCo(0.05))
    training, last = compressed(rank, former), STEPS - 1
    total = sum(walk(training, step) for step in range(last))
    with pytest.raises(ValueError, match=r"'residuals' and 'loss_scale', got keys \[\]; "):
        state.load_state_dict({})
    saved = former.state_dict()
    renamed = {f"{prefix}{name}": each for name, each in saved["residuals"].items()}
    state.load_state_dict({**saved, "residuals": renamed})
    training = compressed(rank, state)
    if prefix == "another.":
        assert "another.weight" in error_of(lambda: walk(training, last))
        return
    mean = sum(gradient(each, step) for step in range(STEPS) for each in range(2)) / 2
    assert float((total + walk(training, last) - mean).norm()) < 1e-3


@pytest.mark.defect("codecs-S17")
@in_ranks(2)
def test_a_hidden_model_is_not_searched_for_in_every_step(rank: int) -> None:
    training, searches = compressed(rank, CompressedState(Int8())), []
    gc.freeze()
    with mock.patch.object(gc, "get_referrers", side_effect=gc.get_referrers) as search:
        for step in range(4):
            walk(training, step)
            searches.append(search.call_count)
    gc.unfreeze()
    assert 0 < searches[1] == searches[2] == searches[3]
