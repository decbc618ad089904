"""Every interleaving of the turn protocol, with the mutex's own functions; see `turn_model`.

The largest worlds belong to the campaign. For each of them there is a smaller one that has the same
kinds of events. Ranks that begin without their number multiply the states, so outside the campaign
only some of the worlds have them.
"""

from collections.abc import Callable, Sequence

import pytest

from crossover_ddp._turns.rules import Blocker, Grant, Lost, Member, Patience, Word, blockers
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
    "a-stop-and-a-death-two-turns": Rules(TWO, (2, 2), stops=1, deaths=1),
    "two-slots-a-death-two-turns": Rules(SLOTS, (2, 2), deaths=1),
    "side-by-side-two-turns": Rules(TWO, (2, 2), words=(SIDE,)),
    "a-loan-a-stop-two-turns": Rules(TWO, (2, 2), loans=1, stops=1),
    "side-by-side-and-back-turns-for-two": Rules(TWO, (2, 3), words=(SIDE, BACK), steps=2),
    "side-by-side-a-turn-for-two-a-stop": Rules(TWO, (1, 3), words=(SIDE,), steps=2, stops=1),
    "side-by-side-turns-for-two-joining-late": Rules(
        TWO, (3, 1), words=(SIDE,), steps=2, late_jobs=1
    ),
    "one-device-inside-two-turns-for-two-a-loan": Rules(
        INSIDE, (3, 3), words=(SIDE,), steps=2, loans=1
    ),
    "side-by-side-a-death-two-turns": Rules(TWO, (1, 2), words=(SIDE,), deaths=1),
    "side-by-side-a-stop-two-turns": Rules(TWO, (1, 2), words=(SIDE,), stops=1),
    "side-by-side-joining-late": Rules(TWO, (1, 1), words=(SIDE,), late_jobs=1),
    "overlapping-two-turns-a-stop": Rules(OVERLAPPING, (2, 2), stops=1),
    "overlapping-joining-late-and-a-death": Rules(OVERLAPPING, (2, 2), late_jobs=1, deaths=1),
    "two-slots-a-stop": Rules(SLOTS, (2, 2), stops=1),
    "three-jobs-a-stop": Rules(THREE, (1, 1, 1), stops=1),
    "three-jobs-a-slot-of-one-that-left": Rules(THREE, (1, 2, 1), late_jobs=1),
    "three-jobs-a-slot-of-a-dead-one": Rules(THREE, (1, 1, 1), late_jobs=1, deaths=1),
}
WORLDS = {
    "two-jobs": Rules(TWO, (3, 3)),
    "two-deaths": Rules(TWO, (2, 2), deaths=2),
    "a-stop-and-a-death": Rules(TWO, (2, 1), stops=1, deaths=1),
    "two-leases-of-slow-jobs": Rules(TWO, (2, 2), hurries=2),
    "joining-late": Rules(TWO, (2, 1), late_jobs=1),
    "joining-late-and-a-death": Rules(TWO, (2, 2), late_jobs=1, deaths=1, alone=False),
    "joining-late-and-a-death-one-turn": Rules(TWO, (1, 1), late_jobs=1, deaths=1),
    "two-slots-a-stop-one-turn": Rules(SLOTS, (1, 2), stops=1),
    "two-slots-a-death": Rules(SLOTS, (1, 2), deaths=1),
    "two-slots-a-slow-job": Rules(SLOTS, (2, 2), hurries=1),
    "three-jobs": Rules(THREE, (2, 2, 2)),
    "three-jobs-two-leases": Rules(THREE, (1, 1, 1), hurries=2),
    "three-jobs-a-death": Rules(THREE, (1, 1, 1), deaths=1),
    "three-jobs-a-slot-of-one-that-left-one-turn": Rules(
        THREE, (1, 1, 1), late_jobs=1, alone=False
    ),
    "a-slot-of-a-dead-one": Rules(
        TWO_JOIN_ONE_DEVICE, (1, 1, 1), late_jobs=1, deaths=1, alone=False
    ),
    "overlapping": Rules(OVERLAPPING, (2, 2)),
    "overlapping-a-stop-and-a-death": Rules(OVERLAPPING, (1, 1), stops=1, deaths=1, alone=False),
    "one-device-inside-two-a-death": Rules(INSIDE, (2, 2), deaths=1),
    "ring-a-slow-job": Rules(RING, (1, 1, 1), hurries=1, alone=False),
    "ring-a-death": Rules(RING, (1, 1, 1), deaths=1, alone=False),
    "ring-a-loan": Rules(RING, (1, 1, 1), loans=1),
    "side-by-side": Rules(TWO, (1, 2), words=(SIDE,)),
    "side-by-side-and-back": Rules(TWO, (1, 2), words=(SIDE, BACK)),
    "side-by-side-a-stop": Rules(TWO, (1, 1), words=(SIDE,), stops=1),
    "three-jobs-side-by-side": Rules(THREE, (1, 1, 1), words=(SIDE,)),
    "overlapping-side-by-side": Rules(OVERLAPPING, (1, 2), words=(SIDE,), alone=False),
    "side-by-side-a-turn-for-two": Rules(TWO, (1, 3), words=(SIDE,), steps=2),
    "side-by-side-and-back-a-turn-for-two": Rules(
        TWO, (1, 3), words=(SIDE, BACK), steps=2, alone=False
    ),
    "side-by-side-a-turn-for-two-a-death": Rules(
        TWO, (1, 2), words=(SIDE,), steps=2, deaths=1, alone=False
    ),
    "going-on-lent": Rules(ALONE, (3, 2), loans=2, goes_on=True),
    "two-loans": Rules(TWO, (2, 2), loans=2),
    "a-loan-a-death": Rules(TWO, (2, 2), loans=1, deaths=1),
    "a-loan-a-death-side-by-side": Rules(TWO, (1, 1), loans=1, words=(SIDE,), deaths=1),
    "a-loan-a-stop": Rules(TWO, (1, 2), loans=1, stops=1),
}
LARGE |= {
    f"{name}-beginning-alone": rules._replace(alone=True)
    for name, rules in WORLDS.items()
    if not rules.alone
}


