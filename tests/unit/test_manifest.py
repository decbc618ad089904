"""The contents of K-FAC's cargo: everything travels once, factors only one way, parts as equal as they can be."""

from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._kfac.manifest import Load, Manifest, fill_up, manifest


@st.composite
def cargoes(draw: st.DrawFn) -> tuple[int, tuple[Load, ...], tuple[Span, ...], int]:
    world_size = draw(st.integers(1, 5))
    rows = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size).map(tuple)
    sizes = st.integers(0, world_size - 1), st.integers(0, 30), st.integers(0, 40), st.integers(0, 20)
    loads = st.builds(Load, *sizes, st.just(()) | rows)
    borders = sorted(draw(st.lists(st.integers(0, 100), max_size=8)))
    spans = tuple(Span(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    return world_size, tuple(draw(st.lists(loads, max_size=6))), spans, draw(st.integers(0, 4))


def spans_of(made: Manifest, loads: tuple[Load, ...], number_numel: int, *, back: bool) -> list[Span]:
    """Return where everything lies, one way or the other."""
    found = []
    appendices = made.solvers if back else made.factors
    for load, gradients, appendix in zip(loads, made.gradients, appendices, strict=True):
        if load.rows_numel:
            found += list(zip(range(made.there.parts), gradients, load.rows_numel, strict=True))
        else:
            (gradient,) = gradients
            found.append((load.owner, gradient, load.gradient_numel))
        found.append((load.owner, appendix, load.solver_numel if back else load.factor_numel))
    found += [(share.owner, share.offset, share.bucket.numel) for share in made.passing]
    found += [(rank, offset, number_numel) for rank, offset in enumerate(made.number_offsets)]
    layout = made.back if back else made.there
    starts = [layout.part(rank).start for rank in range(layout.parts)]
    return [Span(starts[rank] + offset, starts[rank] + offset + numel) for rank, offset, numel in found]


@given(cargoes())
def test_everything_has_a_place_of_its_own(
    cargo: tuple[int, tuple[Load, ...], tuple[Span, ...], int],
) -> None:
    world_size, loads, passing, number_numel = cargo
    made = manifest(world_size, loads, passing, number_numel)
    for back, layout in ((False, made.there), (True, made.back)):
        spans = spans_of(made, loads, number_numel, back=back)
        covered = sorted(element for span in spans for element in range(*span))
        assert covered == list(range(layout.numel))


@given(cargoes())
def test_what_passes_through_is_all_that_shall(
    cargo: tuple[int, tuple[Load, ...], tuple[Span, ...], int],
) -> None:
    made = manifest(*cargo)
    passed = [element for share in made.passing for element in range(*share.bucket)]
    # Spans of a bucket follow each other; they may touch.
    assert passed == [element for span in cargo[2] for element in range(*span)]


@given(cargoes())
def test_both_ways_are_the_same_up_to_their_appendices(
    cargo: tuple[int, tuple[Load, ...], tuple[Span, ...], int],
) -> None:
    world_size, loads, passing, number_numel = cargo
    made = manifest(*cargo)
    bare = tuple(load._replace(factor_numel=0, solver_numel=0) for load in loads)
    without = manifest(world_size, bare, passing, number_numel)
    assert without.in_place
    assert without.there == without.back
    assert (made.gradients, made.passing, made.number_offsets) == (
        without.gradients,
        without.passing,
        without.number_offsets,
    )
    assert made.in_place == (not any(load.factor_numel or load.solver_numel for load in loads))


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
