"""Every interleaving of the turn protocol, with the functions that the mutex itself runs; see `turn_model`.

The largest worlds are for the campaign. For each of them a smaller one stays that has the same kinds of events.
"""

from collections.abc import Callable, Iterable, Sequence

import pytest

from crossover_ddp._turns.rules import Blocker, Grant, Lost, Member, Mode, Patience, TurnLog, Word, blockers
from tests.harness.campaign import IN_CAMPAIGN
from tests.unit.turns.turn_model import Model, Rules, Violation

SIDE, BACK = Word.SIDE_BY_SIDE, Word.TAKE_TURNS
PLAIN = (0, 1)
TWO, THREE = (PLAIN, PLAIN), (PLAIN, PLAIN, PLAIN)
SLOTS = ((0, 0, 1), PLAIN)  # two ranks on the lead device: two slots there
ALONE = ((0,), PLAIN)
TWO_JOIN_ONE_DEVICE = (PLAIN, (0,), (0,))
OVERLAPPING, INSIDE = (PLAIN, (1, 2)), (PLAIN, (1,))
RING = (PLAIN, (1, 2), (2, 0))  # each job shares one device with each other job

LARGE = {
    "side-by-side-a-death-two-turns": Rules(TWO, (1, 2), words=(SIDE,), deaths=1),
    "side-by-side-a-stop-two-turns": Rules(TWO, (1, 2), words=(SIDE,), stops=1),
    "side-by-side-joining-late": Rules(TWO, (1, 1), words=(SIDE,), late_jobs=1),
    "overlapping-two-turns-a-stop": Rules(OVERLAPPING, (2, 2), stops=1),
    "overlapping-joining-late-and-a-death": Rules(OVERLAPPING, (2, 2), late_jobs=1, deaths=1),
    "joining-late-beside-one-alone-and-a-death": Rules(TWO, (2, 2), late_jobs=1, deaths=1),
    "two-slots-a-stop": Rules(SLOTS, (2, 2), stops=1),
    "three-jobs-a-stop": Rules(THREE, (1, 1, 1), stops=1),
    "three-jobs-a-slot-of-one-that-left": Rules(THREE, (1, 2, 1), late_jobs=1),
    "three-jobs-a-slot-of-a-dead-one": Rules(THREE, (1, 1, 1), late_jobs=1, deaths=1),
}
WORLDS = {
    "two-jobs": Rules(TWO, (3, 3)),
    "two-jobs-late-draw": Rules(TWO, (3, 3), early_draw=False),
    "two-deaths": Rules(TWO, (2, 2), deaths=2),
    "a-stop-and-a-death": Rules(TWO, (2, 2), stops=1, deaths=1),
    "two-leases-of-slow-jobs": Rules(TWO, (2, 2), hurries=2),
    "joining-late": Rules(TWO, (2, 1), late_jobs=1),
    "joining-late-and-a-death": Rules(TWO, (2, 2), late_jobs=1, deaths=1, alone=False),
    "joining-late-and-a-death-one-turn": Rules(TWO, (1, 1), late_jobs=1, deaths=1),
    "two-slots-a-stop-one-turn": Rules(SLOTS, (1, 2), stops=1),
    "two-slots-a-death": Rules(SLOTS, (2, 2), deaths=1),
    "two-slots-a-slow-job": Rules(SLOTS, (2, 2), hurries=1),
    "three-jobs": Rules(THREE, (2, 2, 2)),
    "three-jobs-two-leases": Rules(THREE, (1, 1, 1), hurries=2),
    "three-jobs-a-death": Rules(THREE, (1, 1, 1), deaths=1),
    "three-jobs-a-slot-of-one-that-left-one-turn": Rules(THREE, (1, 1, 1), late_jobs=1),
    "a-slot-of-a-dead-one": Rules(TWO_JOIN_ONE_DEVICE, (1, 1, 1), late_jobs=1, deaths=1),
    "overlapping": Rules(OVERLAPPING, (2, 2)),
    "overlapping-a-stop-and-a-death": Rules(OVERLAPPING, (1, 1), stops=1, deaths=1, alone=False),
    "one-device-inside-two-a-death": Rules(INSIDE, (2, 2), deaths=1),
    "ring-a-slow-job": Rules(RING, (1, 1, 1), hurries=1),
    "ring-a-death": Rules(RING, (1, 1, 1), deaths=1, alone=False),
    "ring-a-loan": Rules(RING, (1, 1, 1), loans=1),
    "side-by-side": Rules(TWO, (2, 2), words=(SIDE,)),
    "side-by-side-and-back": Rules(TWO, (1, 2), words=(SIDE, BACK)),
    "side-by-side-a-death": Rules(TWO, (1, 1), words=(SIDE,), deaths=1),
    "side-by-side-a-stop": Rules(TWO, (1, 1), words=(SIDE,), stops=1),
    "three-jobs-side-by-side": Rules(THREE, (1, 1, 1), words=(SIDE,)),
    "overlapping-side-by-side": Rules(OVERLAPPING, (1, 2), words=(SIDE,)),
    "going-on-lent": Rules(ALONE, (3, 2), loans=2, goes_on=True),
    "two-loans": Rules(TWO, (2, 2), loans=2),
    "a-loan-a-death": Rules(TWO, (2, 2), loans=1, deaths=1),
    "a-loan-a-death-side-by-side": Rules(TWO, (1, 1), loans=1, words=(SIDE,), deaths=1),
    "a-loan-a-stop": Rules(TWO, (2, 2), loans=1, stops=1),
}


