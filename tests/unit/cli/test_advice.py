"""The arithmetic of advice: bounds hold, no communication is not worth a change, and known jobs get known answers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._planning import Link
from crossover_ddp.cli.advise import advice as advice_module
from crossover_ddp.cli.advise.advice import Advice, Option, advise, sibling_bound
from crossover_ddp.cli.advise.step_figures import DECOUPLED, SPLIT, WRAPPED, Bucket, Figures, figures
from tests.unit.cli.made_up_steps import split_rank

MEGABYTE = 2**20


def job(
    ready_s: list[float], sizes: list[int], *, alpha_s: float = 0.0, beta_s: float, hook: str = SPLIT
) -> Figures:
    """A job that computes for a second a step, and exchanges as plain DDP does."""
    link = Link(alpha_s, beta_s)
    buckets = [
        Bucket(size, size // 8, at_s, 2 * link.half_s(size))
        for size, at_s in zip(sizes, ready_s, strict=True)
    ]
    done_s = 0.0
    for bucket in buckets:
        done_s = max(done_s, bucket.ready_s) + bucket.wire_s
    step_s = max(1.0, done_s)
    return Figures(
        hook=hook,
        ranks=(0, 1),
        steps=20,
        skipped=3,
        step_s=step_s,
        spread_s=(step_s, step_s),
        compute_s=1.0,
        exposed_s=step_s - 1.0,
        wire_s=sum(bucket.wire_s for bucket in buckets),
        waited_s=0.0,
        lag_s=0.0,
        buckets=tuple(buckets),
        link=link,
        alpha_known=alpha_s > 0,
    )


def even(ratio: float, buckets: int = 6) -> Figures:
    """Equal buckets, M = ``ratio`` · C."""
    size = 12 * MEGABYTE // buckets
    ready_s = [1 / 3 + 2 / 3 * (place + 1) / buckets for place in range(buckets)]
    return job(ready_s, [size] * buckets, beta_s=ratio / 2 / (size * buckets))


def option(advice: Advice, what: str) -> Option:
    return next(each for each in advice.options if each.what == what)


jobs = st.builds(
    lambda parts, alpha_s, ratio, hook: job(
        [*sorted(at_s for at_s, _ in parts)[:-1], 1.0],
        [size for _, size in parts],
        alpha_s=alpha_s,
        beta_s=ratio / 2 / sum(size for _, size in parts),
        hook=hook,
    ),
    st.lists(st.tuples(st.floats(0.05, 1.0), st.integers(10**4, 10**7)), min_size=1, max_size=8),
    st.floats(0.0, 0.01),
    st.floats(1e-6, 3.0),
    st.sampled_from([SPLIT, DECOUPLED]),
)


@settings(max_examples=40, deadline=None)
@given(jobs)
def test_no_expectation_exceeds_its_bound_and_none_is_below_nothing(found: Figures) -> None:
    for each in advise(found).options:
        if each.factor is not None:
            assert each.bound is not None
            assert 0 < each.factor <= each.bound * (1 + 1e-9)
            assert each.step_s is not None
            if each.what != advice_module.CROSSOVER:
                assert each.step_s >= found.compute_s * (1 - 1e-9)
                assert each.factor == pytest.approx(found.step_s / each.step_s)


@settings(max_examples=40, deadline=None)
@given(jobs)
def test_without_exposed_communication_there_is_nothing_to_gain(found: Figures) -> None:
    idle = replace(found, exposed_s=0.0, compute_s=found.step_s)
    advice = advise(idle)
    assert advice.best is None
    assert advice.verdict.startswith("do not bother: communication costs only 0.0%")
    assert all(each.bound is None or each.bound == pytest.approx(1.0) for each in advice.options)


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 30.0), st.floats(0.0, 5.0))
def test_the_siblings_bound(compute_s: float, exposed_s: float, wire_s: float, more_s: float) -> None:
    bound = sibling_bound(compute_s, exposed_s, wire_s)
    assert 1 - 1e-9 <= bound <= 2 + 1e-9
    # More on the same wire helps nobody; a longer gap does, as long as the wire stays as it is.
    assert sibling_bound(compute_s, exposed_s, wire_s + more_s) <= bound + 1e-9
    free = min(wire_s, exposed_s)
    assert (
        sibling_bound(compute_s, exposed_s + more_s, free) >= sibling_bound(compute_s, exposed_s, free) - 1e-9
    )


@pytest.mark.parametrize(
    ("c_s", "n_s", "m_s", "bound"),
    # docs/measurements.md, "Two siblings against one after the other"
    [
        (0.309, 0.050, 0.236, 1.16),
        (0.273, 0.128, 0.270, 1.47),
        (0.327, 0.246, 0.328, 1.75),
        (1, 1, 1.6, 1.25),
    ],
)
def test_the_bounds_of_the_measurements_are_met(c_s: float, n_s: float, m_s: float, bound: float) -> None:
    assert sibling_bound(c_s, n_s, m_s) == pytest.approx(bound, abs=0.006)


def test_a_slower_link_makes_decoupling_pay_until_the_wire_is_the_limit() -> None:
    factors = [
        option(advise(even(ratio)), advice_module.DECOUPLED_TRAINING).factor for ratio in (0.2, 0.6, 1.0)
    ]
    assert factors[0] == pytest.approx(1.0, abs=0.05)
    assert factors == sorted(factors)  # type: ignore[type-var]
    assert factors[-1] is not None
    assert factors[-1] > 1.15


def test_start_up_time_wants_larger_buckets_and_an_exposed_tail_smaller_ones() -> None:
    slow_start = job([0.5 + 0.05 * n for n in range(11)], [20_000] * 10 + [60_000], alpha_s=0.05, beta_s=1e-9)
    larger = option(advise(slow_start), advice_module.BUCKET_SIZE)
    assert larger.bucket_cap_mb is not None
    assert larger.bucket_cap_mb > 60_000 / MEGABYTE
    assert larger.factor is not None
    assert larger.factor > 1.1
    few = even(0.9, buckets=2)
    smaller = option(advise(few), advice_module.BUCKET_SIZE)
    assert smaller.bucket_cap_mb is not None
    assert smaller.bucket_cap_mb < few.buckets[0].size_bytes / MEGABYTE
    assert smaller.factor is not None
    assert smaller.factor > 1.1


def test_half_the_bytes_halve_what_is_on_the_wire() -> None:
    found = job([0.2, 1.0], [1000, 9000], beta_s=1e-4)  # M = 2 s, of which 1.8 exposed
    halved = option(advise(found), advice_module.HALF_PRECISION)
    assert halved.step_s == pytest.approx(1.0 + 0.9)
    assert not halved.same_training


def test_a_codec_leaves_a_quarter_of_what_is_on_the_wire() -> None:
    found = job([0.2, 1.0], [1000, 9000], beta_s=1e-4)
    coded = option(advise(found), advice_module.CODEC)
    assert coded.step_s == pytest.approx(1.0 + 0.254 * 1.8, rel=1e-3)
    assert not coded.same_training
    wrapped = option(advise(replace(found, hook=WRAPPED, wire_s=None, buckets=(), link=None)), coded.what)
    assert wrapped.factor is None


def test_accumulation_shares_one_exchange_among_two_mini_batches() -> None:
    found = job([0.2, 1.0], [1000, 9000], beta_s=1e-4)
    assert option(advise(found), advice_module.ACCUMULATION).step_s == pytest.approx((2 * 1.0 + 1.8) / 2)


def test_averaging_is_predicted_by_its_bound_and_names_its_arguments() -> None:
    advice = advise(even(3.0))
    averaging = option(advice, advice_module.AVERAGING)
    assert averaging.step_s == pytest.approx(1.0 / advice_module.OF_AVERAGED)
    assert averaging.bound == pytest.approx(3.333 + 1 / 9, rel=0.04)  # F + M over C
    assert "LocalSGDState(4, delay=1, fragments=4)" in averaging.write
    assert "convergence suffers" in averaging.caveat
    assert averaging.recommended and not averaging.same_training
    assert f"; {advice_module.AVERAGING} may bring" in advice.verdict


@settings(max_examples=60, deadline=None)
@given(jobs)
def test_averaging_is_recommended_only_where_it_is_faster_than_what_costs_less(found: Figures) -> None:
    advice = advise(found)
    averaging = option(advice, advice_module.AVERAGING)
    assert averaging.step_s is not None
    every = int(averaging.write.partition("LocalSGDState(")[2].partition(",")[0])
    rivals = [
        each.step_s
        for each in advice.options
        if each.what
        in (
            advice_module.DECOUPLED_TRAINING,
            advice_module.BUCKET_SIZE,
            advice_module.HALF_PRECISION,
            advice_module.CODEC,
        )
        and each.step_s is not None
    ]
    accumulated_s = found.compute_s + found.exposed_s / every
    faster = all(averaging.step_s * advice_module.WORTH <= rival_s for rival_s in [*rivals, accumulated_s])
    assert averaging.recommended is faster
    assert ("not worth it here" in averaging.caveat) is not faster
    if not faster:
        assert advice_module.AVERAGING not in advice.verdict


@pytest.mark.parametrize("ratio", [0.2, 0.6, 1.0])
def test_below_the_time_of_compute_others_hide_the_wire_as_well(ratio: float) -> None:
    advice = advise(even(ratio))
    assert not option(advice, advice_module.AVERAGING).recommended
    assert advice_module.AVERAGING not in advice.verdict


def test_a_link_too_slow_for_any_interval_is_no_crash() -> None:
    found = job([1.0], [1000], beta_s=10.0)
    averaging = option(advise(found), advice_module.AVERAGING)
    assert averaging.factor is None
    assert "expected an exchange within" in averaging.caveat


def test_the_verdict_names_the_best_for_two_jobs_and_for_one() -> None:
    advice = advise(even(0.95))
    assert advice.best in (advice_module.CROSSOVER, advice_module.DECOUPLED_TRAINING)
    assert "expected" in advice.verdict
    assert ("for a job alone" in advice.verdict) or ("with a second job at hand" in advice.verdict)


def test_a_small_share_is_not_worth_a_change() -> None:
    advice = advise(even(0.2, buckets=12))
    assert advice.best is None
    assert advice.verdict == "do not bother: communication costs only 1.6% of a step"


def test_a_wrapped_hook_gets_what_can_be_known() -> None:
    found = replace(even(1.0), hook=WRAPPED, buckets=(), link=None, wire_s=None, alpha_known=False)
    advice = advise(found)
    known = {each.what for each in advice.options if each.factor is not None}
    assert known == {advice_module.ACCUMULATION}
    assert option(advice, advice_module.CROSSOVER).bound == pytest.approx(found.step_s / found.compute_s)
    assert "wrapped hook records too little" in advice.verdict


def test_muon_is_named_and_never_chosen_since_nobody_knows_the_optimizer() -> None:
    advice = advise(even(1.0))
    muon = option(advice, advice_module.MUON_OWNERS)
    assert muon.factor is None and "MuonState" in muon.write
    gain = float(muon.caveat.rpartition("bring ")[2].removesuffix("×"))
    assert 1.05 < gain < 4 / 3, "a quarter of the bytes, where a part of them is exposed"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"spread_s": (0.5, 1.5)}, "idle machine"),
        ({"lag_s": 0.3}, "slowest rank"),
        ({"waited_s": 0.3}, "a sibling ran"),
        ({"alpha_known": False}, "α = 0 is assumed"),
        ({"step_s": 2.0, "exposed_s": 1.0}, "the cost model gives"),
    ],
)
def test_what_weakens_the_figures_is_said(change: dict[str, object], note: str) -> None:
    found = even(0.8)
    quiet = advise(replace(found, alpha_known=True))
    assert quiet.notes == ()
    assert any(note in each for each in advise(replace(found, **({"alpha_known": True} | change))).notes)  # type: ignore[arg-type]


def test_advice_on_a_timeline_from_end_to_end() -> None:
    sizes = [2 * MEGABYTE] * 5 + [MEGABYTE // 2]
    ready_s = [0.4, 0.52, 0.64, 0.76, 0.88, 1.0]
    rank = split_rank(ready_s, sizes, compute_s=1.0, alpha_s=0.001, beta_s=0.45 / sum(sizes))
    advice = advise(figures({0: rank, 1: rank}))
    crossover = option(advice, advice_module.CROSSOVER)
    assert crossover.bound is not None
    assert crossover.factor == pytest.approx(advice_module.OF_BOUND * crossover.bound)
    assert advice.model_step_s is not None
    assert math.isfinite(advice.model_step_s)
