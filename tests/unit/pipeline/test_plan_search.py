"""The search for plans: memory, unequal devices, looped stages, bounds, and numbering."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp.pipeline import Cluster, LayerProfile, Plan, Profile, Stage, plan_pipeline
from crossover_ddp.pipeline.chain import LayerChain
from crossover_ddp.pipeline.memory import Packing, pack
from crossover_ddp.pipeline.model import StagedChain
from crossover_ddp.pipeline.schedule import best_order, gpipe, one_forward_one_backward
from crossover_ddp.pipeline.shares import fastest_shares, pattern_of
from crossover_ddp.pipeline.simulate import simulate
from tests.harness.campaign import IN_CAMPAIGN
from tests.unit.pipeline.test_pipeline_planning import even, flat, random_instance

SEEDS = 40 if IN_CAMPAIGN else 6


def peaks(plan: Plan, profile: Profile, cluster: Cluster) -> dict[int, float]:
    """Return the peak memory of each device in the plan's step."""
    chain = StagedChain(
        profile,
        cluster,
        plan.stages,
        plan.microbatches,
        split=plan.split,
        recomputed=plan.recomputed,
    )
    step = simulate(chain, plan.orders)
    assert step.step_s == pytest.approx(plan.step_s)
    return dict(step.peak_bytes)


@pytest.mark.parametrize("room", [1.0, 2.0, 3.0, 4.0])
def test_as_many_micro_batches_are_in_flight_as_fit(room: float) -> None:
    """Four equal stages, each with room for one to four micro-batches."""
    cluster = flat(4, memory_bytes=(room,) * 4)
    options: dict[str, Any] = {"microbatches": 8, "max_replicas": 1, "stages": 4}
    plan = plan_pipeline(even(4), cluster, **options)
    assert max(peaks(plan, even(4), cluster).values()) <= room
    steps = [
        plan_pipeline(even(4), flat(4, memory_bytes=(r,) * 4), **options).step_s for r in (room, 4)
    ]
    assert steps[0] == plan.step_s >= steps[1] == (8 + 3) * 3.0


def test_tensors_that_two_layers_save_count_once_in_a_stage() -> None:
    layers = [replace(layer, stored_bytes=10.0, shared_bytes=4.0) for layer in even(3).layers]
    profile = Profile(tuple(layers))
    whole = StagedChain(profile, flat(2), [Stage(0, 3, (0,))], 2)
    cut = StagedChain(profile, flat(2), [Stage(0, 1, (0,)), Stage(1, 3, (1,))], 2)
    assert whole.stored_bytes == [22.0]
    assert cut.stored_bytes == [10.0, 16.0]
    plan = plan_pipeline(profile, flat(2, memory_bytes=(10.0, 16.0)), microbatches=2)
    assert sorted(peaks(plan, profile, flat(2)).values()) == [10.0, 16.0]
    assert pack(profile, flat(2, memory_bytes=(10.0, 15.9)))[0] is Packing.IMPOSSIBLE


def test_a_refusal_says_whether_it_is_proven() -> None:
    profile = even(4, parameters=10.0)  # 41 bytes a layer
    with pytest.raises(ValueError, match="fits, so no plan exists"):
        plan_pipeline(profile, flat(2, memory_bytes=(50.0, 60.0)), microbatches=2)
    roomy = flat(2, memory_bytes=(90.0, 90.0))
    assert pack(profile, roomy)[0] is Packing.FITS
    with pytest.raises(ValueError, match="only plans beyond the limits on stages"):
        plan_pipeline(profile, roomy, microbatches=2, stages=1)
    with pytest.raises(ValueError, match=r"with max_replicas|got none"):
        plan_pipeline(profile, roomy, microbatches=2, max_stages=1)


def test_layers_that_fit_only_out_of_order_get_several_stages_on_a_device() -> None:
    """Layers of 5, 6 and 5 bytes on devices of 10 and 6 bytes."""
    layers = [
        LayerProfile(f"l{k}", 1.0, 2.0, 0.0, 0.0, 0.0, frozen_bytes=size)
        for k, size in enumerate((5.0, 6.0, 5.0))
    ]
    cluster = flat(2, memory_bytes=(10.0, 6.0))
    plan = plan_pipeline(Profile(tuple(layers)), cluster, microbatches=2)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (0,)]
    assert peaks(plan, Profile(tuple(layers)), cluster) == {0: 10.0, 1: 6.0}


