"""What looks tell, computed from looks made by hand: no process, no file."""

from typing import Any

import pytest

from crossover_ddp._turns.view import Liveness, LogEnd, Look, Place, Segment, SegmentProblem
from crossover_ddp.cli.turn_report import DeviceReport, JobReport, Report, report

SECOND_NS = 10**9


def place(slot: int, *, job: int | None = None, started: int = 0, returned: int = 0, **more: Any) -> Place:
    given = {
        "joined_at": 0,
        "incarnation": slot + 1,
        "returned_at_ns": 0,
        "lease_s": 5.0,
        "rank": 0,
        "world_size": 1,
        "pid": 100 + slot,
        "liveness": Liveness.ALIVE,
        **more,
    }
    return Place(slot=slot, job=slot if job is None else job, started=started, returned=returned, **given)


def segment(*places: Place, log: bytes | None = b"", device: str = "dev0", group: str = "g") -> Segment:
    kept = None if log is None else LogEnd(len(log), log)
    return Segment(group, device, f"{group}-{device}", places, kept, held=bool(places))


def looked(*segments: Segment, at_s: float = 0.0) -> Look:
    return Look(int(at_s * SECOND_NS), "home", segments, ())


def device(shown: Report, index: int = 0) -> DeviceReport:
    return shown.groups[0].devices[index]


def jobs(shown: Report, index: int = 0) -> dict[str, JobReport]:
    return {job.job: job for job in device(shown, index).jobs}


def states(*places: Place, log: bytes | None = b"") -> dict[str, str]:
    return {job: found.state for job, found in jobs(report([looked(segment(*places, log=log))])).items()}


# --- who computes, who queues --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (place(1, started=1), "computes"),
        (place(1, started=1, returned=1), "queues"),  # it has drawn turn 2
        (place(1, started=2, returned=2), "between turns"),
        (place(1), "queues"),
        (place(1, joined_at=2), "between turns"),  # what the log holds is an earlier owner's
        (place(1, started=1, liveness=Liveness.GONE), "gone"),
        (place(1, started=1, liveness=Liveness.DEAF), "deaf"),
    ],
)
def test_the_state_of_a_job_follows_its_counters(found: Place, expected: str) -> None:
    assert states(found, log=b"\1\1") == {"1": expected}


def test_any_rank_inside_its_turn_means_that_the_job_computes() -> None:
    there = place(1, job=7, started=3, returned=3, rank=1)
    here = place(0, job=7, started=3, returned=2, rank=0)
    assert states(there, here) == {"7": "computes"}
    found = jobs(report([looked(segment(there, here))]))["7"]
    assert (found.ranks, found.pids, found.turn) == ((0, 1), (100, 101), 3)


def test_a_rank_that_is_gone_does_not_count_for_a_job_that_lives() -> None:
    dead = place(0, job=7, started=3, returned=2, liveness=Liveness.GONE)
    assert states(dead, place(1, job=7, started=2, returned=2, rank=1)) == {"7": "between turns"}


def test_the_queue_of_other_devices_is_that_of_the_lead_device() -> None:
    lead = segment(place(0, job=1, world_size=2), place(1, job=2, world_size=2), log=b"\0\1")
    other = segment(
        place(4, job=1, started=1, rank=1, world_size=2),
        place(5, job=2, rank=1, world_size=2),
        log=None,
        device="dev1",
    )
    found = jobs(report([looked(lead, other)]), 1)
    assert {job: (each.state, each.drawn) for job, each in found.items()} == {
        "1": ("computes", 1),
        "2": ("queues", 2),
    }


def test_a_job_whose_lead_device_is_elsewhere_is_said_to_be_unknown() -> None:
    shown = report([looked(segment(place(1, started=5, returned=5), log=None))] * 2)
    assert jobs(shown)["1"].drawn is None
    assert any("lead device is on another machine" in what for what in device(shown).not_known)


# --- rates and shares ----------------------------------------------------------------------------------------------


def between(before: bytes | None, after: bytes | None, *places: Place, seconds: float = 2.0) -> Report:
    return report([looked(segment(*places, log=before)), looked(segment(*places, log=after), at_s=seconds)])


