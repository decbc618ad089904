"""The contents of a recorded step, the same for all hooks: the command and the lab read them."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from crossover_ddp import cli
from tests.harness import run_ranks
from tests.harness.training import Training
from tests.harness.turn import RecordingTurn

STEPS = 5
BUCKETS = 3
BUCKET_BYTES = 168  # a matrix of 6 x 6 and its bias
Spans = list[dict[str, Any]]
HALVES, WHOLE = ("reduce_scatter", "all_gather"), ("all_reduce",)
EXCHANGING = ("split", "crossover", "int8", "decoupled", "owned", "kfac", "muon")
DEFERRING = ("decoupled", "owned")


def train(rank: int, world_size: int, way: str) -> None:
    Training(way, rank, mutex=RecordingTurn()).run(STEPS).close()


def recorded(way: str, world_size: int, directory: Path) -> Spans:
    run_ranks(train, world_size, args=(way,), environment={"CROSSOVER_TIMELINE": str(directory)})
    trace = directory / "trace.json"
    assert cli.main(["timeline", str(directory), "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())
    lanes = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    return [
        {
            "kind": event["cat"],
            "begin": event["ts"],
            "end": event["ts"] + event["dur"],
            **event["args"],
        }
        for event in events
        if event["ph"] == "X" and " · rank 0 · " in lanes[event["tid"]]
    ]


@pytest.mark.parametrize(
    ("way", "world_size"), [("split", 1), *((way, 2) for way in (*EXCHANGING, "wrapped"))]
)
def test_a_step_has_its_waits_and_both_halves_of_each_bucket(
    way: str, world_size: int, tmp_path: Path
) -> None:
    spans = recorded(way, world_size, tmp_path)
    counts = Counter(span["kind"] for span in spans)
    assert counts["wait"] >= STEPS - 1
    computed = sorted(span["step"] for span in spans if span["kind"] == "compute")
    assert computed == list(range(1, STEPS)), "the beginning of the first step is not known"
    # Hooks that do not defer wait for their buckets within backward.
    assert counts["exchange"] == (0 if way in DEFERRING else STEPS)
    turns = sorted(
        (span["begin"], span["end"])
        for span in spans
        if span["kind"] in ("compute", "exchange", "wait")
    )
    assert all(end <= begin + 1 for (_, end), (begin, _) in itertools.pairwise(turns))

    if way in EXCHANGING and world_size > 1:
        # Two ranks send coded gradients in one hop.
        is_one = way in ("split", "crossover") or (way == "int8" and world_size == 2)
        check_halves(spans, way, WHOLE if is_one else HALVES)


def check_halves(spans: Spans, way: str, kinds: Sequence[str]) -> None:
    halves: dict[str, dict[tuple[int, int], dict[str, Any]]] = {kind: {} for kind in kinds}
    for span in spans:
        if span["kind"] in kinds and span["bucket"] >= 0:
            place = span["step"], span["bucket"]
            assert place not in halves[span["kind"]], "recorded twice"
            halves[span["kind"]][place] = span
    buckets = [(0, 0)] + [(step, bucket) for step in range(1, STEPS) for bucket in range(BUCKETS)]
    for kind in kinds:
        assert sorted(halves[kind]) == buckets, "the first backward has one bucket"
    for place in buckets:
        first = halves[kinds[0]][place]
        last = halves[kinds[-1]][place]
        assert first["begin"] <= first["end"] <= last["end"]
        for span in first, last:
            of_one = BUCKET_BYTES
            if way == "muon" and span is last:
                # 36 of 42 numbers return as a direction, of two bytes each, with a norm of 8 bytes.
                of_one += 8 - 36 * 2
            exact_bytes = of_one * (BUCKETS if place == (0, 0) else 1)
            assert span["bytes"] == exact_bytes or (way == "kfac" and span["bytes"] > exact_bytes)


def train_with_one_recording(rank: int, world_size: int, way: str) -> None:
    with mock.patch.dict(os.environ):
        if rank:
            del os.environ["CROSSOVER_TIMELINE"]
        train(rank, world_size, way)


@pytest.mark.parametrize("way", ["split", "int8", "decoupled"])
def test_a_rank_may_record_alone(way: str, tmp_path: Path) -> None:
    environment = {"CROSSOVER_TIMELINE": str(tmp_path)}
    run_ranks(train_with_one_recording, 2, args=(way,), environment=environment)
    assert len(list(tmp_path.iterdir())) == 1


def test_averaging_records_the_exchanges_of_its_rounds(tmp_path: Path) -> None:
    spans = recorded("averaged", 2, tmp_path)
    counts = Counter(span["kind"] for span in spans)
    assert counts["reduce_scatter"] == counts["all_gather"] >= 2
    assert {span["bytes"] for span in spans if span["kind"] in HALVES} == {BUCKETS * BUCKET_BYTES}
