"""A model of jobs that take turns, small enough to visit every state; see `test_turn_model`.

Each rank repeats *take a turn, meet the own job's ranks in a collective inside it (DDP's buffer
broadcast), compute, give back, exchange with the own job's ranks*. Moves are as fine as the events
between processes: join, append to the log (turns, and words of the trial at any moment), look at
the members, read the log, start, pass a collective, give back, give back early and continue to
compute, draw inside a turn and take that number, leave, die, stop, continue, lose patience. A
rank's decisions are made by production's own `TurnLog`, `Trial`, `blockers` and `Patience`. The
model adds the places of ranks, and the events that no rank decides: deaths, stops, and time, of
which it knows only that a lease ends.

These promises are checked without those functions:

- A turn that is not drawn side by side starts on a device when every earlier turn has been given
  back there (perhaps early, by a rank that continues to compute), or its rank is dead, or the
  starting rank has waited for a lease of that job and the other rank has not moved since.
- No rank waits for a second lease while no rank of that job on the device has moved.
- In a state without a further move, every healthy job has ended.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from crossover_ddp._turns import rules as real
from crossover_ddp._turns.rules import (
    Blocker,
    Grant,
    Member,
    Patience,
    Progress,
    Trial,
    TurnLog,
    Word,
)

ABSENT, DEAD = -1, -2
PLACES_PER_ROUND = 4
EXCHANGE, QUEUE, INSIDE, MET = range(PLACES_PER_ROUND)
"""A rank's place in round r is 4 r + one of these: arrived at the exchange (in round 0: at the
start, when all ranks have joined); past it and queueing; inside its turn and arrived at the
collective; past that."""
LEASE_S = 1.0


class Draw(NamedTuple):
    """A draw that the lead rank has begun."""

    steps: int = 0  # how many have been taken
    turn: int = 0
    records: int = 0  # how many of the log it has read, if that was first
    seen: tuple[Member, ...] = ()


class Lost(NamedTuple):
    """A rank's view of a job when it lost patience with it. The model judges by this note."""

    job: int
    turn: int
    stages: tuple[int, ...]  # how often each rank had started or given back; 0 on other devices


class Rank(NamedTuple):
    """A rank's knowledge and slot. Both are reset when it dies or leaves: none sees them."""

    place: int = 0
    slot: int = -1
    joined_at: int = 0
    started: int = 0
    returned: int = 0
    stopped: bool = False
    passed: frozenset[Progress] = frozenset()
    # Rounds whose turns began, or ended, before their numbers arrived.
    unnumbered: tuple[int, ...] = ()
    lost: tuple[Lost, ...] = ()  # at most one for each job
    lent: bool = False  # whether it has published its turn as given back, and is inside it

    @property
    def round(self) -> int:
        return self.place // PLACES_PER_ROUND

    @property
    def stage(self) -> int:
        """How often it has started or given back a turn, early or not."""
        return 2 * self.round + (self.place % PLACES_PER_ROUND >= INSIDE) + self.lent


class Job(NamedTuple):
    ranks: tuple[Rank, ...]
    # The grant of each round, as drawn. Receiving one late is the same as starting late.
    grants: tuple[Grant, ...] = ()
    draw: Draw = Draw()

    def passes(self, place: int) -> bool:
        """A collective is passed when every rank of the job has arrived at it."""
        return place >= 0 and all(rank.place >= place for rank in self.ranks)

    @property
    def turns(self) -> dict[int, int]:
        """The turns that its lead rank has drawn, and the round in which each was first taken."""
        drawn = [
            *(grant.turn for grant in self.grants),
            *([self.draw.turn] if self.draw.turn else []),
        ]
        return dict(reversed([(turn, number) for number, turn in enumerate(drawn)]))

    @property
    def unhealthy(self) -> bool:
        return any(rank.place == DEAD or rank.stopped for rank in self.ranks)


class State(NamedTuple):
    jobs: tuple[Job, ...]
    log: bytes = b""
    deaths: int = 0
    stops: int = 0
    hurries: int = 0
    words: int = 0
    loans: int = 0


