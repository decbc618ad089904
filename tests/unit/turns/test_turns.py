"""The pure pieces of the turn protocol, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._turns import turns
from crossover_ddp._turns.rules import (
    DEFAULT_LEASE_S,
    LONGEST_LEASE_S,
    Blocker,
    Lease,
    Member,
    Patience,
)


def member(
    slot: int, job: int, *, started: int = 0, returned: int = 0, joined_at: int = 0, lease_s: float = 2.0
) -> Member:
    return Member(slot, job, 7, joined_at, max(started, returned), returned, lease_s)


def remaining(patience: Patience, waiting: list[Blocker], now_s: float) -> float | None:
    return patience.remaining(waiting, [blocker.member for blocker in waiting], now_s)


# --- patience -----------------------------------------------------------------------------------------------------


def test_leases_are_waited_for_one_after_the_other_within_the_limit() -> None:
    patience = Patience(limit_s=10.0)
    waiting = [
        *(Blocker(member(slot, 11, lease_s=6.3 + slot / 10), 5) for slot in range(8)),
        Blocker(member(8, 12, lease_s=2.0), 6),
        Blocker(member(9, 13, lease_s=3600.0), 7),
    ]
    assert remaining(patience, waiting, 100.0) == pytest.approx(7.0), "the longest lease of its slots"
    assert remaining(patience, waiting, 106.5) == pytest.approx(0.5)
    assert remaining(patience, waiting, 107.0) == pytest.approx(2.0), "the second one's lease starts only now"
    assert patience.expired_count == 1
    assert remaining(patience, waiting, 109.5) == pytest.approx(0.5), "the limit of one wait"
    assert remaining(patience, waiting, 110.0) is None
    assert [(lost.job, lost.turn, lost.waited_s) for lost in patience.lost] == [
        (11, 5, 7.0),
        (12, 6, 2.5),
        (13, 7, 0.5),
    ]
    patience.started()
    assert patience.lost == []
    assert remaining(patience, waiting, 200.0) is None, "they have not moved"
    moved = [Blocker(member(9, 13, started=9, lease_s=3600.0), 9)]
    assert remaining(patience, moved, 200.0) == pytest.approx(10.0), "every wait has the limit of its own"


# --- leases -------------------------------------------------------------------------------------------------------


def leases(turns_s: list[float], given_s: float | None = None) -> list[float]:
    lease = Lease(given_s)
    found = []
    for turn_s in turns_s:
        before_s = lease.seconds
        assert lease.note(turn_s) == (lease.seconds != before_s)
        found.append(lease.seconds)
    return found


def test_a_lease_follows_the_turns_up_and_down_unless_it_was_given() -> None:
    slow = leases([4.0] * 5 + [0.1] * 15)
    assert slow[2:5] == [DEFAULT_LEASE_S, 16.0, 16.0]
    assert slow[-1] == DEFAULT_LEASE_S
    assert leases([600.0] * 4, given_s=0.5) == [0.5] * 4
    assert leases([0.01] * 40, given_s=3600.0) == [3600.0] * 40


def test_a_turn_that_waited_for_a_lease_does_not_make_the_own_one_longer() -> None:
    """A stopped sibling, whose lease a peer waits for inside our turn; then a stop of ours, for the next sibling."""
    lease_s = DEFAULT_LEASE_S
    for _ in range(4):
        lease_s = max(leases([0.1] * 5 + [lease_s + 0.1] + [0.1] * 15))
    assert lease_s == DEFAULT_LEASE_S


@given(st.lists(st.floats(0.0, 1e4), max_size=40))
def test_a_lease_covers_all_recent_turns_but_three(turns_s: list[float]) -> None:
    lease_s = [DEFAULT_LEASE_S, *leases(turns_s)][-1]
    assert DEFAULT_LEASE_S <= lease_s <= LONGEST_LEASE_S
    assert sum(4 * turn_s > lease_s for turn_s in turns_s[-16:]) <= 3 or lease_s == LONGEST_LEASE_S
    assert lease_s <= max(DEFAULT_LEASE_S, 4 * max(turns_s[-16:], default=0.0))


# --- a turn is for computing --------------------------------------------------------------------------------------


def test_a_process_is_idle_that_computed_nothing_twice_and_one_that_computes_is_looked_at_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"monotonic": 100.0, "process_time": 7.0}
    for clock in now:
        monkeypatch.setattr(turns.time, clock, lambda clock=clock: now[clock])
    looks, found = turns.Looks(), []
    for share in (0.0, 1.0, 0.02, 0.02, 0.0, 0.4, 0.0, *[0.9] * 6, 0.0, 0.0):
        interval_s = looks.interval_s
        now["monotonic"] += interval_s
        now["process_time"] += share * interval_s
        found.append((interval_s, looks.is_idle()))
    assert [is_idle for _, is_idle in found] == [*[False] * 3, True, True, *[False] * 9, True]
    assert [interval_s for interval_s, _ in found[7:]] == [0.005, 0.005, 0.01, 0.02, 0.04, 0.08, 0.08, 0.005]
