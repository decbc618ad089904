"""The contents of K-FAC's cargo: everything travels once, factors only one way, parts as equal as they can be."""

from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._layout import Layout, Span
from crossover_ddp._manifest import Load, Manifest, fill_up, manifest


@st.composite
def cargoes(draw: st.DrawFn) -> tuple[int, tuple[Load, ...], tuple[Span, ...], int]:
    world_size = draw(st.integers(1, 5))
    loads = st.builds(Load, st.integers(0, world_size - 1), st.integers(0, 30), st.integers(0, 40))
    borders = sorted(draw(st.lists(st.integers(0, 100), max_size=8)))
    spans = tuple(Span(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    return world_size, tuple(draw(st.lists(loads, max_size=6))), spans, draw(st.integers(0, 4))


def spans_there(made: Manifest, loads: tuple[Load, ...], number_numel: int) -> list[Span]:
    found = []
    for load, gradient, factor in zip(loads, made.gradients, made.factors, strict=True):
        found.append((load.owner, gradient, load.gradient_numel))
        found.append((load.owner, factor, load.factor_numel))
    found += [(share.owner, share.offset, share.bucket.numel) for share in made.passing]
    found += [(rank, offset, number_numel) for rank, offset in enumerate(made.number_offsets)]
    starts = [made.there.part(rank).start for rank in range(made.there.parts)]
    return [Span(starts[rank] + offset, starts[rank] + offset + numel) for rank, offset, numel in found]


@given(cargoes())
def test_everything_has_a_place_of_its_own(
    cargo: tuple[int, tuple[Load, ...], tuple[Span, ...], int],
) -> None:
    world_size, loads, passing, number_numel = cargo
    made = manifest(world_size, loads, passing, number_numel)
    spans = spans_there(made, loads, number_numel)
    covered = sorted(element for span in spans for element in range(*span))
    assert covered == list(range(made.there.numel))


@given(cargoes())
def test_what_passes_through_is_all_that_shall(
    cargo: tuple[int, tuple[Load, ...], tuple[Span, ...], int],
) -> None:
    made = manifest(*cargo)
    passed = [element for share in made.passing for element in range(*share.bucket)]
    # Spans of a bucket follow each other; they may touch.
    assert passed == [element for span in cargo[2] for element in range(*span)]


@given(cargoes())
def test_the_way_back_is_the_way_there_without_factors(
    cargo: tuple[int, tuple[Load, ...], tuple[Span, ...], int],
) -> None:
    world_size, loads, passing, number_numel = cargo
    made = manifest(*cargo)
    without = manifest(
        world_size, tuple(load._replace(factor_numel=0) for load in loads), passing, number_numel
    )
    assert without.in_place
    assert made.back == without.back
    assert (made.gradients, made.passing, made.number_offsets) == (
        without.gradients,
        without.passing,
        without.number_offsets,
    )
    assert made.in_place == (not any(load.factor_numel for load in loads))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_the_emptiest_parts_are_filled_first(filled: list[int], numel: int) -> None:
    shares = fill_up(filled, numel)
    after = [before + share for before, share in zip(filled, shares, strict=True)]
    assert sum(shares) == numel
    assert min(shares) >= 0
    raised = [level for level, share in zip(after, shares, strict=True) if share]
    # Nobody who got something is more than one element above anybody.
    assert not raised or max(raised) <= min(after) + 1


@given(st.integers(0, 100), st.integers(1, 5))
def test_with_nothing_but_passengers_the_parts_are_those_of_an_equal_layout(
    numel: int, world_size: int
) -> None:
    made = manifest(world_size, (), (Span(0, numel),))
    assert sorted(made.there.lengths) == sorted(fill_up([0] * world_size, numel))
    assert max(made.there.lengths) - min(made.there.lengths) <= 1
    assert made.there.numel == Layout.equal(numel, world_size).numel
