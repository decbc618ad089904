"""Codecs between real ranks, by every state that takes a codec: parameters, settings, plans.

Residuals: tests/multiprocess/test_residuals.py.
"""

import gc
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import CodecPlan, CompressedState, Half, Int8, PerPair, SIDCo, Threshold
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.oracles import error_of, heard
from tests.harness.training import Training, losses_of
from tests.multiprocess.compressed_training import (
    CODECS,
    Coded,
    compressed,
    gradient_after,
    way_of,
)
from tests.multiprocess.identity_codec import Identity

# Five of seven steps are deferred, one of them with two micro-batches.
STEPS = 200 if IN_CAMPAIGN else 7
# The race of ``defer="auto"`` has tried both arms, or has ended.
RACE_STEPS = 34


@pytest.mark.parametrize("world_size", [2, 3, 4])
@in_ranks()
def test_every_state_gives_the_parameters_of_the_codec_alone(
    rank: int, world_size: int
) -> list[list[str]]:
    """Four ranks are on two nodes, with a codec for each pair of ranks.

    Two ranks that do not defer exchange messages of a single codec in one hop, so they round once.
    """
    kinds: tuple[str, ...] = ("compressed", "crossover", "decoupled")
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
    if world_size == 2:  # a race defers some steps and not others
        ways: list[Any] = [("compressed", {}), ("decoupled", {"defer": "auto"})]
        made = [Coded(kind, rank, CODECS["pair"], **settings) for kind, settings in ways]
        found["auto"] = [each.run(RACE_STEPS).digest() for each in made]
    for name, (alone, *by_others) in found.items():
        if world_size == 4:
            assert by_others.pop() != alone, "K-FAC changes the directions"
        if world_size == 2 and name not in ("identity", "pair", "auto"):
            assert by_others.pop() != alone
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
def test_losses_do_not_depend_on_the_default_dtype(
    rank: int, default: torch.dtype, dtype: torch.dtype
) -> None:
    for codec in (Int8(), Half(), SIDCo(0.1), Threshold(0.1)):
        way = way_of("compressed", codec=codec)
        found, usual = (losses_of(way, rank, dtype, each) for each in (default, torch.float32))
        assert found == usual, codec


@pytest.mark.parametrize("kind", ["crossover", "decoupled"])
@in_ranks(3)
def test_a_drained_step_leaves_no_residuals(rank: int, kind: str) -> str:
    training = Coded(kind, rank, CODECS["pair"]).run(4)
    assert 0.1 < training.stats_of_codec()["rate"] < 0.4
    for is_left in (True, False):
        assert any(each.any() for each in training.residuals().values()) == is_left
        training.state.drain()
        training.run(1)
    return training.run(1).digest()


@dataclass(frozen=True)
class Late(SIDCo):
    """Delays rank 0, which runs out of inputs: the others begin a step while it still decodes."""

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(0.01 * (dist.get_rank() == 0))
        super().add_decoded(message, out)


@in_ranks(3)
def test_ranks_may_run_out_of_inputs(rank: int) -> dict[str, str]:
    """Let rank 0 run out of inputs some steps early, twice."""
    steps, early, found = 6, 3, {}  # from the third step on they are deferred
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
def test_wrong_tables_and_dtypes_are_refused(rank: int) -> None:
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
    """The harness checks that all ranks return the same plans."""
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
def test_a_plan_for_one_rank_is_refused(rank: int) -> None:
    state = Coded("compressed", rank).run(4).state
    with pytest.raises(UnsupportedConfigurationError, match="expected at least two ranks"):
        state.plan_codec()


@pytest.mark.defect("codecs-S3", "codecs-S16", "strangers-14")
@in_ranks(2)
def test_plans_ignore_their_own_probes_and_do_not_warn(rank: int) -> None:
    """A user who plans twice gets the same plan, and no warning of a gc.freeze()."""
    state = CompressedState(None)
    training = compressed(rank, state)
    with heard() as warnings:
        for step in range(4):
            time.sleep(0.1)  # the step's computation, on any machine
            gradient_after(training, step)
        assert min(state.plan_codec([None, Half()]).compute_s for _ in range(2)) > 0.05
    assert not any("gc.freeze" in each for each in warnings)


@pytest.mark.defect("codecs-S5")
@pytest.mark.parametrize("choices", [[Int8(), Half()], [None, Int8()]], ids=["other", "none"])
@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled"])
@in_ranks(2)
def test_ranks_with_other_codecs_are_refused(rank: int, name: str, choices: list[Any]) -> None:
    message = error_of(lambda: Coded(name, rank, choices[rank]).run(3))
    assert message.startswith("expected the same codec on all ranks, got codec by rank {0: ")
    assert "Int8(block=256)" in message


class WithoutRepr:
    """A codec of a user's own, with the ``repr`` of `object`, which holds an address."""

    multiple = 1
    nbytes, encode, add_decoded = Identity.nbytes, Identity.encode, Identity.add_decoded

    def __init__(self, note: int = 0) -> None:
        self.note = note


def at_another_address_than_rank_0s(rank: int, *arguments: Any) -> WithoutRepr:
    made = [WithoutRepr(*arguments) for _ in range(4)]
    reprs = [None, None]
    dist.all_gather_object(reprs, repr(made[0]))
    return next(each for each in made if rank == 0 or repr(each) != reprs[0])


@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled", "kfac"])
@in_ranks(2)
def test_a_codec_of_a_users_own_needs_no_repr(rank: int, name: str) -> None:
    """Ranks compare its class and its attributes."""
    own = at_another_address_than_rank_0s(rank)
    choices: list[Any] = [own]
    if name != "kfac":
        choices += [(Int8(), own), (PerPair(((own, None), (None, own))), Int8())]
    for codec in choices:
        Coded(name, rank, codec).run(2)
    other = at_another_address_than_rank_0s(rank, rank)
    message = error_of(lambda: Coded(name, rank, other).run(2))
    assert message.startswith("expected the same codec on all ranks, got codec by rank {0: ")
    assert "'note': 0" in message and "'note': 1" in message


@in_ranks(2)
def test_the_first_two_steps_of_kfac_are_exact_after_a_drain_as_well(rank: int) -> None:
    """DDP rebuilds its buckets after them."""
    training = Coded("kfac", rank, Int8())
    training.state.drain()
    training.run(2)
    assert training.stats_of_codec()["sent_bytes"] == 0
    training.run(1)
    assert training.stats_of_codec()["sent_bytes"] > 0


@pytest.mark.defect("codecs-S17")
@in_ranks(2)
def test_a_hidden_model_is_not_searched_for_in_every_step(rank: int) -> None:
    training = compressed(rank, CompressedState(Int8()))
    searches = []
    gc.freeze()
    with mock.patch.object(gc, "get_referrers", side_effect=gc.get_referrers) as search:
        for step in range(4):
            gradient_after(training, step)
            searches.append(search.call_count)
    gc.unfreeze()
    assert 0 < searches[1] == searches[2] == searches[3]