def test_recomputing_makes_a_chain_fit() -> None:
    layers = [LayerProfile(f"l{k}", 1.0, 2.0, 1.0, 0.0, 10.0) for k in range(4)]
    profile, cluster = Profile(tuple(layers)), flat(2, memory_bytes=(16.0, 16.0))
    with pytest.raises(ValueError, match="recompute=True"):
        plan_pipeline(profile, cluster, microbatches=4)
    plan = plan_pipeline(profile, cluster, microbatches=4, recompute=True)
    small = flat(2, memory_bytes=(11.0, 11.0))
    with pytest.raises(ValueError, match=r"ended without a result.*or smaller micro-batches$"):
        plan_pipeline(profile, small, microbatches=4, recompute=True)
    assert plan.recomputed
    assert max(peaks(plan, profile, cluster).values()) <= 16.0
    assert "recomputed: " in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    roomy = plan_pipeline(profile, flat(2), microbatches=4, recompute=True)
    assert not roomy.recomputed, "recomputing costs time"


def test_replicas_take_micro_batches_in_proportion_to_their_speed() -> None:
    """A device that is three times as fast takes three of four micro-batches."""
    fast = flat(2, speed=(3.0, 1.0))
    plan = plan_pipeline(even(1), fast, microbatches=8)
    alone = plan_pipeline(even(1), fast, microbatches=8, max_replicas=1)
    assert (alone.step_s, plan.step_s) == (8.0, 6.0)
    (stage,) = plan.stages
    takers = [stage.device(micro) for micro in range(8)]
    assert (takers.count(0), takers.count(1)) == (6, 2)
    assert "0 (3), 1 (1)" in str(plan)
    assert plan.runtimes == ("runner",)
    torch_plan = plan_pipeline(even(1), fast, microbatches=8, runtime="torch")
    assert torch_plan.step_s == 8.0
    assert "torch" in torch_plan.runtimes


def test_shares_are_the_fastest_and_spread_evenly() -> None:
    for seed in range(50):
        dice = random.Random(seed)
        times = [dice.choice((1.0, 2.0, 3.5)) for _ in range(dice.randint(2, 3))]
        count = dice.randint(len(times), 8)
        shares = fastest_shares(times, count)
        longest = max(n * time for n, time in zip(shares, times, strict=True))
        every = [
            each
            for each in itertools.product(range(1, count + 1), repeat=len(times))
            if sum(each) == count
        ]
        assert longest == min(max(map(math.prod, zip(each, times, strict=True))) for each in every)
        pattern = pattern_of(shares) or tuple(range(len(times)))
        found = [pattern[m % len(pattern)] for m in range(count)]
        assert [found.count(place) for place in range(len(times))] == shares
    assert pattern_of([3, 1]) == (0, 0, 1, 0)
    assert pattern_of([2, 2]) == ()


def test_times_of_each_device_decide_where_layers_go() -> None:
    """Each device computes another layer fast."""
    times = (((1.0, 1.0), (9.0, 9.0)), ((9.0, 9.0), (1.0, 1.0)))
    profile = replace(even(2), times_s=times)
    plan = plan_pipeline(profile, flat(2), microbatches=4, max_replicas=1)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,)]
    swapped = plan_pipeline(
        replace(profile, times_s=times[::-1]), flat(2), microbatches=4, max_replicas=1
    )
    assert [stage.devices for stage in swapped.stages] == [(1,), (0,)]
    assert swapped.step_s == plan.step_s
    with pytest.raises(ValueError, match="expected times of 3 devices in the profile, got times"):
        plan_pipeline(profile, flat(3), microbatches=4)


def test_tied_parameters_are_on_one_device_or_exchanged() -> None:
    profile = replace(even(4, parameters=5.0), tied=((0, 3, 5.0),))
    options: dict[str, Any] = {"microbatches": 4, "max_replicas": 1}
    whole = plan_pipeline(profile, flat(1), **options)
    assert StagedChain(profile, flat(1), whole.stages, 4).state_bytes == {0: 4 * 5.0 * 3}
    stages = [Stage(k, k + 1, (k,)) for k in range(4)]
    apart = StagedChain(profile, flat(4), stages, 4)
    untied = StagedChain(even(4, parameters=5.0), flat(4), stages, 4)
    plan = plan_pipeline(profile, flat(4), stages=4, **options)
    step = simulate(apart, plan.orders) if plan.stages == tuple(stages) else None
    assert apart.tied_exchanges[0] is not None
    assert apart.tied_exchanges[0].hop.wire_s == 5.0
    loop = [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (0,))]
    together = StagedChain(profile, flat(2), loop, 4)
    assert together.tied_exchanges == [None]
    assert together.state_bytes[0] == 4 * 5.0
    assert step is None or step.step_s >= simulate(untied, plan.orders).step_s


