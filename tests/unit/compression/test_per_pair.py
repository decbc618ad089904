"""A codec for each pair of ranks: which tables are taken, and what is sent with them."""

from collections.abc import Sequence

import pytest
import torch

from crossover_ddp._compression.choice import Codecs, codecs_of
from crossover_ddp._compression.codec import Whole
from crossover_ddp.codecs import Half, Int8, PerPair
from tests.unit.compression.test_coded_bucket import NUMELS, Ranks, gradients


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
        for owner, part in enumerate(ranks.parts):
            if owner != rank:
                is_near = nodes[rank] == nodes[owner]
                assert (
                    bucket.outgoing.layout[owner] > 4 * sum(run.span.numel for run in part.coded)
                ) == is_near
    missing -= torch.stack(ranks.kept()).double().mean(0)
    assert float(missing.abs().max()) < 1e-4
