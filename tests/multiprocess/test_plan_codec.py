"""`plan_codec` between real ranks: rank 0's choice on all, and an error on all where nothing was recorded."""

import pytest

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import CodecPlan, CompressedState, Int8, PerPair
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.compressed_training import Coded
from tests.multiprocess.identity_codec import Identity

CANDIDATES = (None, Int8())


def plans(rank: int, world_size: int) -> list[CodecPlan]:
    found = []
    with pytest.raises(UnsupportedConfigurationError, match="expected recorded steps on all ranks"):
        CompressedState(None).plan_codec(CANDIDATES)
    for kind, codec in (("compressed", None), ("compressed", Int8()), ("crossover", None)):
        state = Coded(kind, rank, codec).run(4).state
        found.append(state.plan_codec(CANDIDATES))
    with pytest.raises(ValueError, match="got a PerPair among them"):
        state.plan_codec([(PerPair.by_node(range(world_size), far=Int8()), Int8())])
    with pytest.raises(UnsupportedConfigurationError, match="whose processor time is not known"):
        state.plan_codec([None, Identity()])
    return found


@pytest.mark.parametrize("world_size", [2, 3] if IN_CAMPAIGN else [3])
@in_ranks()
def test_all_ranks_have_the_plan_of_rank_0(rank: int, world_size: int) -> list[CodecPlan]:
    found = plans(rank, world_size)
    for plan in found:
        codec = plan.codec
        assert codec in CANDIDATES
        assert [codec for codec, _, _ in plan.options] == list(CANDIDATES)
        assert [rate for _, rate, _ in plan.options] == pytest.approx([1.0, 0.254], abs=0.002)
        assert plan.step_s == next(step_s for each, _, step_s in plan.options if each == codec)
        assert min(step_s for *_, step_s in plan.options) > 0
    return found


@in_ranks(1)
def test_one_rank_has_nothing_to_plan(rank: int) -> None:
    state = Coded("compressed", rank).run(4).state
    with pytest.raises(UnsupportedConfigurationError, match="expected at least two ranks"):
        state.plan_codec()
