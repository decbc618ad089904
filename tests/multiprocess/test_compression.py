"""Codecs between real ranks: the same parameters on all of them, by every state that takes a codec."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import CodecPlan, CompressedState, Half, Int8, PerPair, SIDCo, Threshold
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.training import Training, losses_of
from tests.multiprocess.compressed_training import CODECS, Coded, way_of
from tests.multiprocess.identity_codec import Identity

STEPS = 200 if IN_CAMPAIGN else 7  # of which five are deferred, one of them with two micro-batches
TRIAL_STEPS = 34  # after which it is decided whether to defer


@pytest.mark.parametrize("world_size", [2, 3, 4])
@in_ranks()
def test_parameters_are_those_of_the_codec_alone(rank: int, world_size: int) -> list[list[str]]:
    """What each codec makes of the parameters, by each state; on two nodes one for each pair of ranks."""
    kinds: tuple[str, ...] = ("compressed", "decoupled")
    codecs: dict[str, Any] = {**CODECS}
    if world_size == 4:
        kinds = "compressed", "crossover", "decoupled", "kfac"
        codecs = {
            "per pair": (PerPair.by_node([0, 0, 1, 1], far=SIDCo(0.1), near=Half()), Int8(64))
        }
    found = {
        name: [Coded(kind, rank, codec).run(STEPS).digest() for kind in kinds]
        for name, codec in codecs.items()
    }
    if world_size == 2:  # some steps are deferred, some are not
        ways: list[Any] = [("compressed", {}), ("decoupled", {"defer": "auto"})]
        made = [Coded(kind, rank, CODECS["pair"], **settings) for kind, settings in ways]
        found["auto"] = [each.run(TRIAL_STEPS).digest() for each in made]
    for alone, *by_others in found.values():
        if world_size == 4:
            assert by_others.pop() != alone, "K-FAC"
        assert set(by_others) == {alone}
    assert len({alone for alone, *_ in found.values()}) == len(found)
    return [*found.values()]


@pytest.mark.parametrize(
    ("default", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@in_ranks(2)
def test_codecs_do_not_depend_on_the_default_dtype(
    rank: int, default: torch.dtype, dtype: torch.dtype
) -> None:
    for codec in (Int8(), Half(), SIDCo(0.1), Threshold(0.1)):
        way = way_of("compressed", codec=codec)
        found, usual = (losses_of(way, rank, dtype, each) for each in (default, torch.float32))
        assert found == usual, codec


@pytest.mark.parametrize("kind", ["crossover", "decoupled"])
@in_ranks(3)
def test_a_drained_step_leaves_nothing_behind(rank: int, kind: str) -> str:
    training = Coded(kind, rank, CODECS["pair"]).run(4)
    assert 0.1 < training.stats_of_codec()["rate"] < 0.4
    for is_left in (True, False):
        assert any(each.any() for each in training.residuals().values()) == is_left
        training.state.drain()
        training.run(1)
    return training.run(1).digest()


@dataclass(frozen=True)
class Late(SIDCo):
    """Rank 0, which runs out of inputs, is behind: the others tell it of their next step while it decodes."""

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(0.01 * (dist.get_rank() == 0))
        super().add_decoded(message, out)


@in_ranks(3)
def test_ranks_may_run_out_of_inputs(rank: int) -> dict[str, str]:
    """Let rank 0 run out of inputs some steps early, twice."""
    steps, early, found = 6, 3, {}  # the third step is the first that is deferred
    for name, codec in {"sidco": SIDCo(0.05), "late": Late(0.05)}.items():
        training = Coded("decoupled", rank, codec)
        for epoch in range(2):
            with Join([training.model]):
                for number in range(steps + early * (rank > 0)):
                    training.drop()
                    training.loss(10 * epoch + number).backward()
                    training.optimizer.step()
        found[name] = training.digest()
    assert found["late"] == found["sidco"]
    return found


@in_ranks(2)
def test_residuals_follow_the_scale_of_the_loss(rank: int) -> None:
    results = []
    for factors in ([1.0] * 4, [1.0, 1.0, 4.0, 0.5]):
        scale = [1.0]
        training = Coded("compressed", rank, SIDCo(0.05), loss_scale=lambda scale=scale: scale[0])
        for step, scale[0] in enumerate(factors):
            training.model.zero_grad()
            (training.loss(step) * scale[0]).backward()
        results.append(torch.cat([p.grad.flatten() for p in training.held]) / scale[0])
    assert float(results[0].abs().max()) > 1e-3
    assert float((results[0] - results[1]).abs().max()) < 1e-6


@in_ranks(2)
def test_what_a_codec_cannot_do_is_refused(rank: int) -> None:
    table = PerPair.by_node([0, 0, 1], far=Int8()), Int8()
    with pytest.raises(
        UnsupportedConfigurationError, match="a row for each of 2 ranks, got 3 rows"
    ):
        Coded("compressed", rank, table).backward()
    module, ones = nn.Linear(4, 4, dtype=torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16)
    way = way_of("kfac", codec=Int8())
    training = Training(way, rank, module=module, loss=lambda model, *_: model(ones).sum())
    with pytest.raises(UnsupportedConfigurationError, match=r"of torch\.float32, got dtype"):
        training.run(4)


@in_ranks(3)
def test_all_ranks_have_the_plan_of_rank_0(rank: int, world_size: int) -> list[CodecPlan]:
    candidates, plans = (None, Int8()), []
    with pytest.raises(UnsupportedConfigurationError, match="expected recorded steps on all ranks"):
        CompressedState(None).plan_codec(candidates)
    for kind, codec in (("compressed", None), ("compressed", Int8()), ("crossover", None)):
        state = Coded(kind, rank, codec).run(4).state
        plan = state.plan_codec(candidates)
        assert [codec for codec, _, _ in plan.options] == [*candidates]
        assert [rate for _, rate, _ in plan.options] == pytest.approx([1.0, 0.254], abs=0.002)
        assert plan.step_s in [step_s for each, _, step_s in plan.options if each == plan.codec]
        assert min(step_s for *_, step_s in plan.options) > 0
        plans.append(plan)
    with pytest.raises(ValueError, match="got a PerPair among them"):
        state.plan_codec([(PerPair.by_node(range(world_size), far=Int8()), Int8())])
    with pytest.raises(UnsupportedConfigurationError, match="whose processor time is not known"):
        state.plan_codec([None, Identity()])
    return plans


@in_ranks(1)
def test_one_rank_has_nothing_to_plan(rank: int) -> None:
    state = Coded("compressed", rank).run(4).state
    with pytest.raises(UnsupportedConfigurationError, match="expected at least two ranks"):
        state.plan_codec()
