"""The order of deferred gathers: reduce-scatters first, then what forward needs first, the same on all ranks."""

import threading
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._exchange.gathers import GatherOrder


def order_of_one() -> GatherOrder:
    ring: Any = SimpleNamespace(rank=0, size=1, channel=0)
    return GatherOrder(ring)


def transfer(sequence: int, urgency: int, step: object = "this step", *, last: bool = False) -> Any:
    return SimpleNamespace(sequence=sequence, urgency=urgency, step=step, last=last)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10))
def test_what_is_ready_is_gathered_in_the_order_of_need(urgencies: list[int]) -> None:
    order = order_of_one()
    transfers = [transfer(sequence, urgency) for sequence, urgency in enumerate(urgencies)]
    for each in transfers:
        order.scatter_begins(each)
    for each in transfers:
        order.scatter_ends(each)
    got = [order.next() for _ in urgencies]
    assert [each.urgency for each in got] == sorted(urgencies)
    ties = [(each.urgency, -each.sequence) for each in got]
    assert ties == sorted(ties)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300))
def test_the_rest_of_a_step_is_told_at_once(urgencies: list[int]) -> None:
    order = order_of_one()
    words: list[torch.Tensor] = []
    order._pass_on = words.append  # type: ignore[method-assign]
    place = len(urgencies) - 1
    transfers = [transfer(sequence, need, last=sequence == place) for sequence, need in enumerate(urgencies)]
    for each in transfers:
        order.scatter_begins(each)
        order.scatter_ends(each)
    got = [order.next()]
    # What is reduced meanwhile is of a later step and comes after.
    later = transfer(len(urgencies), -1, "next step")
    order.scatter_begins(later)
    order.scatter_ends(later)
    got += [order.next() for _ in urgencies]
    assert got == [*sorted(transfers, key=lambda each: (each.urgency, -each.sequence)), later]
    assert len(words) == 2 or len(urgencies) > 256


def test_a_gather_waits_while_a_reduce_scatter_wants_the_wire() -> None:
    order = order_of_one()
    first, second = transfer(0, 7), transfer(1, 3)
    order.scatter_begins(first)
    order.scatter_begins(second)
    order.scatter_ends(first)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(order.next()))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    order.scatter_ends(second)
    waiting.join(10)
    assert got == [second]


def test_a_bucket_whose_owners_step_is_not_done_keeps_no_other_from_the_wire() -> None:
    order = order_of_one()
    first, second, third = transfer(0, 1), transfer(1, 5), transfer(2, -2, last=True)
    for each in (first, second, third):
        order.scatter_begins(each)
    for each in (first, second, third):
        order.scatter_ends(each, ready=False)
    order.step_ends(second)
    assert order.next() is second
    order.step_ends(first)
    order.step_ends(third)
    assert [order.next(), order.next()] == [third, first]


def test_a_gather_does_not_wait_for_later_steps_which_may_wait_for_it() -> None:
    """A rank that has run out of inputs is ahead of the others, whose next forward needs this gather."""
    order = order_of_one()
    old, new = transfer(0, 7, "this step"), transfer(1, 3, "next step")
    for each in (old, new):
        order.scatter_begins(each)
    order.scatter_ends(old)
    assert order.next() is old
