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


def test_patience_runs_out_once_for_a_turn_and_only_for_the_front() -> None:
    patience = Patience()
    waiting = [Blocker(member(1, 11), 5), Blocker(member(2, 12), 8)]
    assert remaining(patience, waiting, 100.0) == pytest.approx(2.0)
    assert remaining(patience, waiting, 101.5) == pytest.approx(0.5)
    assert remaining(patience, waiting, 102.0) == pytest.approx(2.0), "the second one's lease starts only now"
    assert patience.expired_count == 1
    assert [(lost.job, lost.turn, lost.waited_s, lost.at_limit) for lost in patience.lost] == [
        (11, 5, 2.0, False)
    ]
    patience.started()
    assert patience.lost == []
    assert remaining(patience, waiting[:1], 200.0) is None, "it has not moved"
    moved = member(1, 11, started=9)
    assert remaining(patience, [Blocker(moved, 9)], 200.0) == pytest.approx(2.0)


def test_a_stopped_job_costs_one_lease_however_many_slots_it_has() -> None:
    patience = Patience()
    waiting = [Blocker(member(slot, 11, lease_s=1.0 + slot / 10), 5) for slot in range(8)]
    assert remaining(patience, waiting, 0.0) == pytest.approx(1.7), "the longest lease of its slots"
    assert remaining(patience, waiting, 1.75) is None
    assert patience.expired_count == 1


def test_one_wait_ends_at_the_limit_whatever_the_leases_are() -> None:
    patience = Patience(limit_s=10.0)
    waiting = [Blocker(member(1, 11, lease_s=7.0), 5), Blocker(member(2, 12, lease_s=3600.0), 6)]
    assert remaining(patience, waiting, 0.0) == pytest.approx(7.0)
    assert remaining(patience, waiting, 7.0) == pytest.approx(3.0)
    assert remaining(patience, waiting, 10.0) is None
    assert [(lost.job, lost.at_limit) for lost in patience.lost] == [(11, False), (12, True)]
    patience.started()
    assert remaining(patience, waiting, 20.0) is None, "what was forgiven stays so"
    moved = [Blocker(member(2, 12, started=9, lease_s=3600.0), 9)]
    assert remaining(patience, moved, 20.0) == pytest.approx(10.0), "every wait has the limit of its own"


# --- leases -------------------------------------------------------------------------------------------------------


def leases(turns_s: list[float], given_s: float | None = None) -> list[float]:
    lease = Lease(given_s)
    found = []
    for turn_s in turns_s:
        before_s = lease.seconds
        assert lease.note(turn_s) == (lease.seconds != before_s)
        found.append(lease.seconds)
    return found


def test_a_lease_follows_the_turns_up_and_down() -> None:
    assert Lease().seconds == DEFAULT_LEASE_S
    assert leases([0.1] * 20) == [DEFAULT_LEASE_S] * 20
    slow = leases([4.0] * 5 + [0.1] * 15)
    assert slow[2:5] == [DEFAULT_LEASE_S, 16.0, 16.0]
    assert slow[-1] == DEFAULT_LEASE_S


def test_a_turn_that_waited_for_a_lease_does_not_make_the_own_one_longer() -> None:
    """A stopped sibling, whose lease a peer waits for inside our turn; then a stop of ours, for the next sibling."""
    lease_s = DEFAULT_LEASE_S
    for _ in range(4):
        lease_s = max(leases([0.1] * 5 + [lease_s + 0.1] + [0.1] * 15))
    assert lease_s == DEFAULT_LEASE_S


def test_a_lease_that_is_given_stays() -> None:
    assert leases([600.0] * 4, given_s=0.5) == [0.5] * 4
    assert leases([0.01] * 40, given_s=3600.0) == [3600.0] * 40


@given(st.lists(st.floats(0.0, 1e4), max_size=40))
def test_a_lease_covers_all_recent_turns_but_three(turns_s: list[float]) -> None:
    lease_s = [DEFAULT_LEASE_S, *leases(turns_s)][-1]
    assert DEFAULT_LEASE_S <= lease_s <= LONGEST_LEASE_S
    assert sum(4 * turn_s > lease_s for turn_s in turns_s[-16:]) <= 3 or lease_s == LONGEST_LEASE_S
    assert lease_s <= max(DEFAULT_LEASE_S, 4 * max(turns_s[-16:], default=0.0))


# --- a turn is for computing --------------------------------------------------------------------------------------


def test_a_process_is_idle_when_it_has_computed_nothing_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"monotonic": 100.0, "process_time": 7.0}
    for clock in now:
        monkeypatch.setattr(turns.time, clock, lambda clock=clock: now[clock])
    looks = turns.Looks(None)

    def look(ran_s: float) -> bool:
        now["monotonic"] += 0.005
        now["process_time"] += ran_s
        return looks.is_idle()

    assert [look(ran_s) for ran_s in (0.0, 0.005, 0.0001, 0.0001, 0.0, 0.002, 0.0)] == [
        *(False, False, False),
        *(True, True),
        *(False, False),
    ]


def test_a_process_that_computes_is_looked_at_seldom_and_one_that_may_be_idle_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"monotonic": 100.0, "process_time": 7.0}
    for clock in now:
        monkeypatch.setattr(turns.time, clock, lambda clock=clock: now[clock])
    looks, intervals = turns.Looks(None), []
    for share in (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 0.0):
        intervals.append(looks.interval_s)
        now["monotonic"] += looks.interval_s
        now["process_time"] += share * looks.interval_s
        is_idle = looks.is_idle()
    assert intervals == [0.005, 0.005, 0.01, 0.02, 0.04, 0.08, 0.08, 0.08, 0.005]
    assert is_idle
