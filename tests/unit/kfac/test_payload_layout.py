"""The contents of K-FAC's payload: everything travels once, solvers only back, parts as equal as they can be."""

from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._kfac.payload_layout import LayerSizes, PayloadLayout, payload_layout


@st.composite
def payloads(draw: st.DrawFn) -> tuple[int, tuple[LayerSizes, ...], tuple[Span, ...], int]:
    world_size = draw(st.integers(1, 5))
    rows = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size).map(tuple)
    sizes = st.integers(0, world_size - 1), st.integers(0, 30), st.integers(0, 20)
    layers = st.builds(LayerSizes, *sizes, st.just(()) | rows)
    borders = sorted(draw(st.lists(st.integers(0, 100), max_size=8)))
    spans = tuple(Span(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    return world_size, tuple(draw(st.lists(layers, max_size=6))), spans, draw(st.integers(0, 4))


def spans_of(
    made: PayloadLayout, layers: tuple[LayerSizes, ...], number_numel: int, *, back: bool
) -> list[Span]:
    """Return where everything lies, one way or the other."""
    found = []
    for layer, gradients, solver in zip(layers, made.gradients, made.solvers, strict=True):
        if layer.rows_numel:
            found += list(zip(range(made.there.parts), gradients, layer.rows_numel, strict=True))
        else:
            (gradient,) = gradients
            found.append((layer.owner, gradient, layer.gradient_numel))
        if back:
            found.append((layer.owner, solver, layer.solver_numel))
    found += [(share.owner, share.offset, share.bucket.numel) for share in made.passing]
    found += [(rank, offset, number_numel) for rank, offset in enumerate(made.number_offsets)]
    layout = made.back if back else made.there
    starts = [layout.part(rank).start for rank in range(layout.parts)]
    return [Span(starts[rank] + offset, starts[rank] + offset + numel) for rank, offset, numel in found]


@given(payloads())
def test_everything_has_a_place_of_its_own(
    payload: tuple[int, tuple[LayerSizes, ...], tuple[Span, ...], int],
) -> None:
    world_size, layers, passing, number_numel = payload
    made = payload_layout(world_size, layers, passing, number_numel)
    for back, layout in ((False, made.there), (True, made.back)):
        spans = spans_of(made, layers, number_numel, back=back)
        covered = sorted(element for span in spans for element in range(*span))
        assert covered == list(range(layout.numel))


@given(payloads())
def test_both_ways_are_the_same_up_to_the_solvers(
    payload: tuple[int, tuple[LayerSizes, ...], tuple[Span, ...], int],
) -> None:
    world_size, layers, passing, number_numel = payload
    made = payload_layout(*payload)
    bare = tuple(layer._replace(solver_numel=0) for layer in layers)
    without = payload_layout(world_size, bare, passing, number_numel)
    assert without.in_place
    assert without.there == without.back
    assert (made.gradients, made.passing, made.number_offsets) == (
        without.gradients,
        without.passing,
        without.number_offsets,
    )
    assert made.in_place == (not any(layer.solver_numel for layer in layers))


@given(st.integers(0, 100), st.integers(1, 5))
def test_with_nothing_but_bucket_layers_the_parts_are_those_of_an_equal_layout(
    numel: int, world_size: int
) -> None:
    made = payload_layout(world_size, (), (Span(0, numel),))
    assert max(made.there.lengths) - min(made.there.lengths) <= 1
    assert made.there.numel == Layout.equal(numel, world_size).numel
