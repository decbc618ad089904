"""Every interleaving of the turn protocol, with the functions that the mutex itself runs; see `turn_model`.

The largest worlds are for the campaign. For each of them a smaller one stays that has the same kinds of events; of
29 wrong decisions these worlds found all that the large ones found.
"""

from collections.abc import Iterable, Sequence

import pytest

from crossover_ddp._turns.rules import (
    Blocker,
    Grant,
    Lost,
    Member,
    Patience,
    TurnLog,
    blockers,
)
from crossover_ddp._turns.trial import Mode, Word
from tests.harness.campaign import IN_CAMPAIGN
from tests.unit.turns.turn_model import Model, Rules, Violation

SIDE, BACK = Word.SIDE_BY_SIDE, Word.TAKE_TURNS
PLAIN = (0, 1)
TWO_ON_ONE = (0, 0, 1)
"""Two ranks on the lead device: two slots there."""

TWO = (PLAIN, PLAIN)
SLOTS = (TWO_ON_ONE, PLAIN)
THREE = (PLAIN, PLAIN, PLAIN)
TWO_JOIN_ONE_DEVICE = (PLAIN, (0,), (0,))
OVERLAPPING = (PLAIN, (1, 2))
INSIDE = (PLAIN, (1,))
RING = (PLAIN, (1, 2), (2, 0))
"""Each job shares one device with each other job."""

LARGE = [
    pytest.param(Rules(TWO, (1, 2), words=(SIDE, BACK)), id="side-by-side-and-back-two-turns"),
    pytest.param(Rules(TWO, (2, 2), words=(SIDE,)), id="side-by-side-two-turns"),
    pytest.param(Rules(TWO, (1, 2), words=(SIDE,), deaths=1), id="side-by-side-a-death-two-turns"),
    pytest.param(Rules(TWO, (1, 2), words=(SIDE,), stops=1), id="side-by-side-a-stop-two-turns"),
    pytest.param(Rules(TWO, (1, 1), words=(SIDE,), late_jobs=1), id="side-by-side-joining-late"),
    pytest.param(Rules(THREE, (1, 1, 1), words=(SIDE,)), id="three-jobs-side-by-side"),
    pytest.param(Rules(OVERLAPPING, (1, 2), words=(SIDE,)), id="overlapping-side-by-side"),
    pytest.param(Rules(RING, (1, 1, 1), loans=1), id="ring-a-loan"),
    pytest.param(Rules(TWO, (2, 2), loans=1, deaths=1), id="a-loan-a-death"),
    pytest.param(
        Rules(TWO_JOIN_ONE_DEVICE, (1, 1, 1), late_jobs=1, deaths=1), id="a-slot-of-a-dead-one-on-one-device"
    ),
    pytest.param(Rules(TWO, (2, 1), late_jobs=1), id="joining-late-beside-one-alone"),
    pytest.param(Rules(OVERLAPPING, (2, 2), stops=1), id="overlapping-two-turns-a-stop"),
    pytest.param(
        Rules(OVERLAPPING, (2, 2), late_jobs=1, deaths=1), id="overlapping-joining-late-and-a-death"
    ),
    pytest.param(Rules(RING, (1, 1, 1), hurries=1), id="ring-a-slow-job"),
    pytest.param(Rules(TWO, (2, 2), late_jobs=1, deaths=1), id="joining-late-beside-one-alone-and-a-death"),
    pytest.param(Rules(TWO, (2, 2), stops=1, deaths=1), id="a-stop-and-a-death"),
    pytest.param(Rules(SLOTS, (2, 2), stops=1), id="two-slots-a-stop"),
    pytest.param(Rules(SLOTS, (2, 2), deaths=1), id="two-slots-a-death"),
    pytest.param(Rules(THREE, (1, 1, 1), stops=1), id="three-jobs-a-stop"),
    pytest.param(Rules(THREE, (1, 2, 1), late_jobs=1), id="three-jobs-a-slot-of-one-that-left"),
    pytest.param(Rules(THREE, (1, 1, 1), late_jobs=1, deaths=1), id="three-jobs-a-slot-of-a-dead-one"),
]


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(TWO, (3, 3)), id="two-jobs"),
        pytest.param(Rules(TWO, (3, 3), early_draw=False), id="two-jobs-late-draw"),
        pytest.param(Rules(TWO, (2, 2), deaths=2), id="two-deaths"),
        pytest.param(Rules(TWO, (2, 2), stops=1), id="a-stop"),
        pytest.param(Rules(TWO, (1, 1), stops=1, deaths=1), id="a-stop-and-a-death-one-turn"),
        pytest.param(Rules(TWO, (2, 2), hurries=2), id="two-leases-of-slow-jobs"),
        pytest.param(Rules(TWO, (2, 2), late_jobs=1, deaths=1, alone=False), id="joining-late-and-a-death"),
        pytest.param(Rules(TWO, (1, 1), late_jobs=1, deaths=1), id="joining-late-and-a-death-one-turn"),
        pytest.param(Rules(SLOTS, (1, 2), stops=1), id="two-slots-a-stop-one-turn"),
        pytest.param(Rules(SLOTS, (1, 2), deaths=1), id="two-slots-a-death-one-turn"),
        pytest.param(Rules(SLOTS, (2, 2), hurries=1), id="two-slots-a-slow-job"),
        pytest.param(Rules(THREE, (2, 2, 2)), id="three-jobs"),
        pytest.param(Rules(THREE, (1, 1, 1), hurries=2), id="three-jobs-two-leases"),
        pytest.param(Rules(THREE, (1, 1, 1), deaths=1), id="three-jobs-a-death"),
        pytest.param(Rules(THREE, (1, 1, 1), late_jobs=1), id="three-jobs-a-slot-of-one-that-left-one-turn"),
        pytest.param(Rules(OVERLAPPING, (2, 2)), id="overlapping"),
        pytest.param(
            Rules(OVERLAPPING, (1, 1), stops=1, deaths=1, alone=False), id="overlapping-a-stop-and-a-death"
        ),
        pytest.param(Rules(INSIDE, (2, 2), deaths=1), id="one-device-inside-two-a-death"),
        pytest.param(Rules(RING, (1, 1, 1)), id="ring"),
        pytest.param(Rules(RING, (1, 1, 1), deaths=1, alone=False), id="ring-a-death"),
        pytest.param(Rules(TWO, (1, 2), words=(SIDE,)), id="side-by-side"),
        pytest.param(Rules(TWO, (1, 1), words=(SIDE, BACK)), id="side-by-side-and-back"),
        pytest.param(Rules(TWO, (1, 1), words=(SIDE,), deaths=1), id="side-by-side-a-death"),
        pytest.param(Rules(TWO, (1, 1), words=(SIDE,), stops=1), id="side-by-side-a-stop"),
        pytest.param(Rules(TWO, (2, 2), loans=2), id="two-loans"),
        pytest.param(Rules(TWO, (1, 1), loans=1, words=(SIDE,), deaths=1), id="a-loan-a-death-side-by-side"),
        pytest.param(Rules(TWO, (2, 2), loans=1, stops=1), id="a-loan-a-stop"),
        *(LARGE if IN_CAMPAIGN else []),
    ],
)
def test_no_interleaving_breaks_a_promise(rules: Rules) -> None:
    assert Model(rules).explore() > 1000