@pytest.mark.parametrize("world", {**WORLDS, **(LARGE if IN_CAMPAIGN else {})})
def test_no_interleaving_breaks_a_promise(world: str) -> None:
    assert Model({**WORLDS, **LARGE}[world]).explore() > 1000


def waits_for_others(by: int) -> Callable[..., list[Blocker]]:
    """Wait for so many turns too many."""

    def waits_for(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
        after = tuple((job, turn + by) for job, turn in grant.after)
        return blockers(grant._replace(after=after), own_job, members)

    return waits_for


def waits_for_started_turns_only(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
    return [each for each in blockers(grant, own_job, members) if each.member.started > each.member.returned]


def with_joined_at(seen: Callable[[int], int]) -> type[TurnLog]:
    """Take the places at which the owners of slots have joined for others."""

    class Mistaken(TurnLog):
        def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
            members = [each._replace(joined_at=seen(each.joined_at)) for each in members]
            return super().grant(turn, own_job, members)

    return Mistaken


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
BOTH, STOP = Rules(TWO, (2, 2)), Rules(TWO, (2, 2), stops=1)
SLOT_REUSED, GOING_ON = Rules(THREE, (1, 1, 1), late_jobs=1), Rules(ALONE, (3, 1), loans=1, goes_on=True)
WRONG = {
    "a-mutex-per-device": (BOTH._replace(mutex_per_device=True), DEADLOCK),
    "a-mutex-per-device-ring": (Rules(RING, (1, 1, 1), mutex_per_device=True), DEADLOCK),
    "overlapping-too-few": (Rules(OVERLAPPING, (2, 2), waits_for=waits_for_others(-1)), OVERLAP),
    "no-wait": (BOTH._replace(waits_for=lambda *_: []), OVERLAP),
    "one-turn-too-few": (BOTH._replace(waits_for=waits_for_others(-1)), OVERLAP),
    "one-turn-too-many": (BOTH._replace(waits_for=waits_for_others(1)), DEADLOCK),
    "started-turns-only": (BOTH._replace(waits_for=waits_for_started_turns_only), OVERLAP),
    "reads-before-it-appends": (BOTH._replace(draw_steps=("read", "append", "look")), OVERLAP),
    "looks-before-it-appends": (BOTH._replace(late_jobs=1, draw_steps=("look", "append")), OVERLAP),
    "an-earlier-owners-turns": (SLOT_REUSED._replace(turn_log=with_joined_at(lambda _: -1)), DEADLOCK),
    "the-first-turn-missed": (BOTH._replace(turn_log=with_joined_at(lambda at: at + 1)), OVERLAP),
    "no-wait-where-turns-pay": (BOTH._replace(words=(BACK,), turn_log=NotWaitingWhereTurnsPay), OVERLAP),
    "nothing-given-back-after-going-on": (GOING_ON._replace(goes_on_lent=False), DEADLOCK),
    "forgives-for-good": (STOP._replace(patience=ForgivesForGood), OVERLAP),
    "forgives-all-slots": (Rules(SLOTS, (2, 2), hurries=1, patience=ForgivesJobsNotSlots), OVERLAP),
    "a-lease-for-each-turn": (STOP._replace(patience=ForgivesOneTurnOnly), SECOND_LEASE),
    "a-lease-for-each-slot": (Rules(SLOTS, (2, 2), stops=1, patience=ForgivesSlotsNotJobs), SECOND_LEASE),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_model_finds_a_wrong_decision(wrong: str) -> None:
    rules, violation = WRONG[wrong]
    with pytest.raises(Violation, match=violation):
        Model(rules).explore()