def test_two_stages_on_a_device_shorten_the_bubble() -> None:
    """Two stages on each of four devices leave half of the bubble; a split backward, still less."""
    options: dict[str, Any] = {"microbatches": 4, "max_replicas": 1}
    single = plan_pipeline(even(8), flat(4), stages=4, **options)
    looped = plan_pipeline(even(8), flat(4), stages=8, **options)
    split = plan_pipeline(even(8), flat(4), stages=8, split=True, **options)
    assert single.step_s == (4 + 3) * 6.0
    assert looped.step_s <= (4 * 2 + 3) * 3.0
    assert split.step_s < looped.step_s
    assert [len(plan.stages) for plan in (single, looped, split)] == [4, 8, 8]
    assert (looped.split, split.split) == (False, True)
    assert looped.runtimes == ("torch", "runner")
    assert split.runtimes == ("torch",)


def test_the_number_of_micro_batches_is_chosen() -> None:
    """Larger micro-batches take less time for each sample, smaller ones make a shorter bubble."""

    def profile(count: int) -> Profile:
        layers = [LayerProfile(f"l{k}", 8 / count + 0.1, 16 / count + 0.2, 0.0, 0.0) for k in "ab"]
        return Profile(tuple(layers))

    options: dict[str, Any] = {"max_replicas": 1, "stages": 2}
    steps = {
        count: plan_pipeline(profile(count), flat(2), microbatches=count, **options).step_s
        for count in (1, 2, 4, 8, 16, 32, 64)
    }
    plan = plan_pipeline({count: profile(count) for count in steps}, flat(2), **options)
    assert plan.step_s == min(steps.values())
    assert plan.microbatches == min(steps, key=lambda count: steps[count]) not in (1, 64)
    with pytest.raises(ValueError, match="leave microbatches out"):
        plan_pipeline({4: profile(4)}, flat(2), microbatches=4)


def shuffled(cluster: Cluster, profile: Profile, seed: int) -> tuple[Cluster, Profile, list[int]]:
    order = random.Random(seed).sample(range(len(cluster)), len(cluster))
    times_s = tuple(profile.times_s[device] for device in order) if profile.times_s else ()
    return cluster.reordered(order), replace(profile, times_s=times_s), order


@pytest.mark.parametrize("seed", range(SEEDS))
def test_another_numbering_of_the_devices_gives_the_same_plan(seed: int) -> None:
    dice = random.Random(seed)
    devices = dice.choice((3, 4, 8))
    profile, cluster = random_instance(dice, layers=8, devices=devices)
    plan = plan_pipeline(profile, cluster, microbatches=6)
    other_cluster, other_profile, order = shuffled(cluster, profile, seed)
    other = plan_pipeline(other_profile, other_cluster, microbatches=6)
    assert other.step_s == pytest.approx(plan.step_s)
    renamed = [
        stage._replace(devices=tuple(order[device] for device in stage.devices))
        for stage in other.stages
    ]
    if plan.method == other.method == "search":
        assert tuple(renamed) == plan.stages


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_plan_is_shorter_than_the_bound(seed: int) -> None:
    """The bounds of the search over all plans and of large clusters hold for all plans found."""
    dice = random.Random(seed)
    profile, cluster = random_instance(dice, layers=6, devices=3, memory=bool(seed % 2))
    plan = plan_pipeline(profile, cluster, microbatches=4)
    assert 1.0 <= plan.gap <= 2.0
    assert plan.bound_s <= plan.step_s
    ready = f"{plan}"
    assert "longer than any other plan" in ready or "is shorter" in ready
    for stages in (1, 2, 3):
        try:
            other = plan_pipeline(profile, cluster, microbatches=4, stages=stages)
        except ValueError:
            continue
        assert len(other.stages) == stages
        assert other.step_s >= plan.bound_s * (1 - 1e-9)