class Rules(NamedTuple):
    """The events that are possible besides progress, and the decisions, which a test may break."""

    jobs: tuple[tuple[int, ...], ...]  # each rank's device; the job's first rank is its lead rank
    rounds: tuple[int, ...]  # how many turns each job takes before it leaves
    deaths: int = 0
    stops: int = 0
    # How many leases, or limits of a rank's own, end although the sibling is only slow.
    hurries: int = 0
    # How many jobs, the last ones, join while the others take turns.
    late_jobs: int = 0
    # The words that lead ranks write into the log, in this order and at any moment.
    words: tuple[Word, ...] = ()
    # How many turns may be published as given back before they are over.
    loans: int = 0
    # Whether a job of one rank may draw inside a turn. If the turn continues, it takes that number.
    goes_on: bool = False
    # Records before the own one do not change, so the model need not read them as a step.
    draw_steps: tuple[str, ...] = ("append", "look")
    waits_for: Callable[[Grant, int, Sequence[Member]], list[Blocker]] = real.blockers
    patience: type[Patience] = Patience
    # How many steps one turn covers while the job is side by side.
    steps: int = 1
    # Whether a rank that sees no sibling on its device begins without its number.
    alone: bool = True


class Violation(AssertionError):
    """The model found a state that the protocol promises not to reach."""


# The (job, turn) pairs that a rank loses patience with at once, and its `Patience.passed` then.
Loss = tuple[tuple[tuple[int, int], ...], frozenset[Progress]]


# Called hundreds of thousands of times: `_replace` would take three times as long.
def with_job(state: State, j: int, job: Job) -> State:
    jobs, *others = state
    return State((*jobs[:j], job, *jobs[j + 1 :]), *others)


def with_rank(state: State, j: int, r: int, rank: Rank) -> State:
    ranks, *others = state.jobs[j]
    return with_job(state, j, Job((*ranks[:r], rank, *ranks[r + 1 :]), *others))


def with_changed(state: State, j: int, r: int, **changes: Any) -> State:
    return with_rank(state, j, r, state.jobs[j].ranks[r]._replace(**changes))


