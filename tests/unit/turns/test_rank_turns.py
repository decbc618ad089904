"""The pieces that a rank's turns are made of, each alone; `test_gpu_mutex.py` plays whole turns."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from crossover_ddp._turns.descriptors import Descriptors
from crossover_ddp._turns.device_order import DeviceOrder
from crossover_ddp._turns.draw_queue import DrawQueue
from crossover_ddp._turns.joining import Membership, leave
from crossover_ddp._turns.rank_turns import RankTurns
from crossover_ddp._turns.rules import Grant, Lease, Patience
from crossover_ddp._turns.sibling_wait import SiblingWait
from crossover_ddp._turns.turn_counters import TurnCounters
from crossover_ddp.errors import SegmentError
from tests.unit.turns.joined_segments import Join, joining, member


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    with joining(tmp_path) as join:
        yield join


class Channel:
    """Stands for the store between a job's ranks: what one rank sends it receives itself."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.interrupted = False

    def send(self, grant: Grant) -> None:
        self.grants.append(grant)

    def receive(self) -> Grant:
        return self.grants.pop(0)

    def interrupt(self) -> None:
        self.interrupted = True


def membership(
    join: Join, *, job: int = 1, is_lead: bool = True, channel: Channel | None = None
) -> Membership:
    segment = join(job=job)
    return Membership(
        job, segment.device, is_lead, segment, DeviceOrder(torch.device("cpu")), cast(Any, channel)
    )


def rank_turns(place: Membership, failures: list[Exception]) -> RankTurns:
    return RankTurns(place, Lease(5.0), Patience(), TurnCounters(), failures.append)


# --- descriptors --------------------------------------------------------------------------------------------------


def test_a_closed_descriptor_is_a_number_that_system_calls_refuse(tmp_path: Path) -> None:
    descriptors = Descriptors()
    fd = descriptors.open("file", lambda: os.open(tmp_path, os.O_RDONLY))
    assert descriptors.get("file") == fd
    descriptors.close("file")
    descriptors.close("file")
    assert descriptors.get("file") == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors.get("file"))


def test_an_opening_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    descriptors = Descriptors()
    with pytest.raises(FileNotFoundError):
        descriptors.open("file", lambda: os.open(tmp_path / "none", os.O_RDONLY))
    assert descriptors.get("file") == -1
    descriptors.close_all()


# --- the queue of drawn turns -------------------------------------------------------------------------------------


def test_a_request_is_the_draw_of_the_next_claim(join: Join) -> None:
    queue = DrawQueue(membership(join))
    queue.request()
    assert not queue.owes_a_grant, "nobody has claimed it yet"
    queue.claim(inside=False)
    assert queue.owes_a_grant
    assert queue.take().turn == 1
    assert not queue.owes_a_grant
    queue.claim(inside=False)
    assert queue.take().turn == 2


def test_inside_a_turn_a_claim_draws_nothing(join: Join) -> None:
    place = membership(join)
    queue = DrawQueue(place)
    queue.claim(inside=True)
    assert not queue.owes_a_grant
    assert place.segment.log.numel() == 0


def test_the_lead_rank_sends_what_it_draws_and_the_others_receive_it(join: Join) -> None:
    channel = Channel()
    lead = DrawQueue(membership(join, channel=channel))
    other_place = membership(join, is_lead=False, channel=channel)
    other = DrawQueue(other_place)
    for queue in (lead, other):
        queue.claim(inside=False)
    assert lead.take() == other.take() == Grant(1, False, ())
    assert other_place.segment.log.fd == -1, "another rank has drawn a turn"


def test_a_job_leaves_its_step_s_first_turn_to_a_sibling_that_it_is_close_behind(join: Join) -> None:
    channel = Channel()
    queue = DrawQueue(membership(join, job=1, channel=channel))
    sibling = join(job=2)
    found = []
    for phase in (None, 0.0, 0.2, 0.45, 0.5, None, 0.35):
        sibling.publish_phase(phase)
        queue.request(0.1, may_idle=True)
        queue.claim(inside=False)
        found.append(queue.take().idle)
        assert (member(sibling, 1).phase is None) == found[-1], "who idles tells no phase"
    assert found == [False, True, True, True, False, False, False]
    assert [grant.idle for grant in channel.grants] == found


def test_later_turns_of_a_step_are_never_idle_and_without_a_phase_none_is(join: Join) -> None:
    queue = DrawQueue(membership(join, job=1))
    sibling = join(job=2)
    sibling.publish_phase(0.1)
    for phase in (0.25, None):
        queue.request(phase)
        queue.claim(inside=False)
        assert not queue.take().idle
        assert member(sibling, 1).phase == 0.25


# --- waiting ------------------------------------------------------------------------------------------------------


def test_a_wait_that_was_interrupted_does_not_begin_again(join: Join) -> None:
    place = membership(join, job=1)
    join(job=2)
    wait = SiblingWait(place, Patience())
    wait.interrupt()
    assert not wait.until_free(Grant(2, True, ((2, 1),)))


# --- turns --------------------------------------------------------------------------------------------------------


def test_a_turn_is_published_when_it_begins_and_when_it_was_given_back(join: Join) -> None:
    failures: list[Exception] = []
    turns, watching = rank_turns(membership(join, job=1), failures), join(job=2)
    turns.acquire(ahead=False)
    assert (member(watching, 1).started, member(watching, 1).returned) == (1, 0)
    turns.acquire(ahead=False)
    assert member(watching, 1).started == 1, "inside a turn a job of one rank takes no other one"
    turns.release(())
    turns.release(())
    assert member(watching, 1).returned == 1
    assert (turns.holding, turns.count_siblings(), failures) == (False, 1, [])


def test_a_turn_that_was_taken_ahead_learns_its_number_later(join: Join) -> None:
    place = membership(join)
    turns = rank_turns(place, [])
    turns.acquire(ahead=False)
    assert not turns.shared
    turns.release(())
    turns.acquire(ahead=True)
    assert member(place.segment, 1).started == 1
    turns.settle()
    assert member(place.segment, 1).started == 2


def test_a_turn_that_cannot_be_published_is_reported(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Exception] = []
    place = membership(join)
    turns = rank_turns(place, failures)
    turns.acquire(ahead=False)

    def fail(turn: int) -> None:
        raise SegmentError("expected the segment to stay, got it removed under way")

    monkeypatch.setattr(place.segment, "publish_returned", fail)
    turns.release(())
    assert [str(each) for each in failures] == ["expected the segment to stay, got it removed under way"]


def test_an_interrupt_reaches_every_wait(join: Join) -> None:
    channel = Channel()
    turns = rank_turns(membership(join, channel=channel), [])
    turns.interrupt()
    assert channel.interrupted


def test_a_fork_that_leaves_does_not_end_the_devices_work(join: Join) -> None:
    closed: list[bool] = []

    class Order(DeviceOrder):
        def close(self) -> None:
            closed.append(True)

    place = membership(join)._replace(order=Order(torch.device("cpu")))
    leave(place, os.getpid() + 1)
    assert closed == []
    leave(place, os.getpid())
    assert closed == [True]
