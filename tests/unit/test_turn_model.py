"""Every interleaving of the turn protocol, with the functions that the mutex itself runs.

The model: each job has one rank on every device and repeats *take a turn, meet the own job's ranks in a
collective inside the turn (DDP's buffer broadcast), compute, give back, exchange with the own job's ranks*.
Moves are as fine as what can happen between processes: draw a turn, receive its number, start, arrive, give
back, die, stop, continue, lose patience. Progress moves only ever count upwards, so a run without deadlock
ends, and a state without a progress move must be one in which every healthy job has finished.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from crossover_ddp._turns import Grant, Member, TurnLog, blockers

ABSENT, DEAD = -1, -2
PLACES_PER_ROUND = 4
EXCHANGE, QUEUE, INSIDE, MET = range(PLACES_PER_ROUND)
"""A rank's place in round r is 4 r + one of these: arrived at the exchange (in round 0: at the start, when all
ranks have joined), through it and queueing, inside its turn and arrived at the collective, through that."""


class Rank(NamedTuple):
    place: int = 0
    returned: int = 0
    stopped: bool = False
    forgiven: frozenset[tuple[int, int]] = frozenset()

    @property
    def present(self) -> bool:
        return self.place >= 0

    @property
    def computing(self) -> bool:
        return self.present and self.place % PLACES_PER_ROUND in (INSIDE, MET)

    @property
    def round(self) -> int:
        return self.place // PLACES_PER_ROUND


class Job(NamedTuple):
    ranks: tuple[Rank, ...]
    """One on each device; device 0 is the lead device."""
    grants: tuple[Grant, ...] = ()
    """What the lead rank has drawn, one a round. Reading it late is the same as starting late."""
    joined_at: int = 0

    def passes(self, place: int) -> bool:
        """A collective is passed when every rank of the job has arrived at it."""
        return all(rank.place >= place for rank in self.ranks)

    @property
    def unhealthy(self) -> bool:
        return any(rank.place == DEAD or rank.stopped for rank in self.ranks)


class State(NamedTuple):
    jobs: tuple[Job, ...]
    log: bytes = b""
    deaths: int = 0
    stops: int = 0


class Rules(NamedTuple):
    """What may happen besides progress, and which protocol is run (the real one unless a test breaks it)."""

    rounds: int
    deaths: int = 0
    stops: int = 0
    late_join: bool = False
    early_draw: bool = True
    waits_for: Callable[[Grant, int, list[Member]], list] = blockers
    mutex_per_device: bool = False


class Violation(AssertionError):
    """The model found a state that the protocol promises not to reach."""


def with_job(state: State, j: int, job: Job) -> State:
    return state._replace(jobs=(*state.jobs[:j], job, *state.jobs[j + 1 :]))


def with_rank(state: State, j: int, d: int, **fields: object) -> State:
    job = state.jobs[j]
    rank = job.ranks[d]._replace(**fields)  # type: ignore[arg-type]
    return with_job(state, j, job._replace(ranks=(*job.ranks[:d], rank, *job.ranks[d + 1 :])))


def members(state: State, d: int, rules: Rules) -> list[Member]:
    last = PLACES_PER_ROUND * rules.rounds + QUEUE
    return [
        Member(j, j, 1, job.joined_at, job.ranks[d].returned, 1.0)
        for j, job in enumerate(state.jobs)
        if job.ranks[d].present and job.ranks[d].place != last
    ]


def waiting_for(state: State, j: int, d: int, rules: Rules) -> list[tuple[int, int]]:
    """(job, turn) pairs that keep this rank from starting, the lowest turn first, forgiven ones left out."""
    rank = state.jobs[j].ranks[d]
    if rules.mutex_per_device:
        return [(k, 0) for k, other in enumerate(state.jobs) if k != j and other.ranks[d].computing]
    grant = state.jobs[j].grants[rank.round]
    waits = rules.waits_for(grant, j, members(state, d, rules))
    return [(b.member.job, b.turn) for b in waits if (b.member.job, b.turn) not in rank.forgiven]


def draw(state: State, j: int, rules: Rules) -> State:
    """The lead rank appends its slot to the log and makes the grant from what was there before."""
    reading = TurnLog()
    reading.read(state.log)
    grant = reading.grant(len(state.log) + 1, j, members(state, 0, rules))
    job = state.jobs[j]
    state = with_job(state, j, job._replace(grants=(*job.grants, grant)))
    return state._replace(log=state.log + bytes([j]))


def may_draw(job: Job, rules: Rules) -> bool:
    """Once a round; early draws come as soon as the lead rank has given the turn before back."""
    lead = job.ranks[0]
    drawn = len(job.grants)
    if not lead.present or lead.stopped or drawn == rules.rounds or lead.round != drawn:
        return False
    return lead.place % PLACES_PER_ROUND == QUEUE or (rules.early_draw and drawn > 0)


def progress(state: State, rules: Rules) -> Iterator[State]:
    """Every state that one step of one rank leads to."""
    for j, job in enumerate(state.jobs):
        if may_draw(job, rules):
            yield draw(state, j, rules)
        doomed = any(rank.place == DEAD for rank in job.ranks)
        for d, rank in enumerate(job.ranks):
            if rank.stopped or rank.place == DEAD:
                continue
            if doomed and rank.present:  # its collectives fail: sooner or later it ends
                yield with_rank(state, j, d, place=DEAD)
            yield from step(state, j, d, rules)


def step(state: State, j: int, d: int, rules: Rules) -> Iterator[State]:
    job, rank = state.jobs[j], state.jobs[j].ranks[d]
    place = rank.place % PLACES_PER_ROUND
    if rank.place == ABSENT:
        if d == 0:
            state = with_job(state, j, job._replace(joined_at=len(state.log)))
        yield with_rank(state, j, d, place=0)
    elif place in (EXCHANGE, INSIDE):
        if job.passes(rank.place):
            yield with_rank(state, j, d, place=rank.place + 1)
    elif place == QUEUE:
        if len(job.grants) > rank.round and not waiting_for(state, j, d, rules):
            yield start(state, j, d)
    else:
        yield with_rank(state, j, d, place=rank.place + 1, returned=job.grants[rank.round].turn)


def forgives(rank: Rank, job: int, turn: int) -> bool:
    """Who has lost patience with a job's turn does not wait for its earlier ones either."""
    return any(whose == job and turn <= last for whose, last in rank.forgiven)


