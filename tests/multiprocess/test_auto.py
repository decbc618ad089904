"""`AutoState` on real ranks: it equals plain DDP, loses nothing, and all ranks choose alike."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from crossover_ddp import AutoState, auto_hook
from crossover_ddp._decoupled.race import WARM_UP, most_passes
from tests.harness import in_ranks, inside
from tests.harness.oracles import error_of
from tests.harness.training import Training, Way
from tests.multiprocess.compressed_training import loss_of, network

ROUNDED = tuple(
    arm.name for arm in AutoState(SGD(nn.Linear(1, 1).parameters()), losses="rounded")._race.arms
)


def auto(**options: Any) -> Way:
    return lambda model, optimizers, mutex: (
        AutoState(optimizers[0], mutex=mutex, **options),
        auto_hook,
    )


def training_of(way: Any, rank: int, *, lr: float = 0.05, **options: Any) -> Training:
    return Training(
        way,
        rank,
        module=network(),
        optimizers=lambda model: [SGD(model.parameters(), lr=lr, momentum=0.9)],
        loss=loss_of,
        **{"bucket_cap_mb": 0.02, **options},
    )


def values(training: Training) -> torch.Tensor:
    return torch.cat([value.flatten() for value in training.weights()])


@pytest.mark.torch_version
@pytest.mark.parametrize("losses", ["same", "rounded", "any"])
@in_ranks(2, timeout_s=120.0)
def test_all_ranks_choose_alike_beside_a_slow_rank_that_evaluates_alone(
    rank: int, losses: str
) -> tuple[str, int, str, str]:
    """Steps of rank 1 take three times as long. With "same", bits are those of plain DDP."""
    training = training_of(auto(losses=losses), rank)
    plain = training_of(None, rank) if losses == "same" else None
    passes = 0
    while training.state.chosen is None and passes < most_passes(8) + 40:
        time.sleep(0.001 * (1 + 2 * rank))
        training.step()
        if rank == 0 and passes % 13 == 7:
            time.sleep(0.1)
        if passes % 17 == 3:
            with training.model.no_sync():
                training.backward(1000 + passes)
            training.drop()
        if plain is not None:
            plain.step()
            if passes % 17 == 3:
                plain.drop()
        passes += 1
    chosen = training.state.chosen
    assert passes <= most_passes(len(training.state._race.arms)) + 25
    for _ in range(5):
        training.step()
        if plain is not None:
            plain.step()
    if plain is not None:
        assert torch.equal(values(training), values(plain))
    # Where nothing gains, the model is plain DDP again.
    assert inside.is_hooked(training.state) == (chosen not in ("whole", "whole, small buckets"))
    found = chosen, passes, str(training.state.figures), training_digest(training)
    training.close()
    return found


def training_digest(training: Training) -> str:
    return str(values(training).double().sum().item())


@in_ranks(2, timeout_s=120.0)
def test_all_arms_there_and_back_lose_nothing(rank: int) -> None:
    """With a learning rate of 0 every step has the same gradient; the last step is exact."""
    training = training_of(auto(losses="rounded"), rank, lr=0.0)
    state, race = training.state, training.state._race

    def applied() -> torch.Tensor:
        training.backward(0)
        state.flush()
        gradient = torch.cat([p.grad.flatten().double() for p in training.held])  # type: ignore[union-attr]
        training.update()
        return gradient

    exact = [applied() for _ in range(WARM_UP)][-1]
    total, steps, worst = torch.zeros_like(exact), 0, 0.0
    arms = race.arms
    for arm in (*arms, *reversed(arms), arms[4], arms[5], arms[3]):
        race.is_over = True  # measures nothing meanwhile
        race.choose(arm)
        race.chosen = None  # no verdict, which would make the model plain DDP
        for _ in range(6):  # of which the first may have new buckets, which are exact at first
            total += applied()
            steps += 1
            worst = max(worst, float((total - steps * exact).norm() / exact.norm()))
    assert state.state_dict()["codec"]["residuals"], "something is owed"
    race.choose(arms[0])
    total += applied()
    steps += 1
    assert float((total - steps * exact).norm() / (steps * exact.norm())) < 1e-6
    assert 1e-4 < worst < 0.05, "codecs were used"
    assert not any(each.any() for each in state.state_dict()["codec"]["residuals"].values())
    assert state.stats()["codec"] is None
    training.close()


@in_ranks(2, timeout_s=120.0)
def test_a_resumed_job_goes_on_with_the_choice(rank: int) -> list[str]:
    """Bit for bit, except that coded buckets for deferring come a few steps later."""
    found = []
    for name in (*ROUNDED[:3], ROUNDED[4], ROUNDED[5]):
        training = training_of(auto(losses="rounded"), rank)
        training.run(3)
        by_name = {arm.name: arm for arm in training.state._race.arms}
        training.state._race.choose(by_name[name])
        training.run(4)
        saved = copy.deepcopy(training.state.checkpoint())
        assert saved["hook"]["arm"] == name
        resumed = training_of(auto(losses="rounded"), rank)
        resumed.state.restore(saved)
        resumed.steps = training.steps
        for each in (training, resumed):
            each.run(5)
            assert each.state.chosen == name
        tolerance = 1e-3 if name in ROUNDED[3:] else 0.0
        torch.testing.assert_close(
            values(training), values(resumed), rtol=tolerance, atol=tolerance
        )
        found.append(training_digest(training))
        for each in (training, resumed):
            each.close()
    return found


@in_ranks(2)
def test_ranks_whose_arms_or_choices_differ_are_refused(rank: int) -> None:
    training = training_of(auto(losses=["same", "rounded"][rank]), rank)
    assert "expected the same arms on all ranks" in error_of(training.step)
    training = training_of(auto(), rank)
    if rank:
        training.state.load_state_dict({"arm": "whole"})
    assert "expected the same chosen arm on all ranks" in error_of(training.step)


@in_ranks(2)
def test_float64_gradients_are_refused_at_once_where_codecs_may_race(rank: int) -> None:
    for losses, text in (("same", "no error"), ("rounded", "losses='same'")):
        training = Training(
            auto(losses=losses),
            rank,
            module=nn.Linear(6, 6).double(),
            loss=lambda model, rank, step: model(torch.ones(2, 6).double()).sum(),
        )
        assert text in error_of(training.step)


@in_ranks(2, timeout_s=120.0)
def test_steps_that_become_slower_lead_to_another_race_on_all_ranks(rank: int) -> list[Any]:
    """Deferring was faster at first; later it is not."""
    training = training_of(auto(), rank)
    inside.pretend_times(training.state, deferred_s=1.0, whole_s=2.0)
    training.run(70)
    chosen = [training.state.chosen]
    inside.pretend_times(training.state, deferred_s=3.0, whole_s=2.0)
    training.run(370)
    chosen.append(training.state.chosen)
    training.close()
    assert chosen == ["deferred", "whole"]
    return chosen
