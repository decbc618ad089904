"""A codec for each pair of ranks: which tables are taken, what is chosen, and whom ranks measure in which round."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._compression.choice import Codecs, codecs_of
from crossover_ddp._compression.whole import Whole
from crossover_ddp._exchange.link_probe import _peers
from crossover_ddp._planning import Link, pair_codecs
from crossover_ddp.codecs import Half, Int8, PerPair
from tests.unit.compression.test_coded_bucket import NUMELS, Ranks, gradients

RATES = (1.0, 0.5, 0.254, 0.02)


def test_ranks_on_one_node_send_float32_and_others_int8() -> None:
    pairs = PerPair.by_node(["a", "b", "a"], far=Int8())
    assert pairs.between(0, 2) == pairs.between(2, 0) == Whole()
    assert pairs.between(0, 1) == pairs.between(2, 1) == Int8()
    assert codecs_of((pairs, Half())) == Codecs(pairs, Half())
    assert PerPair.by_node([0, 0], far=Int8(), near=Half()).all() == [Half(), Half()]


def test_the_diagonal_means_nothing() -> None:
    rows = [["self", Int8(), Half()], [Int8(), Int8(), Half()], [Half(), Half(), None]]
    pairs = PerPair(rows)  # type: ignore[arg-type]
    assert pairs == PerPair(((None, Int8(), Half()), (Int8(), None, Half()), (Half(), Half(), None)))
    assert hash(pairs) == hash(PerPair(pairs.codecs))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), r"got \[\]"),
        (((None, None), (None,)), r"got \[2, 1\]"),
        (((None, Int8()), (Half(), None)), "from rank 0 to rank 1 and Half"),
    ],
)
def test_tables_that_mean_nothing_are_refused(
    rows: tuple[tuple[Int8 | None, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PerPair(rows)


def test_what_goes_to_all_ranks_needs_one_codec() -> None:
    pairs = PerPair.by_node([0, 1], far=Int8())
    with pytest.raises(TypeError, match=r"a PerPair alone; pass codec=\(PerPair"):
        codecs_of(pairs)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a codec such as Int8"):
        codecs_of((Int8(), pairs))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got codec=False"):
        codecs_of((PerPair.by_node([0, 1], far=False), Int8()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a codec such as Int8"):
        codecs_of((PerPair.by_node([0, 1], far="int8"), Int8()))  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1)])
def test_near_messages_are_whole_and_nothing_is_lost(nodes: Sequence[int]) -> None:
    ranks = Ranks((PerPair.by_node(nodes, far=Int8()), Int8()), len(nodes))
    missing = torch.zeros(sum(NUMELS), dtype=torch.float64)
    for step in range(6):
        flats = gradients(len(nodes), step)
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        missing -= flats[0]
    for rank, bucket in enumerate(ranks.buckets):
        for owner, message in bucket.outgoing.items():
            coded = ranks.parts[owner].coded_numel
            assert (message.numel() > 4 * coded) == (nodes[rank] == nodes[owner])
            residual = bucket._push[owner].residual
            assert bool(residual.any()) == (nodes[rank] != nodes[owner])
        kept = {id(parameter): residual for parameter, residual in bucket.kept()}
        residuals = [
            kept.get(id(parameter), torch.zeros(numel))
            for parameter, numel in zip(bucket.parameters, NUMELS, strict=True)
        ]
        missing -= torch.cat(residuals).double() / len(nodes)
    assert float(missing.abs().max()) < 1e-4


@st.composite
def links(draw: st.DrawFn) -> list[list[float]]:
    size = draw(st.integers(2, 6))
    rows = [[0.0] * size for _ in range(size)]
    for one in range(size):
        for other in range(one):
            rows[one][other] = rows[other][one] = draw(st.sampled_from([0.0, 1e-10, 1e-9, 3e-9, 1e-8, 1e-7]))
    return rows


@given(seconds=links(), chosen=st.integers(0, len(RATES) - 1), ring_s=st.sampled_from([1e-9, 4e-9, 1e-7]))
def test_no_pair_takes_longer_than_the_slowest_and_none_is_stronger_than_need_be(
    seconds: list[list[float]], chosen: int, ring_s: float
) -> None:
    size = len(seconds)
    places = pair_codecs(RATES, chosen, seconds, Link(0.0, ring_s * (size - 1) / size))
    limit_s = RATES[chosen] * min(ring_s, max(map(max, seconds))) / 2
    for one, row in enumerate(places):
        for other, place in enumerate(row):
            took_s = RATES[place] * seconds[one][other]
            assert place == places[other][one] <= chosen
            assert place == chosen or took_s <= limit_s * (1 + 1e-9)
            assert place == 0 or RATES[place - 1] * seconds[one][other] > limit_s * (1 - 1e-9)


def test_equal_links_have_one_codec() -> None:
    assert pair_codecs(RATES, 2, [[0.0, 1e-8], [1e-8, 0.0]], Link(0.0, 5e-9)) == [[0, 2], [2, 0]]
    # Twice the bytes on a link that is three times as fast would take more than half of the time.
    near = [[0.0, 1.0, 3.0], [1.0, 0.0, 3.0], [3.0, 3.0, 0.0]]
    assert pair_codecs(RATES, 2, near, Link(0.0, 2.0)) == [[0, 2, 2], [2, 0, 2], [2, 2, 0]]
    near = [[0.0, 0.7, 3.0], [0.7, 0.0, 3.0], [3.0, 3.0, 0.0]]
    assert pair_codecs(RATES, 2, near, Link(0.0, 2.0)) == [[0, 1, 2], [1, 0, 2], [2, 2, 0]]


def test_no_pair_gets_a_stronger_codec_than_the_slowest_one() -> None:
    """What goes to owners may be stronger in a candidate whose way back is weaker."""
    near = [[0.0, 0.1, 3.0], [0.1, 0.0, 3.0], [3.0, 3.0, 0.0]]
    assert pair_codecs((1.0, 0.02, 0.5, 0.254), 3, near, Link(0.0, 2.0)) == [[0, 0, 3], [0, 0, 3], [3, 3, 0]]
    assert pair_codecs((0.02, 0.5, 0.254), 2, near, Link(0.0, 2.0)) == [[1, 1, 2], [1, 1, 2], [2, 2, 1]]


def test_one_pair_that_was_measured_too_slow_changes_nothing() -> None:
    measured = [[0.0, 9e-8, 1e-8], [9e-8, 0.0, 1e-8], [1e-8, 1e-8, 0.0]]
    assert pair_codecs(RATES, 2, measured, Link(0.0, 1e-8 * 2 / 3)) == [[0, 2, 2], [2, 0, 2], [2, 2, 0]]


@pytest.mark.parametrize("size", range(1, 10))
def test_in_each_round_of_the_measurement_a_rank_is_in_one_pair(size: int) -> None:
    peers = [_peers(rank, size) for rank in range(size)]
    assert len({len(each) for each in peers}) == 1
    for rank, others in enumerate(peers):
        for turn, other in enumerate(others):
            assert other is None or peers[other][turn] == rank
        assert sorted(other for other in others if other is not None) == [
            other for other in range(size) if other != rank
        ]