def start(state: State, j: int, d: int) -> State:
    job, rank = state.jobs[j], state.jobs[j].ranks[d]
    turn = job.grants[rank.round].turn
    for k, other in enumerate(state.jobs):
        peer = other.ranks[d]
        if k == j or not peer.computing:
            continue
        peers_turn = other.grants[peer.round].turn
        forgave = forgives(rank, k, peers_turn) or forgives(peer, j, turn)
        broken = any(r.place == DEAD for r in (*job.ranks, *other.ranks))
        if not forgave and not broken:
            raise Violation(f"jobs {j} and {k} compute on device {d} at once: {state}")
    if turn <= rank.returned:
        raise Violation(f"job {j} starts turn {turn} after {rank.returned}: {state}")
    return with_rank(state, j, d, place=rank.place + 1)


def accidents(state: State, rules: Rules) -> Iterator[State]:
    """Deaths, stops and continues."""
    for j, job in enumerate(state.jobs):
        for d, rank in enumerate(job.ranks):
            if rank.present and state.deaths < rules.deaths:
                yield with_rank(state, j, d, place=DEAD)._replace(deaths=state.deaths + 1)
            if rank.present and not rank.stopped and state.stops < rules.stops:
                yield with_rank(state, j, d, stopped=True)._replace(stops=state.stops + 1)
            if rank.stopped:
                yield with_rank(state, j, d, stopped=False)


def impatience(state: State, rules: Rules) -> Iterator[State]:
    """A lease may end when the front of the wait belongs to a job of which a rank is stopped."""
    for j, job in enumerate(state.jobs):
        for d, rank in enumerate(job.ranks):
            queueing = rank.present and rank.place % PLACES_PER_ROUND == QUEUE
            if not queueing or rank.stopped or len(job.grants) <= rank.round:
                continue
            waits = waiting_for(state, j, d, rules)
            if waits and any(r.stopped for r in state.jobs[waits[0][0]].ranks):
                yield with_rank(state, j, d, forgiven=rank.forgiven | {waits[0]})


def explore(jobs: int, devices: int, rules: Rules) -> int:
    """Visit every reachable state; raise Violation on a broken promise; return how many there are."""
    last_place = ABSENT if rules.late_join else 0
    rows = [Job((Rank(),) * devices)] * (jobs - 1) + [Job((Rank(place=last_place),) * devices)]
    first = State(tuple(rows))
    end = PLACES_PER_ROUND * rules.rounds + QUEUE
    seen, stack = {first}, [first]
    while stack:
        state = stack.pop()
        onward = list(itertools.chain(progress(state, rules), impatience(state, rules)))
        finished = (job.unhealthy or all(r.place == end for r in job.ranks) for job in state.jobs)
        if not onward and not all(finished):
            raise Violation(f"deadlock: {state}")
        for successor in itertools.chain(onward, accidents(state, rules)):
            if successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return len(seen)


@pytest.mark.parametrize(
    ("jobs", "rules"),
    [
        pytest.param(2, Rules(rounds=3), id="two-jobs"),
        pytest.param(2, Rules(rounds=3, early_draw=False), id="two-jobs-late-draw"),
        pytest.param(2, Rules(rounds=2, deaths=1), id="a-death"),
        pytest.param(2, Rules(rounds=2, deaths=2), id="two-deaths"),
        pytest.param(2, Rules(rounds=2, stops=1), id="a-stop"),
        pytest.param(2, Rules(rounds=2, stops=1, deaths=1), id="a-stop-and-a-death"),
        pytest.param(2, Rules(rounds=2, late_join=True, deaths=1), id="joining-late-and-a-death"),
        pytest.param(3, Rules(rounds=2), id="three-jobs"),
        pytest.param(3, Rules(rounds=1, deaths=1), id="three-jobs-a-death"),
        pytest.param(3, Rules(rounds=1, stops=1), id="three-jobs-a-stop"),
        pytest.param(3, Rules(rounds=1, late_join=True), id="three-jobs-joining-late"),
    ],
)
def test_no_interleaving_breaks_a_promise(jobs: int, rules: Rules) -> None:
    assert explore(jobs, 2, rules) > 100


def test_the_model_finds_the_deadlock_of_independent_device_mutexes() -> None:
    with pytest.raises(Violation, match="deadlock"):
        explore(2, 2, Rules(rounds=2, early_draw=False, mutex_per_device=True))


def test_the_model_finds_a_protocol_that_does_not_wait() -> None:
    with pytest.raises(Violation, match="at once"):
        explore(2, 2, Rules(rounds=2, waits_for=lambda grant, job, members: []))


def test_the_model_finds_a_wait_for_one_turn_too_few() -> None:
    def hasty(grant: Grant, job: int, seen: list[Member]) -> list:
        after = tuple((other, turn - 1) for other, turn in grant.after)
        return blockers(grant._replace(after=after), job, seen)

    with pytest.raises(Violation, match="at once"):
        explore(2, 2, Rules(rounds=2, waits_for=hasty))