@pytest.mark.parametrize("world", {**WORLDS, **(LARGE if IN_CAMPAIGN else {})})
def test_no_interleaving_breaks_a_promise(world: str) -> None:
    assert Model({**WORLDS, **LARGE}[world]).explore() > 1000


def waits_for_later_turns(by: int) -> Callable[..., list[Blocker]]:
    """Return `blockers`, but wait for turns that are later by ``by`` than those needed."""

    def waits_for(grant: Grant, own_job: int, members: Sequence[Member]) -> list[Blocker]:
        after = tuple((job, turn + by) for job, turn in grant.after)
        return blockers(grant._replace(after=after), own_job, members)

    return waits_for


class ForgivesOneTurnOnly(Patience):
    """Waits for a lease for every turn that a stopped job has drawn."""

    def _passes(self, blocker: Blocker) -> bool:
        return (blocker.member.slot, blocker.member.incarnation, blocker.turn, -1) in self.passed

    def _lose(self, lost: Lost, members: Sequence[Member]) -> None:
        super()._lose(lost, members)
        same = [each for each in members if each.job == lost.job]
        self.passed = frozenset((each.slot, each.incarnation, lost.turn, -1) for each in same)


OVERLAP = "before job . has given back"
DEADLOCK = "deadlock"
SECOND_LEASE = "waits for a second lease"
BOTH = Rules(TWO, (2, 2))
# Further mistakes, in the functions themselves: tests/seeded/faults/turns.txt.
WRONG = {
    "one-turn-too-few": (BOTH._replace(waits_for=waits_for_later_turns(-1)), OVERLAP),
    "one-turn-too-many": (BOTH._replace(waits_for=waits_for_later_turns(1)), DEADLOCK),
    "reads-before-it-appends": (BOTH._replace(draw_steps=("read", "append", "look")), OVERLAP),
    "looks-before-it-appends": (BOTH._replace(late_jobs=1, draw_steps=("look", "append")), OVERLAP),
    "a-lease-for-each-turn": (BOTH._replace(stops=1, patience=ForgivesOneTurnOnly), SECOND_LEASE),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_model_finds_a_wrong_decision(wrong: str) -> None:
    rules, violation = WRONG[wrong]
    with pytest.raises(Violation, match=violation):
        Model(rules).explore()
