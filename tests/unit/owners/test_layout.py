"""Who owns what by its cost, and where it lies in what travels: once both ways, in its owner's part."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._ddp.layout import Span, spans_of
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.packing import Item, Place, fill_up, packing


@st.composite
def arguments(draw: st.DrawFn) -> tuple[int, tuple[Item, ...], tuple[Span, ...]]:
    world_size = draw(st.integers(1, 5))
    item = st.builds(Item, st.integers(0, world_size - 1), st.integers(0, 40), st.integers(0, 40))
    borders = sorted(draw(st.lists(st.integers(0, 100), max_size=8)))
    spans = tuple(Span(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    return world_size, tuple(draw(st.lists(item, max_size=6))), spans


@given(arguments())
def test_everything_travels_once_both_ways_in_its_owners_part(given: Any) -> None:
    _, items, spans = given
    made = packing(*given)
    for place, (owner, there, back) in zip(made.items, items, strict=True):
        assert (place.owner, place.there.numel, place.back.numel) == (owner, there, back)
    for span, place in made.passing:
        assert span.numel == place.there.numel == place.back.numel
    # Spans of a bucket follow each other; they may touch.
    assert [n for span, _ in made.passing for n in range(*span)] == [n for span in spans for n in range(*span)]
    places: list[Place] = [*made.items, *(place for _, place in made.passing)]
    for layout, both in ((made.there, [p.there for p in places]), (made.back, [p.back for p in places])):
        assert sorted(n for span in both for n in range(*span)) == [*range(sum(layout))]
        for span, place in zip(both, places, strict=True):
            part = spans_of(layout)[place.owner]
            assert part.start <= span.start and span.stop <= part.stop


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_the_emptiest_parts_are_filled_first(filled: list[int], numel: int) -> None:
    """So what passes through fills up the parts of those who own little."""
    shares = fill_up(filled, numel)
    after = [before + share for before, share in zip(filled, shares, strict=True)]
    assert sum(shares) == numel
    assert min(shares) >= 0
    raised = [level for level, share in zip(after, shares, strict=True) if share]
    # Nobody who got something is more than one element above anybody.
    assert not raised or max(raised) <= min(after) + 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_a_part_of_one(costs: list[int], world_size: int) -> None:
    made, loads = assign(costs, world_size), [0] * world_size
    for cost, owner in zip(costs, made.owners, strict=True):
        loads[owner] += cost
    assert [*made.loads] == loads
    assert world_size * max(loads) <= sum(costs) + max(costs, default=0) * (world_size - 1)
