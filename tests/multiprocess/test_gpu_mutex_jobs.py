"""Jobs of several ranks take turns on emulated devices, with a collective inside every turn."""

import datetime
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.errors import SegmentError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.groups import files_of, new_group
from tests.harness.oracles import heard
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import membership_of

LEASE_S = 100.0  # longer than any test: a turn that overlaps another one was not forgiven
TIMEOUT_S = 60.0


class Plan(NamedTuple):
    """What a job does."""

    group: str
    devices: Sequence[str]
    turns: int = 20
    compute_s: float = 0.003
    exchange_s: float = 0.003
    lateness_s: Sequence[float] = (0.0,)
    """How much later than the first one each rank is with everything; repeated over the ranks."""
    early_request: bool = False
    here: str = ""
    """Make this file when all ranks have joined."""
    others: Sequence[str] = ()
    """Begin when these files are there."""
    until: str = ""
    """Go on until this file is there."""


class Turn(NamedTuple):
    """One turn of one rank, on the machine's monotonic clock."""

    number: int
    start_s: float
    end_s: float


class Outcome(NamedTuple):
    job: str
    device: str
    turns: list[Turn]
    disabled_because: str | None
    leases_expired: int


def train(rank: int, world_size: int, plan: Plan) -> Outcome:
    """Compute in turns and exchange between them, as DDP does with a model that broadcasts buffers."""
    lateness_s = plan.lateness_s[rank % len(plan.lateness_s)]
    mutex = GPUMutex(plan.group, device=plan.devices[rank], lease=LEASE_S)
    turns: list[Turn] = []
    if plan.here:
        dist.barrier()
        Path(plan.here).touch()
    for other in plan.others:
        _await(other)
    for step in itertools.count():
        if plan.early_request:
            mutex.request()
        time.sleep(lateness_s)
        mutex.acquire()
        start_s = time.monotonic()
        dist.barrier()  # inside the turn: what deadlocks with one lock per device
        time.sleep(plan.compute_s)
        end_s = time.monotonic()
        # Of a turn that has begun alone on its device the number comes later.
        former = turns[-1].number if turns else 0
        eventually(lambda: mutex.stats()["turn"] > former or bool(mutex.stats()["disabled_because"]))  # noqa: B023
        turns.append(Turn(int(mutex.stats()["turn"]), start_s, end_s))
        mutex.release()
        time.sleep(plan.exchange_s)
        if _is_over(plan, rank, step):
            break
    stats = mutex.stats()
    mutex.close()
    return Outcome(
        stats["job"], plan.devices[rank], turns, stats["disabled_because"], stats["leases_expired"]
    )