# --- one wrong decision each ------------------------------------------------------------------------------------------


def waits_for_nobody(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
    return []


def waits_for_one_turn_too_few(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
    after = tuple((job, turn - 1) for job, turn in grant.after)
    return blockers(grant._replace(after=after), own_job, members)


def waits_for_one_turn_too_many(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
    after = tuple((job, turn + 1) for job, turn in grant.after)
    return blockers(grant._replace(after=after), own_job, members)


def waits_for_started_turns_only(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
    return [each for each in blockers(grant, own_job, members) if each.member.started > each.member.returned]


class OwnersMixedUp(TurnLog):
    """Takes a record of a slot's earlier owner for one of the present owner."""

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        return super().grant(turn, own_job, [member._replace(joined_at=-1) for member in members])


class FirstTurnMissed(TurnLog):
    """Does not count the turn that a job drew first after it had joined."""

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        late = [member._replace(joined_at=member.joined_at + 1) for member in members]
        return super().grant(turn, own_job, late)


class NotWaitingWhereTurnsPay(TurnLog):
    """Does not wait once it was decided that turns pay."""

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        grant = super().grant(turn, own_job, members)
        return grant._replace(after=()) if grant.mode is Mode.TURNS else grant


class ForgivesForGood(Patience):
    """Never waits again for a slot that it has once ceased to wait for."""

    def _passes(self, blocker: Blocker) -> bool:
        return any(slot == blocker.member.slot for slot, *_ in self.passed)


class ForgivesJobsNotSlots(Patience):
    """Passes all of a job's slots over for as long as one of them has not moved."""

    def remaining(self, waiting: Sequence[Blocker], members: Sequence[Member], now_s: float) -> float | None:
        stuck = {
            each.job
            for each in members
            if each.started > each.returned
            and (each.slot, each.incarnation, each.started, each.returned) in self.passed
        }
        return super().remaining([each for each in waiting if each.member.job not in stuck], members, now_s)


class ForgivesSlotsNotJobs(Patience):
    """Waits for a lease of each slot of a job, one after the other."""

    def _lose(self, lost: Lost, members: Sequence[Member]) -> None:
        fresh = [each for each in members if each.job == lost.job and not self._passes(Blocker(each, 0))]
        others = [each for each in members if self._passes(Blocker(each, 0))]
        super()._lose(lost, [*others, *fresh[:1]])


class ForgivesOneTurnOnly(Patience):
    """Waits for a lease of every turn that a stopped job has drawn."""

    def _passes(self, blocker: Blocker) -> bool:
        return (blocker.member.slot, blocker.member.incarnation, blocker.turn, -1) in self.passed

    def _lose(self, lost: Lost, members: Sequence[Member]) -> None:
        super()._lose(lost, members)
        same = [each for each in members if each.job == lost.job]
        self.passed = frozenset((each.slot, each.incarnation, lost.turn, -1) for each in same)


OVERLAP, DEADLOCK, SECOND_LEASE = "before job . has given back", "deadlock", "waits for a second lease"
STOP, SLOT_REUSED = Rules(TWO, (2, 2), stops=1), Rules(THREE, (1, 1, 1), late_jobs=1)


@pytest.mark.parametrize(
    ("rules", "violation"),
    [
        pytest.param(Rules(TWO, (2, 2), mutex_per_device=True), DEADLOCK, id="a-mutex-per-device"),
        pytest.param(Rules(RING, (1, 1, 1), mutex_per_device=True), DEADLOCK, id="a-mutex-per-device-ring"),
        pytest.param(
            Rules(OVERLAPPING, (2, 2), waits_for=waits_for_one_turn_too_few),
            OVERLAP,
            id="overlapping-too-few",
        ),
        pytest.param(Rules(TWO, (2, 2), waits_for=waits_for_nobody), OVERLAP, id="no-wait"),
        pytest.param(
            Rules(TWO, (2, 2), waits_for=waits_for_one_turn_too_few), OVERLAP, id="one-turn-too-few"
        ),
        pytest.param(
            Rules(TWO, (2, 2), waits_for=waits_for_one_turn_too_many), DEADLOCK, id="one-turn-too-many"
        ),
        pytest.param(
            Rules(TWO, (2, 2), waits_for=waits_for_started_turns_only), OVERLAP, id="started-turns-only"
        ),
        pytest.param(
            Rules(TWO, (2, 2), draw_steps=("read", "append", "look")), OVERLAP, id="reads-before-it-appends"
        ),
        pytest.param(
            Rules(TWO, (2, 2), late_jobs=1, draw_steps=("look", "append", "read")),
            OVERLAP,
            id="looks-before-it-appends",
        ),
        pytest.param(SLOT_REUSED._replace(turn_log=OwnersMixedUp), DEADLOCK, id="an-earlier-owners-turns"),
        pytest.param(Rules(TWO, (2, 2), turn_log=FirstTurnMissed), OVERLAP, id="the-first-turn-missed"),
        pytest.param(
            Rules(TWO, (2, 2), words=(BACK,), turn_log=NotWaitingWhereTurnsPay),
            OVERLAP,
            id="no-wait-where-turns-pay",
        ),
        pytest.param(STOP._replace(patience=ForgivesForGood), OVERLAP, id="forgives-for-good"),
        pytest.param(
            Rules(SLOTS, (2, 2), hurries=1, patience=ForgivesJobsNotSlots), OVERLAP, id="forgives-all-slots"
        ),
        pytest.param(STOP._replace(patience=ForgivesOneTurnOnly), SECOND_LEASE, id="a-lease-for-each-turn"),
        pytest.param(
            Rules(SLOTS, (2, 2), stops=1, patience=ForgivesSlotsNotJobs),
            SECOND_LEASE,
            id="a-lease-for-each-slot",
        ),
    ],
)
def test_the_model_finds_a_wrong_decision(rules: Rules, violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        Model(rules).explore()
