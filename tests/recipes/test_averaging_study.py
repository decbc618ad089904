"""The study of averaged replicas: who waits for whom, and a rank's own pace."""

import argparse
from typing import Any

import pytest

from studies.averaging import order_of, summarize

ARGS = argparse.Namespace(way=["ddp", "delayed"], slow=1.0, sync_every=4, delay=3, fragments=0, steps=8)


def answer(step_s: float, waits_s: float = 0.0) -> dict[str, Any]:
    return {
        "step_s": step_s,
        "core_busy_s": 0.1,
        "wire_bytes": 1e6,
        "waits_s": [waits_s] * 8,
        "measured": 8,
    }


def test_the_rank_that_waits_least_tells_of_the_wire() -> None:
    """The other one is ahead, and waits for its peer."""
    runs = [{"ddp": [answer(0.3)] * 2, "delayed": [answer(0.1, 0.001), answer(0.1, 0.01)]} for _ in range(3)]
    row = summarize("tiny", 3.0, 100.0, ARGS, runs, [answer(0.3)] * 2)
    assert row["waited_of_c"] == pytest.approx(0.055)
    assert row["waited_for_wire_of_c"] == pytest.approx(0.01)
    assert row["speed_up"]["ddp"] == pytest.approx(3.0)


def test_ranks_at_their_own_pace_are_held_against_ranks_that_exchange_nothing() -> None:
    args = argparse.Namespace(**{**vars(ARGS), "way": ["apart", "async"], "slow": 3.0})
    runs = [{"apart": [answer(0.1), answer(0.3)], "async": [answer(0.125), answer(0.3)]}]
    assert summarize("tiny", 3.0, 100.0, args, runs, [answer(0.1)] * 2)["own_pace"] == pytest.approx(0.8)
    assert order_of("apart", args, 0.1)["slow_share"] == 3
    assert order_of("sync", args, 0.1)["slow_share"] == 1
