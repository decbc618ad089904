"""The pure pieces of the turn protocol, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._turns import (
    Blocker,
    Grant,
    Member,
    Patience,
    TurnLog,
    blockers,
    decode,
    encode,
    message_numel,
)


def member(slot: int, job: int, *, returned: int = 0, joined_at: int = 0, lease_s: float = 2.0) -> Member:
    return Member(slot, job, 7, joined_at, returned, lease_s)


def test_grant_names_the_last_turn_of_every_other_job() -> None:
    log = TurnLog()
    log.read(bytes([0, 1, 0, 2, 1]))
    grant = log.grant(6, own_job=10, members=[member(0, 10), member(1, 11), member(2, 12)])
    assert grant == Grant(6, True, ((11, 5), (12, 4)))


def test_grant_ignores_turns_drawn_by_an_earlier_owner_of_a_slot() -> None:
    log = TurnLog()
    log.read(bytes([1, 1, 0]))
    assert log.grant(4, 10, [member(0, 10), member(1, 99, joined_at=2)]).after == ()
    log.read(bytes([1]))
    assert log.grant(5, 10, [member(0, 10), member(1, 99, joined_at=2)]).after == ((99, 4),)


def test_a_lone_job_shares_with_nobody() -> None:
    assert not TurnLog().grant(1, 10, [member(0, 10), member(3, 10)]).shared


def test_blockers_are_the_slots_that_have_not_returned_lowest_turn_first() -> None:
    grant = Grant(9, True, ((11, 8), (12, 5)))
    seen = [member(0, 10), member(1, 11, returned=7), member(2, 11, returned=8), member(3, 12), member(4, 13)]
    assert [(b.member.slot, b.turn) for b in blockers(grant, 10, seen)] == [(3, 5), (1, 8)]


def test_patience_runs_out_once_for_a_turn_and_only_for_the_front() -> None:
    patience = Patience()
    waiting = [Blocker(member(1, 11), 5), Blocker(member(2, 12), 8)]
    assert patience.remaining(waiting, 100.0) == pytest.approx(2.0)
    assert patience.remaining(waiting, 101.5) == pytest.approx(0.5)
    assert patience.remaining(waiting, 102.0) == pytest.approx(2.0), "the second one's lease starts only now"
    assert patience.expired_count == 1
    patience.started()
    assert patience.remaining(waiting[:1], 200.0) is None, "a forgiven turn is not waited for again"
    assert patience.remaining([Blocker(member(1, 11), 9)], 200.0) == pytest.approx(2.0)


def test_a_new_front_gets_its_whole_lease() -> None:
    patience = Patience()
    assert patience.remaining([Blocker(member(1, 11), 5)], 0.0) == pytest.approx(2.0)
    assert patience.remaining([Blocker(member(2, 12, lease_s=4.0), 8)], 1.9) == pytest.approx(4.0)


ids = st.integers(min_value=1, max_value=2**62)


@given(ids, st.booleans(), st.dictionaries(ids, ids, max_size=5))
def test_messages_arrive_as_they_were_sent(turn: int, shared: bool, after: dict[int, int]) -> None:
    grant = Grant(turn, shared, tuple(sorted(after.items())))
    message = encode(grant, message_numel(5))
    assert len(message) == message_numel(5)
    assert decode(message) == grant


def test_too_many_siblings_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1 sibling jobs, got 2"):
        encode(Grant(1, True, ((1, 1), (2, 1))), message_numel(1))