class Model:
    """All states that some rules can reach."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._ends = [PLACES_PER_ROUND * rounds + QUEUE for rounds in rules.rounds]
        late = [j >= len(rules.jobs) - rules.late_jobs for j in range(len(rules.jobs))]
        kinds = [*zip(rules.jobs, rules.rounds, late, strict=True)]
        self._twins = [
            max((i for i in range(j) if kinds[i] == kind), default=None)
            for j, kind in enumerate(kinds)
        ]
        self._decide, self._grant = cache(self._decide_uncached), cache(self._grant_uncached)
        self._member = cache(Member)
        ranks = [(j, r) for j, devices in enumerate(rules.jobs) for r in range(len(devices))]
        self._ranks_on: dict[int | None, list[tuple[int, int]]] = {None: ranks}
        for j, r in ranks:
            self._ranks_on.setdefault(rules.jobs[j][r], []).append((j, r))

    def first_state(self) -> State:
        state = State(
            tuple(Job(tuple(Rank(ABSENT) for _ in devices)) for devices in self.rules.jobs)
        )
        for j in range(len(self.rules.jobs) - self.rules.late_jobs):
            for r in range(len(self.rules.jobs[j])):
                state = self._join(state, j, r)
        return self._pass_collectives(state)

    def _members(self, state: State, device: int | None) -> tuple[Member, ...]:
        """Return who is seen on a device; None: on all devices."""
        return tuple(
            self._member(
                rank.slot, j, 8 * j + r + 1, rank.joined_at, rank.started, rank.returned, LEASE_S
            )
            for j, r in self._ranks_on[device]
            for rank in (state.jobs[j].ranks[r],)
            if 0 <= rank.place != self._ends[j]
        )

    def _decision(self, state: State, j: int, r: int) -> tuple[bool, frozenset[Loss]]:
        """Return whether a queueing rank may start, and the possible losses of patience if not."""
        rank = state.jobs[j].ranks[r]
        grant = state.jobs[j].grants[rank.round]
        return self._decide(grant, j, self._members(state, self.rules.jobs[j][r]), rank.passed)

    def _decide_uncached(
        self, grant: Grant, j: int, members: tuple[Member, ...], passed: frozenset[Progress]
    ) -> tuple[bool, frozenset[Loss]]:
        waiting = self.rules.waits_for(grant, j, members)
        if self.rules.patience(passed=passed).remaining(waiting, members, 0.0) is None:
            return True, frozenset()
        losses = set()
        for limit_s in (math.inf, LEASE_S / 2):  # the lease ends first, or the rank's own limit
            patience = self.rules.patience(limit_s, passed)
            patience.remaining(waiting, members, 0.0)
            patience.remaining(waiting, members, min(limit_s, LEASE_S))
            losses.add((tuple((lost.job, lost.turn) for lost in patience.lost), patience.passed))
        return False, frozenset(losses)

    def _draw(self, state: State, j: int) -> State:
        """Take the next step of a draw, in the order in which `Turns` takes them."""
        job, steps = state.jobs[j], self.rules.draw_steps
        step, draw = steps[job.draw.steps], job.draw._replace(steps=job.draw.steps + 1)
        if step == "append":
            state = state._replace(log=state.log + bytes([job.ranks[0].slot]))
            draw = draw._replace(turn=len(state.log))
        elif step == "read":
            draw = draw._replace(records=len(state.log))
        else:
            draw = draw._replace(seen=self._members(state, None))
        if draw.steps < len(steps):
            return with_job(state, j, job._replace(draw=draw))
        records = draw.records if "read" in steps else draw.turn - 1
        grant = self._grant(draw.turn, j, draw.seen, state.log[:records])
        same = min(grant.steps, self.rules.rounds[j] - len(job.grants))
        return with_job(state, j, job._replace(draw=Draw(), grants=(*job.grants, *[grant] * same)))

    def _grant_uncached(self, turn: int, j: int, seen: tuple[Member, ...], records: bytes) -> Grant:
        trial = Trial(j)
        trial.look(seen)
        log = TurnLog(trial)
        log.read(records)
        grant = log.grant(turn, j, seen)
        return grant._replace(steps=1 if grant.steps == 1 else self.rules.steps)

    def _is_again(self, state: State, j: int, number: int) -> bool:
        """Return whether this round of a job has the turn of the round before."""
        grants = state.jobs[j].grants
        return number > 0 and grants[number].turn == grants[number - 1].turn

    def _may_draw(self, j: int, job: Job) -> bool:
        """Return whether the lead rank may draw: once a round, early ones after the last turn."""
        lead, drawn = job.ranks[0], len(job.grants)
        inside = (
            self.rules.goes_on and len(job.ranks) == 1 and lead.place % PLACES_PER_ROUND >= INSIDE
        )
        if (
            lead.place < 0
            or lead.stopped
            or drawn == self.rules.rounds[j]
            or lead.round + inside < drawn
        ):
            return False
        due = (
            lead.round > drawn or lead.place % PLACES_PER_ROUND >= QUEUE
        )  # the turn may have begun without its number
        return due or drawn > 0

    def _needs_no_number(self, state: State, j: int, r: int) -> bool:
        """Return whether a rank is alone on its device, or its last numbered turn did not wait."""
        job, rank = state.jobs[j], state.jobs[j].ranks[r]
        numbered = rank.unnumbered[0] if rank.unnumbered else rank.round
        side_by_side = numbered > 0 and not job.grants[numbered - 1].mode.waits
        has_sibling = any(
            k != j and 0 <= state.jobs[k].ranks[q].place != self._ends[k]
            for k, q in self._ranks_on[self.rules.jobs[j][r]]
        )
        return side_by_side or (self.rules.alone and not has_sibling)

    def progress(self, state: State) -> Iterator[State]:
        """Every state that one step of one rank leads to."""
        for j, job in enumerate(state.jobs):
            if self._may_draw(j, job):
                yield self._draw(state, j)
            lead = job.ranks[0]
            may_write = 0 <= lead.place != self._ends[j] and not lead.stopped
            if may_write and state.words < len(self.rules.words):
                record = bytes([self.rules.words[state.words], lead.slot])
                yield state._replace(log=state.log + record, words=state.words + 1)
            doomed = any(rank.place == DEAD for rank in job.ranks)
            for r, rank in enumerate(job.ranks):
                if rank.stopped or rank.place == DEAD:
                    continue
                if doomed and 0 <= rank.place != self._ends[j]:  # its collectives fail, and it ends
                    yield with_rank(state, j, r, Rank(DEAD))
                yield from self._step(state, j, r)

    def _step(self, state: State, j: int, r: int) -> Iterator[State]:
        job, rank = state.jobs[j], state.jobs[j].ranks[r]
        place = rank.place % PLACES_PER_ROUND
        if rank.unnumbered and len(job.grants) > rank.unnumbered[0]:
            yield self._number(state, j, r)
        if rank.place == ABSENT:
            yield self._join(state, j, r)
        elif place == QUEUE:
            if len(job.grants) > rank.round:
                if not rank.unnumbered and self._decision(state, j, r)[0]:
                    yield self._start(state, j, r)
            elif rank.place != self._ends[j] and self._needs_no_number(state, j, r):
                unnumbered = (*rank.unnumbered, rank.round)
                yield with_changed(state, j, r, place=rank.place + 1, unnumbered=unnumbered)
        elif place == EXCHANGE and rank.place + 1 == self._ends[j]:
            if job.passes(rank.place):  # to leave frees a slot, which siblings see
                yield with_rank(state, j, r, Rank(rank.place + 1, rank.slot))
        elif (
            place in (INSIDE, MET)
            and state.loans < self.rules.loans
            and not (rank.lent or rank.unnumbered or self._is_again(state, j, rank.round))
        ):
            lent = with_changed(state, j, r, returned=job.grants[rank.round].turn, lent=True)
            yield lent._replace(loans=state.loans + 1)
        if place == MET and rank.place >= 0:
            known = rank.unnumbered or rank.lent
            returned = rank.returned if known else job.grants[rank.round].turn
            yield with_changed(state, j, r, place=rank.place + 1, returned=returned, lent=False)
            if self.rules.goes_on and not rank.unnumbered and len(job.grants) > rank.round + 1:
                yield self._go_on(state, j, r)

    def _go_on(self, state: State, j: int, r: int) -> State:
        """Give a rank's present turn the number drawn meanwhile. A lent one is given back."""
        rank = state.jobs[j].ranks[r]
        turn = state.jobs[j].grants[rank.round + 1].turn
        returned = turn if rank.lent else rank.returned
        place = rank.place + PLACES_PER_ROUND
        return with_changed(state, j, r, place=place, started=turn, returned=returned)

    def _pass_collectives(self, state: State, before: State | None = None) -> State:
        """Let ranks pass every collective at which all ranks of their job have arrived.

        Jobs that are the same in ``before`` are skipped. No sibling and no rule sees this, so it
        need not be a move: every event that is possible before it is possible after it. A rank that
        dies before it would pass does less than one that dies after.
        """
        for j, job in enumerate(state.jobs):
            if before is not None and job is before.jobs[j]:
                continue
            ready = [
                rank.place % PLACES_PER_ROUND in (EXCHANGE, INSIDE)
                and not rank.stopped
                and rank.place + 1 != self._ends[j]
                and job.passes(rank.place)
                for rank in job.ranks
            ]
            for r in itertools.compress(range(len(job.ranks)), ready):
                state = with_changed(state, j, r, place=job.ranks[r].place + 1)
        return state

    def _join(self, state: State, j: int, r: int) -> State:
        """Take the first free slot, perhaps the slot of a rank that has died or left."""
        taken = {member.slot for member in self._members(state, None)}
        slot = next(slot for slot in itertools.count() if slot not in taken)
        return with_rank(state, j, r, Rank(place=0, slot=slot, joined_at=len(state.log)))

    def _number(self, state: State, j: int, r: int) -> State:
        """Publish the number of a turn that was begun without it."""
        rank = state.jobs[j].ranks[r]
        number, *unnumbered = rank.unnumbered
        turn = state.jobs[j].grants[number].turn
        if self._is_again(state, j, number):
            return with_changed(state, j, r, unnumbered=tuple(unnumbered))
        inside = number == rank.round and rank.place % PLACES_PER_ROUND >= INSIDE
        returned = rank.returned if inside else turn
        return with_changed(
            state, j, r, unnumbered=tuple(unnumbered), started=turn, returned=returned
        )

    def _start(self, state: State, j: int, r: int) -> State:
        rank = state.jobs[j].ranks[r]
        grant = state.jobs[j].grants[rank.round]
        if self._is_again(state, j, rank.round):
            return with_changed(state, j, r, place=rank.place + 1)
        self._check_start(state, j, r, grant)
        return with_changed(state, j, r, place=rank.place + 1, started=grant.turn)

    def accidents(self, state: State) -> Iterator[State]:
        """Deaths, stops and continues."""
        for j, job in enumerate(state.jobs):
            for r, rank in enumerate(job.ranks):
                if not 0 <= rank.place != self._ends[j]:
                    continue
                if state.deaths < self.rules.deaths:
                    # A stopped rank that dies still counts as stopped.
                    dead = Rank(DEAD, stopped=rank.stopped)
                    yield with_rank(state, j, r, dead)._replace(deaths=state.deaths + 1)
                if rank.stopped:
                    yield with_changed(state, j, r, stopped=False)
                elif state.stops < self.rules.stops:
                    yield with_changed(state, j, r, stopped=True)._replace(stops=state.stops + 1)

    def impatience(self, state: State) -> Iterator[State]:
        """End leases and limits, while a rank of the other job is stopped or as `hurries` allow."""
        for j, job in enumerate(state.jobs):
            for r, rank in enumerate(job.ranks):
                queueing = (
                    0 <= rank.place != self._ends[j] and rank.place % PLACES_PER_ROUND == QUEUE
                )
                if not queueing or rank.stopped or len(job.grants) <= rank.round:
                    continue
                for lost, passed in self._decision(state, j, r)[1]:
                    stopped = any(each.stopped for k, _ in lost for each in state.jobs[k].ranks)
                    if stopped or state.hurries < self.rules.hurries:
                        impatient = with_changed(
                            state, j, r, passed=passed, lost=self._note(state, j, r, lost)
                        )
                        yield impatient._replace(hurries=state.hurries + (not stopped))

    def _stages(self, state: State, k: int, device: int) -> tuple[int, ...]:
        return tuple(
            rank.stage if self.rules.jobs[k][q] == device else 0
            for q, rank in enumerate(state.jobs[k].ranks)
        )

    def _note(
        self, state: State, j: int, r: int, lost: Sequence[tuple[int, int]]
    ) -> tuple[Lost, ...]:
        known = {each.job: each for each in state.jobs[j].ranks[r].lost}
        for k, turn in lost:
            stages = self._stages(state, k, self.rules.jobs[j][r])
            if k in known and known[k].stages == stages:
                raise Violation(f"job {j} rank {r} waits for a second lease of job {k}: {state}")
            known[k] = Lost(k, turn, stages)
        return tuple(sorted(known.values()))

    def _check_start(self, state: State, j: int, r: int, grant: Grant) -> None:
        device, rank = self.rules.jobs[j][r], state.jobs[j].ranks[r]
        if grant.turn <= rank.started:
            raise Violation(f"job {j} starts turn {grant.turn} after {rank.started}: {state}")
        if not grant.mode.waits:
            return
        lost = {each.job: each for each in rank.lost}
        for k, other in enumerate(state.jobs):
            lead_died = other.ranks[0].place == DEAD and k not in dict(grant.after)
            earlier = sorted(turn for turn in other.turns if turn < grant.turn)
            if k == j or lead_died or not earlier:
                continue
            stages = self._stages(state, k, device)
            for q, peer in enumerate(other.ranks):
                # Whether or not the number of the turn has arrived.
                given_back = other.turns[earlier[-1]] < peer.round
                if self.rules.jobs[k][q] != device or peer.place == DEAD or given_back or peer.lent:
                    continue
                forgave = k in lost and (
                    earlier[-1] <= lost[k].turn or lost[k].stages[q] == stages[q]
                )
                if not forgave:
                    raise Violation(
                        f"job {j} starts turn {grant.turn} on device {device} before job {k} has "
                        f"given back {earlier[-1]}: {state}"
                    )

    def _is_new(self, before: State, after: State) -> bool:
        """Return whether to follow this move: of jobs that are alike, the first one draws first."""
        if len(after.log) == len(before.log) or after.words != before.words:
            return True
        j = next(j for j, job in enumerate(after.jobs) if job is not before.jobs[j])
        twin = self._twins[j]
        return len(after.jobs[j].turns) > 1 or twin is None or bool(before.jobs[twin].turns)

    def explore(self) -> int:
        """Visit every reachable state and return their number; `Violation` on a broken promise."""
        stack = [self.first_state()]
        seen = {*stack}
        gc.disable()  # of hundreds of thousands of states none is in a cycle
        try:
            while stack:
                state = stack.pop()
                for successor in self._successors(state):
                    if successor not in seen and self._is_new(state, successor):
                        seen.add(successor)
                        stack.append(successor)
        finally:
            gc.enable()
        return len(seen)

    def _successors(self, state: State) -> Iterator[State]:
        onward = [*self.progress(state), *self.impatience(state)]
        finished = (
            job.unhealthy or all(rank.place == self._ends[j] for rank in job.ranks)
            for j, job in enumerate(state.jobs)
        )
        if not onward and not all(finished):
            raise Violation(f"deadlock: {state}")
        for move in itertools.chain(onward, self.accidents(state)):
            yield self._pass_collectives(move, state)
