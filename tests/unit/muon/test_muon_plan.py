"""Who owns which matrix, and where everything lies in what travels of Muon."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._muon.ownership import newton_schulz_flop, own
from crossover_ddp._muon.payload_sizes import MatrixSize, MuonLayout, muon_layout

Payload = tuple[int, int, tuple[MatrixSize, ...], tuple[Span, ...]]


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    world_size = draw(st.integers(1, 5))
    matrices = st.builds(MatrixSize, st.integers(0, world_size - 1), st.integers(1, 40))
    borders = sorted(draw(st.lists(st.integers(0, 100), max_size=8)))
    spans = tuple(Span(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    return world_size, draw(st.sampled_from([2, 4, 8])), tuple(draw(st.lists(matrices, max_size=6))), spans


def check_filled(layout: Layout, places: list[tuple[int | None, Span]]) -> None:
    """Every element is used once, and by its owner's part."""
    used = [0] * layout.numel
    for owner, span in places:
        for element in range(span.start, span.stop):
            used[element] += 1
        if owner is not None and span.numel:
            part = layout.part(owner)
            assert part.start <= span.start and span.stop <= part.stop
        elif span.numel:
            inside = [p for p in map(layout.part, range(layout.parts)) if p.start <= span.start < p.stop]
            assert [span.stop <= part.stop for part in inside] == [True]
    assert used == [1] * layout.numel


@given(payloads())
def test_everything_travels_once_both_ways(payload: Payload) -> None:
    _, itemsize, matrices, passing = payload
    made = muon_layout(*payload)
    owners = [matrix.owner for matrix in matrices]
    check_filled(
        made.there,
        [*zip(owners, made.gradients, strict=True), *((None, place) for _, place in made.passing_there)],
    )
    check_filled(
        made.back,
        [
            *zip(owners, made.directions, strict=True),
            *zip(owners, made.norms, strict=True),
            *((None, place) for _, place in made.passing_back),
        ],
    )
    for matrix, there, back, norm in zip(matrices, made.gradients, made.directions, made.norms, strict=True):
        assert there.numel == matrix.numel
        assert 0 <= back.numel * itemsize - 2 * matrix.numel < itemsize
        assert norm.numel * itemsize == 8
    for (span, there), (same, back) in zip(made.passing_there, made.passing_back, strict=True):
        assert span == same and span.numel == there.numel == back.numel
        assert owner_of(made.there, there) == owner_of(made.back, back)
    taken = sorted(element for span, _ in made.passing_there for element in range(span.start, span.stop))
    assert taken == sorted({element for span in passing for element in range(span.start, span.stop)})


def owner_of(layout: Layout, span: Span) -> int:
    return next(
        rank for rank in range(layout.parts) if layout.part(rank).start <= span.start < layout.part(rank).stop
    )


def both_ways(made: MuonLayout) -> list[int]:
    return [there + back for there, back in zip(made.there.lengths, made.back.lengths, strict=True)]


def test_what_passes_through_fills_the_parts_up() -> None:
    made = muon_layout(2, 4, (MatrixSize(1, 100),), (Span(0, 300),))
    first, second = both_ways(made)
    assert abs(first - second) <= 4, "a norm, and what halves cannot share out"


def test_bytes_are_three_quarters_of_those_of_float32() -> None:
    made = muon_layout(2, 4, (MatrixSize(0, 5000), MatrixSize(1, 5000)), ())
    assert (made.there.numel + made.back.numel) / (2 * 10_000) == pytest.approx(0.75, abs=1e-3)


costs = st.lists(st.integers(0, 1000), max_size=30)


@given(costs, st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_matrix(costs: list[int], world_size: int) -> None:
    made = own(costs, world_size)
    for rank in range(world_size):
        assert made.loads[rank] == sum(c for c, o in zip(costs, made.owners, strict=True) if o == rank)
    assert max(made.loads) <= sum(costs) / world_size + max(costs, default=0)


def vit_base() -> list[tuple[int, int]]:
    """The matrices of twelve blocks of width 768."""
    return [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12


@pytest.mark.parametrize(("world_size", "most"), [(1, 1.0), (2, 0.55), (4, 0.30), (8, 0.14)])
def test_a_transformer_is_shared_out_evenly(world_size: int, most: float) -> None:
    made = own([newton_schulz_flop(shape) for shape in vit_base()], world_size)
    assert 1 / world_size <= made.busiest_share <= most


@pytest.mark.parametrize(("world_size", "most"), [(1, 1.0), (2, 0.5), (4, 0.30)])
def test_few_matrices_are_shared_out_by_their_size(world_size: int, most: float) -> None:
    """Two blocks of width 96, the GPT of the recipes: in the order of backward the busier of two has 0.554."""
    shapes = [(288, 96), (96, 96), (384, 96), (96, 384)] * 2
    assert own([newton_schulz_flop(shape) for shape in shapes], world_size).busiest_share <= most


def test_the_cost_is_that_of_the_products() -> None:
    assert newton_schulz_flop((3, 7)) == newton_schulz_flop((7, 3)) == 20 * 9 * 7 + 10 * 27
    assert newton_schulz_flop((3, 7), steps=1) * 5 == newton_schulz_flop((3, 7))


def test_the_last_matrix_goes_first_and_ties_go_to_the_lowest_rank() -> None:
    assert own([1, 1, 2, 3], 2).owners == (0, 1, 1, 0)
    assert own([], 2).busiest_share == 0
    with pytest.raises(ValueError, match="expected at least one rank"):
        own([1], 0)