def test_rates_and_shares_are_draws_between_two_looks() -> None:
    shown = between(b"\1\2", b"\1\2" + b"\1\2\1\1", place(1), place(2))
    assert shown.interval_s == 2.0
    assert device(shown).turns_per_s == 2.0
    assert {job: (each.turns_per_s, each.share) for job, each in jobs(shown).items()} == {
        "1": (1.5, 0.75),
        "2": (0.5, 0.25),
    }


def test_no_turns_have_no_shares() -> None:
    shown = between(b"\1\2", b"\1\2", place(1), place(2))
    assert device(shown).turns_per_s == 0.0
    assert [each.share for each in jobs(shown).values()] == [None, None]


def test_one_look_has_no_rates() -> None:
    shown = report([looked(segment(place(1), log=b"\1"))])
    assert (device(shown).turns_per_s, jobs(shown)["1"].turns_per_s) == (None, None)


def test_turns_of_the_dead_are_nobodys_share() -> None:
    shown = between(b"\1\2", b"\1\2\1\2", place(1), place(2, liveness=Liveness.GONE))
    assert device(shown).turns_per_s == 0.5
    assert {job: each.share for job, each in jobs(shown).items()} == {"1": 1.0, "2": None}


def test_a_log_made_anew_has_no_rates() -> None:
    shown = between(b"\1\1\1\1", b"\1", place(1))
    assert (device(shown).turns_per_s, jobs(shown)["1"].share) == (None, None)


def test_a_log_that_appears_between_looks_counts_from_its_beginning() -> None:
    assert device(between(None, b"\1\1", place(1))).turns_per_s == 1.0


def test_a_slot_in_the_log_that_nobody_has_is_passed_over() -> None:
    assert device(between(b"", b"\1\xff\1", place(1))).turns_per_s == 1.0


# --- hand-overs and idle time --------------------------------------------------------------------------------------


def test_the_last_hand_over_is_the_latest_turn_given_back() -> None:
    places = [
        place(1, returned=4, returned_at_ns=7 * SECOND_NS),
        place(2, returned=3, returned_at_ns=6 * SECOND_NS),
        place(3, returned=0, returned_at_ns=9 * SECOND_NS),
        place(4, returned=1, returned_at_ns=99 * SECOND_NS),  # another machine's clock, or nonsense
    ]
    assert device(report([looked(segment(*places), at_s=9.5)])).handover_age_s == pytest.approx(2.5)
    assert device(report([looked(segment(place(1)))])).handover_age_s is None


def test_idle_is_the_part_of_looks_without_a_holder() -> None:
    idle = [place(1, started=1, returned=1), place(2)]
    held = [place(1, started=2, returned=1), place(2)]
    looks = [looked(segment(*(held if step % 4 else idle)), at_s=step / 10) for step in range(8)]
    assert device(report(looks)).idle_share == 0.25
    assert device(report(looks[:2])).idle_share is None


def test_a_dead_holder_holds_nothing() -> None:
    places = [place(1, started=2, returned=1, liveness=Liveness.GONE), place(2), place(3)]
    assert device(report([looked(segment(*places))] * 6)).idle_share == 1.0


def test_idle_time_of_a_job_alone_is_not_known() -> None:
    shown = device(report([looked(segment(place(1)))] * 8))
    assert shown.idle_share is None
    assert any("a job alone" in what for what in shown.not_known)


@pytest.mark.parametrize(("name", "said"), [("GPU-1", True), ("cpu-1", False)])
def test_on_a_gpu_idle_time_is_the_hosts_view(name: str, said: bool) -> None:
    shown = device(report([looked(segment(place(1), place(2), device=name))] * 8))
    assert any("kernels may run on" in what for what in shown.not_known) == said


# --- the whole -----------------------------------------------------------------------------------------------------


def test_groups_are_sorted_and_problems_told() -> None:
    seen = looked(segment(place(1), group="b"), segment(place(1), group="a"))
    shown = report([seen._replace(problems=(SegmentProblem("x", "odd"),))])
    assert [group.group for group in shown.groups] == ["a", "b"]
    assert shown.problems == ({"path": "x", "what": "odd"},)


def test_nothing_is_reported_of_nothing() -> None:
    assert report([looked()]).groups == ()
