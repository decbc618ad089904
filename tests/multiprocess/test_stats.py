"""The statistics of hooks: the same keys for every state, the bytes sent, the seconds waited."""

import contextlib
import copy
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from crossover_ddp import metrics_of
from tests.harness import in_ranks
from tests.harness.oracles import heard
from tests.harness.training import WAYS, Training

STEPS = 12
TYPES: Mapping[str, Any] = {
    "steps": int,
    "steps_deferred": int,
    "not_deferred_because": str | None,
    "bytes_sent": int,
    "exposed_s": float,
    "hidden_s": float,
    "codec": dict | None,
    "rate": float,
    "turns": int,
    "no_turns_because": str | None,
}
WITH_STATE = [way for way in WAYS if way != "split"]
# The bytes that a rank of two sends in a step, as a part of the gradients' bytes, from the second
# step on. The sends of a wrapped hook are not counted.
EXACT = {"split": 1.0, "crossover": 1.0, "decoupled": 1.0, "owned": 1.0, "wrapped": 0.0}


@contextlib.contextmanager
def sending(*, slow_s: float = 0.0) -> Iterator[list[int]]:
    """Record the bytes of all tensors that Python passes to gloo.

    Args:
        slow_s: a delay of each arrival.
    """
    sent: list[int] = []

    class Slow:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self, *timeout: Any) -> bool:
            time.sleep(slow_s)
            return bool(self.work.wait(*timeout))

    def noting(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)

        def call(group: Any, tensors: list[torch.Tensor], *rest: Any) -> Any:
            if name != "recv":
                sent.extend(each.numel() * each.itemsize for each in tensors)
            work = original(group, tensors, *rest)
            return Slow(work) if slow_s and name != "send" else work

        return patch.object(dist.ProcessGroup, name, call)

    with noting("send"), noting("recv"), noting("allreduce"):
        yield sent


def gradients_bytes(training: Training) -> int:
    return sum(p.numel() * p.itemsize for p in training.model.parameters())


def settle(training: Training) -> None:
    """Wait for all exchanges under way."""
    for name in ("flush", "state_dict") if training.state is not None else ():
        getattr(training.state, name, lambda: None)()


@pytest.mark.parametrize("way", WITH_STATE)
@in_ranks(2)
def test_every_state_has_the_same_keys_and_counts_the_bytes_that_it_sends(
    rank: int, way: str
) -> None:
    with sending() as recorded:
        # Ranks compare replicas in the 8th step and in the 16th. None of the measured steps does.
        training = Training(way, rank).run(9)
        settle(training)
        begin = sum(recorded)
        before = training.state.stats()
        training.run(STEPS - 9)
        settle(training)
        stats = training.state.stats()
        seen = sum(recorded) - begin
    training.close()
    training.state.close()  # a second time does nothing
    assert training.state.stats().keys() >= TYPES.keys()
    assert [name for name, kind in TYPES.items() if not isinstance(stats[name], kind)] == []
    assert stats["steps"] == STEPS
    seconds = stats["exposed_s"], stats["hidden_s"]
    assert min(seconds) >= 0 and sum(seconds) < 60
    sent = stats["bytes_sent"] - before["bytes_sent"]
    if way in EXACT:
        # With owners, the sums of squares travel in each step: a float64 for each parameter, and
        # one more.
        sums_bytes = 8 * (len(training.held) + 1) if way == "owned" else 0
        assert sent == (STEPS - 9) * (EXACT[way] * gradients_bytes(training) + sums_bytes)
    if way == "wrapped":
        assert sent == 0 < seen
    elif way != "elastic":  # `settle` calls state_dict(), which gathers the centre
        assert sent == seen > 0
    assert (stats["codec"] is not None) == (way == "int8") == (stats["rate"] != 1.0)
    assert (stats["steps_deferred"] > 0) == (way in ("decoupled", "owned"))
    assert (stats["not_deferred_because"] is None) == (way in ("decoupled", "owned"))


@pytest.mark.parametrize(
    ("way", "pause_s"), [("split", 0.1), ("int8", 0.1), ("decoupled", 0.3), ("decoupled", 0.0)]
)
@in_ranks(2)
def test_exposed_and_hidden_seconds_on_a_slow_link_add_up_to_no_more_than_the_time(
    rank: int, way: str, pause_s: float
) -> None:
    with sending(slow_s=0.02):
        training = Training(way, rank).run(3)
        settle(training)
        for parameter in training.model.parameters():
            parameter.register_hook(lambda gradient: time.sleep(0.01))
        metrics = metrics_of(training.state)
        begin_s = time.monotonic()
        for _ in range(5):
            training.step()
            time.sleep(pause_s)
        settle(training)
        lasted_s = time.monotonic() - begin_s
        found = metrics()
    training.close()
    exposed_s, hidden_s = (5e-3 * found[f"{name}_ms_per_step"] for name in ("exposed", "hidden"))
    assert exposed_s + hidden_s < lasted_s
    assert hidden_s > 5 * 0.02, "buckets travel while backward computes the next ones"
    if way == "decoupled" and pause_s:
        assert hidden_s > exposed_s, "the pause after step() hides late arrivals"
    else:
        assert exposed_s > 5 * 0.02, "backward, or else forward, waits for at least one bucket"


@in_ranks(2)
def test_metrics_of_a_resumed_job_count_only_its_own_steps(rank: int) -> None:
    former = Training("averaged", rank)
    resumed = Training("averaged", rank)
    saved = copy.deepcopy(former.run(6).state.checkpoint(former.optimizers))
    metrics = metrics_of(resumed.state)
    resumed.state.restore(saved, resumed.optimizers)
    resumed.run(4)
    found = metrics()
    sent_bytes = resumed.state.stats()["bytes_sent"]
    assert found["steps"] == 4
    assert 4 * found["bytes_per_step"] == sent_bytes > 0
    former.close()
    resumed.close()


@in_ranks(2)
def test_the_first_rank_logs_one_line_about_the_hook_after_a_hundred_steps(rank: int) -> None:
    for way, words in {
        "split": "split: waited",
        "decoupled": "DecoupledState: deferred 9",
        "int8": "CompressedState: Int8(block=256) sent",
        "averaged": "LocalSGDState: 50 exchanges of parameters",
        "crossover": "CrossoverState: took",
    }.items():
        with heard(logging.INFO) as messages:
            Training(way, rank, bucket_cap_mb=25).run(103).close()
        lines = [each for each in messages if "MB a step" in each]
        assert len(lines) == (rank == 0)
        assert all(line.startswith(words) and " ms a step" in line for line in lines)


@pytest.mark.parametrize("way", ["split", "decoupled"])
@in_ranks(2)
def test_metrics_cover_the_steps_since_the_last_call(rank: int, way: str) -> None:
    training = Training(way, rank).run(
        9
    )  # comparisons and sums of squares travel in the 8th and 16th
    settle(training)
    metrics = metrics_of(training.state)
    assert metrics() == {}
    for _ in range(2):
        training.run(2)
        settle(training)
        found = metrics()
        assert all(isinstance(value, float) for value in found.values())
        expected = {
            "steps": 2,
            "bytes_per_step": gradients_bytes(training),
            "deferred": way == "decoupled",
        }
        assert {name: found[name] for name in (*expected, "rate")} == {**expected, "rate": 1}
    with pytest.raises(TypeError, match="expected a state of crossover_ddp"):
        metrics_of(training.model)
    training.close()
