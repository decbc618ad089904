import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._exchange.layout import Layout, Span

LENGTHS = st.lists(st.integers(0, 1000), min_size=1, max_size=9)


@given(LENGTHS)
def test_parts_tile_the_buffer_in_rank_order(lengths: list[int]) -> None:
    layout = Layout.of_lengths(lengths)
    parts = [layout.part(rank) for rank in range(layout.parts)]
    assert [part.numel for part in parts] == lengths
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == layout.numel == sum(lengths)


@given(st.integers(0, 10_000), st.integers(1, 17))
def test_equal_layout_leaves_less_than_one_element_per_part_to_the_tail(numel: int, parts: int) -> None:
    layout = Layout.equal(numel, parts)
    share = numel // parts
    assert layout.lengths[:-1] == (share,) * (parts - 1)
    assert layout.is_equal
    assert layout.main_numel == share * parts
    assert layout.tail() == Span(share * parts, numel)
    assert 0 <= layout.tail().numel < parts
    assert layout.part(parts - 1).numel == share + layout.tail().numel


@given(st.integers(0, 10_000), st.integers(1, 17), st.integers(1, 64))
def test_shares_of_an_equal_layout_begin_at_multiples(numel: int, parts: int, multiple: int) -> None:
    layout = Layout.equal(numel, parts, multiple=multiple)
    assert layout.numel == numel
    assert layout.is_equal
    assert all(layout.part(rank).start % multiple == 0 for rank in range(parts))
    assert 0 <= layout.tail().numel < parts * multiple


@given(LENGTHS)
def test_a_layout_is_equal_when_only_the_last_part_is_longer(lengths: list[int]) -> None:
    layout = Layout.of_lengths(lengths)
    assert layout.is_equal == (len({*lengths[:-1], lengths[0]}) == 1 and lengths[-1] >= lengths[0])
    if layout.is_equal:
        assert layout.main_numel == lengths[0] * len(lengths)
        assert layout.part(len(lengths) - 1).stop == layout.tail().stop


@given(LENGTHS, st.integers(1, 300))
def test_chunks_tile_a_part(lengths: list[int], chunk_numel: int) -> None:
    for part in map(Layout.of_lengths(lengths).part, range(len(lengths))):
        chunks = list(part.chunks(chunk_numel))
        assert [index for chunk in chunks for index in range(chunk.start, chunk.stop)] == list(
            range(part.start, part.stop)
        )
        assert all(chunk.numel == chunk_numel for chunk in chunks[:-1])
        assert all(chunk.numel > 0 for chunk in chunks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(()), "at least one part"),
        (lambda: Layout((1, -2)), r"lengths\[1\]=-2"),
        (lambda: Layout((1.5,)), r"lengths\[0\]=1\.5"),
        (lambda: Layout.equal(5, 0), "parts=0"),
        (lambda: Layout.equal(-5, 2), "numel=-5"),
        (lambda: Layout.equal(5, 2, multiple=0), "multiple=0"),
        (lambda: Layout.equal(5, 2).part(2), "rank=2"),
        (lambda: list(Span(0, 5).chunks(0)), "chunk_numel=0"),
    ],
)
def test_nonsense_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
