"""What sharing brought, worked out from counts; sizes and how many jobs fit."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp.cli.run.summary import (
    WARM_UP_TURNS,
    FreeMemory,
    Tally,
    fitting,
    format_size,
    parse_size,
    too_small,
)

RATES = st.floats(0.5, 100.0)


def both(tally: Tally, seconds: float, a: int, b: int) -> None:
    tally.note(seconds, {"a": a, "b": b}, joined={"a", "b"}, running={"a", "b"})


def alone(tally: Tally, job: str, seconds: float, turns: int) -> None:
    tally.note(seconds, {job: turns}, joined={job}, running={job})


def warmed_up() -> Tally:
    tally = Tally()
    both(tally, 50.0, WARM_UP_TURNS, WARM_UP_TURNS)  # counts for nothing but turns
    return tally


def test_speedup_is_the_time_of_the_same_turns_alone_over_the_shared_time() -> None:
    tally = warmed_up()
    both(tally, 10.0, 50, 40)
    alone(tally, "a", 5.0, 40)  # 0.125 s per turn
    alone(tally, "b", 6.0, 30)  # 0.2 s
    sharing = tally.sharing()
    assert sharing.alone_turn_s == {"a": 0.125, "b": 0.2}
    assert sharing.assumed_turn_s == {}
    assert sharing.shared_turns == {"a": 50, "b": 40}
    assert sharing.after_s == pytest.approx(50 * 0.125 + 40 * 0.2)
    assert sharing.speedup == pytest.approx(1.425)
    assert "these take about 14.2 s: speed-up 1.4" in sharing.in_words()
    assert tally.turns == {"a": 93, "b": 73}


def test_a_job_that_was_never_alone_is_taken_to_be_as_fast_as_the_others_and_that_is_said() -> None:
    tally = warmed_up()
    both(tally, 10.0, 50, 40)
    alone(tally, "a", 5.0, 50)
    sharing = tally.sharing()
    assert sharing.assumed_turn_s == {"b": 0.1}
    assert sharing.speedup == pytest.approx(0.9)
    assert "never alone, so taken to be as fast as the others: b" in sharing.in_words()


@settings(deadline=None)
@given(
    alone_a=RATES, alone_b=RATES, shared_a=RATES, shared_b=RATES, cuts=st.lists(st.integers(1, 9), min_size=1)
)
def test_speedup_is_the_sum_of_relative_speeds_however_often_one_looks(
    alone_a: float, alone_b: float, shared_a: float, shared_b: float, cuts: list[int]
) -> None:
    tally = warmed_up()
    for seconds in (1000.0 * cut for cut in cuts):
        alone(tally, "a", seconds, round(alone_a * seconds))
        alone(tally, "b", seconds, round(alone_b * seconds))
        both(tally, seconds, round(shared_a * seconds), round(shared_b * seconds))
    speedup = tally.sharing().speedup
    assert speedup is not None
    assert math.isclose(speedup, shared_a / alone_a + shared_b / alone_b, rel_tol=0.01)


def test_intervals_in_which_something_else_went_on_belong_to_neither_side() -> None:
    tally = warmed_up()
    tally.note(100.0, {"a": 1}, joined={"a"}, running={"a", "b"})  # b starts up
    tally.note(100.0, {"a": 1, "b": 1}, joined={"a", "b", "/7f"}, running={"a", "b"})  # a stranger
    tally.note(100.0, {"a": 1}, joined=set(), running={"a"})  # somebody came or went
    assert tally.shared.seconds == 0.0
    assert tally.alone == {}
    assert tally.turns["a"] == WARM_UP_TURNS + 3


def test_the_first_turns_of_a_job_count_for_nothing() -> None:
    tally = Tally()
    alone(tally, "a", 60.0, WARM_UP_TURNS - 1)
    alone(tally, "a", 30.0, 1)
    assert tally.alone == {}
    alone(tally, "a", 4.0, 20)
    assert tally.alone["a"].seconds == 4.0


def test_what_is_not_known_is_said() -> None:
    tally = Tally()
    assert "do the scripts register crossover_hook?" in tally.sharing().why_not
    both(tally, 9.0, 0, 0)
    assert "another one" in tally.sharing().why_not
    both(tally, 9.0, 9, 9)
    assert "took turns together for too short a time" in tally.sharing().why_not
    both(tally, 9.0, 9, 9)
    assert "--try-first" in tally.sharing().why_not
    alone(tally, "a", 1.9, 50)  # too short
    sharing = tally.sharing()
    assert (sharing.speedup, sharing.after_s, sharing.assumed_turn_s) == (None, None, {})
    assert sharing.in_words() == f"speed-up not known: {sharing.why_not}"
    assert json.loads(json.dumps(dataclasses.asdict(sharing)))["shared_s"] == 9.0


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("12G", 12 << 30),
        ("800m", 800 << 20),
        ("1.5GiB", 3 << 29),
        ("2 TB", 2 << 40),
        ("4096", 4096),
        ("1k", 1024),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "0", "-1G", "1X", "nan", "1e9", "1.G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size as 12G or 800M"):
        parse_size(text)


@settings(deadline=None)
@given(st.integers(1 << 10, 1 << 50))
def test_sizes_are_shown_to_four_digits(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.001)


def test_a_room_that_does_not_hold_its_jobs_is_named() -> None:
    memories = [FreeMemory("GPU-1", 10 << 30, 2), FreeMemory("GPU-2", 10 << 30, 1)]
    assert too_small(memories, 5 << 30) == []
    (found,) = too_small(memories, 6 << 30)
    assert found == "GPU-1: 2 at once × 6 GiB is more than the 10 GiB that are free"


def test_the_smallest_room_says_how_many_fit() -> None:
    memories = [FreeMemory("GPU-1", 100, 2), FreeMemory("GPU-2", 50, 2), FreeMemory("GPU-3", 1, 2)]
    assert fitting(memories, {"GPU-1": 30, "GPU-2": 20, "GPU-3": 0}) == 2
    assert fitting(memories, {"GPU-1": 101}) == 0
    assert fitting(memories, {}) is None