def test_a_plan_for_torch_has_equal_replicas() -> None:
    for seed in range(SEEDS):
        dice = random.Random(seed)
        profile, cluster = random_instance(dice, layers=5, devices=dice.randint(2, 4))
        plan = plan_pipeline(profile, cluster, microbatches=4, runtime="torch")
        assert "torch" in plan.runtimes
        assert len({len(stage.devices) for stage in plan.stages}) == 1
        assert plan.step_s >= plan_pipeline(profile, cluster, microbatches=4).step_s * (1 - 1e-9)


def test_a_plan_is_no_longer_than_stock_schedules_with_equal_cuts() -> None:
    """The known designs are tried with as many layers in each stage, as torchtitan cuts a model."""
    for seed in range(SEEDS):
        profile, cluster = random_instance(random.Random(seed), layers=8, devices=4)
        plan = plan_pipeline(profile, cluster, microbatches=8, max_replicas=1)
        stages = [Stage(2 * k, 2 * k + 2, (k,)) for k in range(4)]
        chain = StagedChain(profile, cluster, stages, 8)
        for orders in (gpipe(chain), one_forward_one_backward(chain)):
            assert plan.step_s <= simulate(chain, orders).step_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 5}, "at least as many layers as stages, got stages=5 for 4"),
        ({"runtime": "nccl"}, "expected a runtime of any, torch, got runtime='nccl'"),
        ({"stages": 0}, "expected stages >= 1, got stages=0"),
        ({"stages": 2, "max_stages": 1}, "expected stages <= max_stages, got stages=2 and max"),
        ({"microbatches": None}, "expected microbatches >= 1, got microbatches=None"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_pipeline(even(4), flat(2), **{"microbatches": 4, **options})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"times_s": (((1.0, -1.0),) * 2,)}, "expected times_s with two times >= 0 for each"),
        ({"times_s": (((1.0, math.nan),) * 2,)}, "expected times_s with two times >= 0 for each"),
        ({"times_s": (((1.0, 1.0),),)}, "expected times of 2 layers for each device"),
        ({"tied": ((0, 2, 1.0),)}, "expected tied with the indices of two of 2 layers"),
    ],
)
def test_wrong_profiles_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(even(2), **wrong)


@pytest.mark.parametrize("weight_s", [math.nan, -1.0, 3.0])
def test_the_part_of_the_weights_is_a_part_of_backward(weight_s: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= weight_s <= backward_s=2"):
        LayerProfile("a", 1.0, 2.0, 0.0, 0.0, weight_s=weight_s)


@pytest.mark.parametrize(("devices", "stages"), [(1, 3), (2, 3), (2, 5), (3, 4)])
def test_an_exact_number_of_stages_may_exceed_the_devices(devices: int, stages: int) -> None:
    plan = plan_pipeline(even(6), flat(devices), microbatches=2, stages=stages)
    assert len(plan.stages) == stages


def test_replicas_of_unlike_speeds_for_forward_and_backward_keep_the_bound() -> None:
    """One replica is fast in forward and the other in backward."""
    times = (((1.0, 8.0),) * 2, ((8.0, 1.0),) * 2, ((4.0, 4.0),) * 2)
    profile = replace(even(2), times_s=times)
    plan = plan_pipeline(profile, flat(3), microbatches=2)
    for devices in itertools.permutations(range(3)):
        stages = [Stage(0, 1, devices[:2]), Stage(1, 2, devices[2:])]
        chain = StagedChain(profile, flat(3), stages, 2)
        step = best_order(chain, tries=20)
        assert step is not None
        assert step.step_s >= plan.bound_s * (1 - 1e-9)


def test_tied_stages_with_uneven_replicas_are_not_planned() -> None:
    """`Runner` refuses parameters of two stages."""
    for seed in range(SEEDS):
        profile, cluster = random_instance(random.Random(seed), layers=4, devices=3)
        plan = plan_pipeline(replace(profile, tied=((0, 3, 0.1),)), cluster, microbatches=6)
        assert len(plan.stages) == 1 or "torch" in plan.runtimes


def test_a_step_without_costs_is_printed() -> None:
    layers = [LayerProfile(name, 0.0, 0.0, 0.0, 0.0) for name in "ab"]
    plan = plan_pipeline(Profile(tuple(layers)), flat(2), microbatches=2)
    assert plan.step_s == 0
    assert "no other plan" in str(plan)


def test_recomputed_layers_may_work_in_place() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.SiLU(inplace=True)]
    x = torch.randn(3, 4)
    gradients = []
    for recomputed in ((), range(4)):
        chain = LayerChain(*layers, recomputed=recomputed)
        chain.zero_grad()
        chain(x.clone()).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in chain.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