def _await(path: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not os.path.exists(path):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def _is_over(plan: Plan, rank: int, step: int) -> bool:
    """Tell whether that was the last step, the same on all ranks."""
    if not plan.until:
        return step + 1 == plan.turns
    said: list[object] = [os.path.exists(plan.until)]
    dist.broadcast_object_list(said, src=0)
    return bool(said[0])


def meet(directory: Path, plans: Sequence[Plan]) -> list[Plan]:
    """Let the jobs begin together: when the last one leaves, turns are counted from one again."""
    here = [str(directory / f"here-{number}") for number in range(len(plans))]
    return [plan._replace(here=own, others=here) for plan, own in zip(plans, here, strict=True)]


def run_plans(*plans: Plan) -> list[list[Outcome]]:
    with tempfile.TemporaryDirectory(prefix="plans-") as directory:
        jobs = [
            Job(train, len(plan.devices), (plan,), name=f"job {number}")
            for number, plan in enumerate(meet(Path(directory), plans))
        ]
        return run_jobs(jobs, timeout_s=TIMEOUT_S)


def check_exclusion(outcomes: list[list[Outcome]]) -> None:
    """Assert that no two jobs were inside a turn on one device at the same time."""
    ranks = [rank for job in outcomes for rank in job]
    assert all(rank.disabled_because is None for rank in ranks)
    assert all(rank.leases_expired == 0 for rank in ranks)
    for device in {rank.device for rank in ranks}:
        spans = sorted(
            (turn.start_s, turn.end_s, rank.job, turn.number)
            for rank in ranks
            if rank.device == device
            for turn in rank.turns
        )
        for number, (_, end_s, job, turn) in enumerate(spans):
            for start_s, _, other_job, other_turn in spans[number + 1 :]:
                if start_s >= end_s:
                    break
                assert other_job == job, f"on {device} turn {other_turn} began inside turn {turn}"


def check_one_order(outcomes: list[list[Outcome]]) -> None:
    """Assert that every device saw the same jobs in the same turns, and all ranks of a job the same turns."""
    for job in outcomes:
        assert len({tuple(turn.number for turn in rank.turns) for rank in job}) == 1
    owners = [(turn.number, job[0].job) for job in outcomes for turn in job[0].turns]
    assert len({number for number, _ in owners}) == len(owners), "one turn, one job"
    for job in outcomes:
        for rank in job:
            numbers = [turn.number for turn in sorted(rank.turns, key=lambda turn: turn.start_s)]
            assert numbers == sorted(numbers)


def longest_run(outcomes: list[list[Outcome]]) -> int:
    """Return how many turns in a row one job had while all jobs were there."""
    first = max(job[0].turns[0].number for job in outcomes)
    last = min(job[0].turns[-1].number for job in outcomes)
    order = sorted((turn.number, job[0].job) for job in outcomes for turn in job[0].turns)
    common = [job for number, job in order if first <= number <= last]
    return max(len(list(run)) for _, run in itertools.groupby(common))


@pytest.mark.parametrize("early_request", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_jobs_alternate_on_all_devices_in_one_order(count: int, early_request: bool) -> None:
    plan = Plan(new_group(), ("dev0", "dev1"), early_request=early_request)
    outcomes = run_plans(*[plan] * count)
    check_exclusion(outcomes)
    check_one_order(outcomes)


def test_turns_go_round_among_jobs_that_always_want_one() -> None:
    plan = Plan(new_group(), ("dev0", "dev1"), turns=30, exchange_s=0.0)
    outcomes = run_plans(plan, plan, plan)
    check_exclusion(outcomes)
    check_one_order(outcomes)
    assert longest_run(outcomes) <= 2, "first come, first served"


LAYOUTS = {
    "several ranks on each device": [("dev0", "dev0", "dev1", "dev1")] * 2,
    "two ranks on one device": [("dev0", "dev0")] * 2,
    "one rank a device beside two": [("dev0", "dev1"), ("dev0", "dev1", "dev0", "dev1")],
    "the lead device is not rank 0's": [("dev1", "dev0"), ("dev0", "dev1")],
    "one rank beside two on one device": [("dev0",), ("dev0", "dev0")],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_number_of_ranks_shares_a_device(layout: list[tuple[str, ...]]) -> None:
    group = new_group()
    outcomes = run_plans(*[Plan(group, devices, turns=12) for devices in layout])
    check_exclusion(outcomes)
    check_one_order(outcomes)


def test_a_faster_job_gets_more_turns(tmp_path: Path) -> None:
    """The slow one is in its exchange most of the time; the fast one need not wait for it there."""
    group, over = new_group(), str(tmp_path / "over")
    slow = Plan(group, ("dev0", "dev1"), 10, compute_s=0.01, exchange_s=0.09)
    fast = Plan(group, ("dev0", "dev1"), compute_s=0.01, exchange_s=0.01, until=over)
    outcomes = _run_until_first_is_over(tmp_path, slow, fast, over)
    check_exclusion(outcomes)
    check_one_order(outcomes)
    assert len(outcomes[1][0].turns) >= 2 * len(outcomes[0][0].turns)


def test_a_job_of_long_turns_does_not_starve_the_other(tmp_path: Path) -> None:
    group, over = new_group(), str(tmp_path / "over")
    short = Plan(group, ("dev0", "dev1"), 12, compute_s=0.01, exchange_s=0.0)
    long = Plan(group, ("dev0", "dev1"), compute_s=0.03, exchange_s=0.0, until=over)
    outcomes = _run_until_first_is_over(tmp_path, short, long, over)
    check_exclusion(outcomes)
    assert longest_run(outcomes) <= 2, "equal turns, whatever their length"


def _run_until_first_is_over(directory: Path, first: Plan, second: Plan, over: str) -> list[list[Outcome]]:
    first, second = meet(directory, [first, second])
    jobs = [Job(_train_and_tell, 2, (first, over)), Job(train, 2, (second,))]
    return run_jobs(jobs, timeout_s=TIMEOUT_S)


def _train_and_tell(rank: int, world_size: int, plan: Plan, over: str) -> Outcome:
    outcome = train(rank, world_size, plan)
    Path(over).touch()
    return outcome


def _come_and_go(rank: int, world_size: int, plan: Plan, over: str, rounds: int) -> list[Outcome]:
    outcomes = [train(rank, world_size, plan) for _ in range(rounds)]
    dist.barrier()
    Path(over).touch()
    return outcomes


def test_a_job_joins_and_leaves_again_and_again(tmp_path: Path) -> None:
    group, here, over = new_group(), str(tmp_path / "here"), str(tmp_path / "over")
    guest = Job(_come_and_go, 2, (Plan(group, ("dev0", "dev1"), turns=4, others=[here]), over, 10))
    host = Job(train, 2, (Plan(group, ("dev0", "dev1"), here=here, until=over),))
    visits, staying = run_jobs([guest, host], timeout_s=TIMEOUT_S)
    by_visit = [list(ranks) for ranks in zip(*visits, strict=True)]
    check_exclusion([*by_visit, staying])
    check_one_order([*by_visit, staying])


# --- a sibling's lease against the own process group's timeout -------------------------------------------------------


def _train_beside_a_stuck_sibling(
    rank: int, world_size: int, group: str, timeout_s: float
) -> tuple[float, int, list[str]]:
    """Rank 1's sibling never gives its turn back, and has published a lease of an hour."""
    with heard() as warnings:
        own = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
        sibling = TurnSegment(group, f"dev{rank}")
        sibling.join(job=9, lead=sibling.machine, rank=rank, world_size=2, lease_s=3600.0)
        if rank == 0:
            sibling.publish_returned(sibling.draw_turn())
        dist.barrier()
        mutex = GPUMutex(group, device=f"dev{rank}", process_group=own)
        longest_s = 0.0
        for _ in range(3):
            begin_s = time.monotonic()
            mutex.acquire()
            longest_s = max(longest_s, time.monotonic() - begin_s)
            dist.barrier(own)
            mutex.release()
        expired = mutex.stats()["leases_expired"]
        dist.barrier()
        mutex.close()
        sibling.leave()
    return longest_s, expired, warnings


def test_a_siblings_lease_never_outlasts_the_own_groups_timeout() -> None:
    args = (new_group(), 24.0)
    free, waiting = run_ranks(_train_beside_a_stuck_sibling, 2, args=args, timeout_s=TIMEOUT_S)
    assert free[1:] == (0, [])
    assert 5.9 <= waiting[0] < 20.0, "a quarter of the timeout"
    assert waiting[1] == 1, "once"
    assert len(waiting[2]) == 1
    assert "a quarter of its process group's timeout" in waiting[2][0]


# --- joining fails ------------------------------------------------------------------------------------------------


def _join_where_it_fails(rank: int, world_size: int, group: str) -> str:
    begin_s = time.monotonic()
    try:
        GPUMutex(group, device=f"dev{rank}")
    except SegmentError as error:
        assert time.monotonic() - begin_s < TIMEOUT_S / 2
        return str(error)
    return "not refused"


def test_ranks_that_cannot_join_all_raise() -> None:
    group = new_group()
    segment = TurnSegment(group, "dev1")
    segment.forget()
    os.truncate(segment.path, 100)
    messages = run_ranks(_join_where_it_fails, 2, args=(group,), timeout_s=TIMEOUT_S)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 0 cannot take turns: expected slots of")
    assert segment.path in messages[0]
    assert files_of(group) == [Path(segment.path)], "what others have put there stays, the rest goes"
    os.unlink(segment.path)
    check_exclusion(run_plans(Plan(group, ("dev0", "dev1"), turns=3)))
    assert not files_of(group)


# --- leaving ------------------------------------------------------------------------------------------------------


def _close_early(rank: int, world_size: int, group: str) -> tuple[int, list[str], float]:
    with heard() as warnings:
        mutex = GPUMutex(group, device=f"dev{rank}", lease=LEASE_S)
        for _ in range(3):
            time.sleep(0.1 * rank)
            mutex.acquire()
            mutex.release()
        begin_s = time.monotonic()
        turns = int(mutex.stats()["turns"])
        mutex.close()
    return turns, warnings, time.monotonic() - begin_s


def test_a_lead_rank_that_closes_first_is_heard_out() -> None:
    for turns, warnings, _ in run_ranks(_close_early, 2, args=(new_group(),), timeout_s=TIMEOUT_S):
        assert turns == 3
        assert warnings == []


def _close_while_listening(rank: int, world_size: int, group: str) -> tuple[float, list[str], str | None]:
    with heard() as warnings:
        mutex = GPUMutex(group, device=f"dev{rank}", lease=LEASE_S)
        listening = threading.Thread(target=mutex.acquire)
        elapsed_s = 0.0
        if rank == 1:
            listening.start()  # and its lead rank never draws
            time.sleep(0.1)
            begin_s = time.monotonic()
            mutex.close()
            elapsed_s = time.monotonic() - begin_s
        dist.barrier()
        mutex.close()
        if rank == 1:
            listening.join()
    return elapsed_s, warnings, mutex.disabled_because


def test_closing_while_a_thread_listens_to_the_lead_rank_returns() -> None:
    """The thread itself is free when the lead rank closes, too: gloo cannot take a receive back."""
    results = run_ranks(_close_while_listening, 2, args=(new_group(),), timeout_s=TIMEOUT_S)
    for elapsed_s, warnings, reason in results:
        assert elapsed_s < TIMEOUT_S / 4
        assert warnings == []
        assert reason == "closed"


def _break_one_device(rank: int, world_size: int, group: str, bad_rank: int) -> tuple[list[str], float]:
    with heard() as warnings:
        mutex = GPUMutex(group, device=f"dev{rank}", lease=LEASE_S)
        begin_s = time.monotonic()
        for step in range(10):
            if step == 5 and rank == bad_rank:
                os.truncate(membership_of(mutex).segment.path, 100)
            mutex.acquire()
            dist.barrier()
            mutex.release()
        elapsed_s = time.monotonic() - begin_s
        dist.barrier()
        mutex.close()
    return warnings, elapsed_s


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_job_whose_turns_break_on_one_device_goes_on_without(bad_rank: int) -> None:
    results = run_ranks(_break_one_device, 2, args=(new_group(), bad_rank), timeout_s=TIMEOUT_S)
    for rank, (warnings, elapsed_s) in enumerate(results):
        assert elapsed_s < LEASE_S / 2
        assert len(warnings) <= 1
        if rank == bad_rank:
            assert "trains on without" in warnings[0]


def sleep_in_a_turn(rank: int, world_size: int, group: str, signs: str, trial: bool) -> bool:
    """Do nothing inside a turn until the sibling is in its own, or has not come for long; return whether it came."""
    mutex = GPUMutex(group, device="dev0", lease=LEASE_S, trial=trial)
    (waits, inside) = Path(signs) / "waits", Path(signs) / "inside"
    eventually(lambda: mutex.stats()["siblings"] == 1)
    mutex.acquire()
    waits.touch()
    came = eventually(inside.exists, timeout_s=TIMEOUT_S / 2 if trial else 1.0)
    mutex.release()
    mutex.close()
    return came


def come_next(rank: int, world_size: int, group: str, signs: str, trial: bool) -> bool:
    """Take the turn after that of `sleep_in_a_turn`."""
    mutex = GPUMutex(group, device="dev0", lease=LEASE_S, trial=trial)
    assert eventually((Path(signs) / "waits").exists, timeout_s=TIMEOUT_S / 2)
    mutex.acquire()
    (Path(signs) / "inside").touch()
    assert mutex.stats()["leases_expired"] == 0
    mutex.close()
    return True


@pytest.mark.parametrize("trial", [True, False])
def test_a_turn_in_which_nothing_is_computed_is_lent_where_that_is_wanted(
    tmp_path: Path, trial: bool
) -> None:
    arguments = new_group(), str(tmp_path), trial
    jobs = [Job(function, 1, arguments) for function in (sleep_in_a_turn, come_next)]
    assert run_jobs(jobs, timeout_s=TIMEOUT_S) == [[trial], [True]]
