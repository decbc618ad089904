"""The turn around a step's last bucket: who may hear of what, in which order, on which thread."""

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import sgd as torch_sgd

from crossover_ddp import CrossoverState, ExchangeError, crossover_wrapper
from crossover_ddp._system import torch_private
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import in_ranks
from tests.harness.networks import mlp
from tests.harness.training import Training, hooked, noted
from tests.harness.turn import RecordingTurn

STEPS = 3
# Backward ends with their exchange, so that the next turn is taken by a thread of the package's.
TURNS_IN_BACKWARD = [
    *((way, 2) for way in ("crossover", "wrapped", "int8", "kfac", "muon")),
    *((way, 1) for way in ("crossover", "wrapped")),
]


@pytest.mark.parametrize(("way", "world_size"), TURNS_IN_BACKWARD)
@in_ranks()
def test_the_turn_goes_before_anybody_hears_of_the_last_bucket(
    rank: int, world_size: int, way: str
) -> None:
    """Whoever hears of it may take the next turn at any moment; ranks would count turns differently, and hang."""
    returned: queue.Queue[torch.futures.Future[torch.Tensor]] = queue.Queue()
    done: list[bool] = []
    noting = noted(lambda bucket, future: returned.put(future) if bucket.is_last() else None)
    turn = RecordingTurn(
        window_s=0.2, at_acquire=lambda: done.append(returned.get(timeout=60).done())
    )
    Training(way, rank, mutex=turn, around=noting).run(STEPS).close()
    asked = ["request"] * (way != "wrapped" and world_size > 1)  # half-way
    assert turn.order == ["release", *asked, "acquire"] * STEPS
    assert done == [False] * STEPS, "the last Future was done before the turn"
    takers = [
        thread for call, thread in zip(turn.order, turn.threads, strict=True) if call != "release"
    ]
    # One of gloo's threads that waits for a sibling would keep all other collectives of the group waiting.
    assert not any(isinstance(each, threading._DummyThread) for each in takers)


# What owners compute, by the way of the hook.
WORK: dict[str, tuple[Any, str]] = {
    "kfac": (torch.linalg, "cholesky_ex"),
    "muon": (torch_private, "newton_schulz"),
    "owned": (torch_sgd, "sgd"),
}


def kfac_in_each_step(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
    return KFACState(model, optimizers[0], mutex=mutex, inv_update_steps=1), kfac_hook


@pytest.mark.parametrize("way", WORK)
@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks()
def test_owners_work_is_compute_inside_the_turn(rank: int, world_size: int, way: str) -> None:
    """Of each piece of work is noted how many turns the rank had given away and not taken again."""
    turn, found = RecordingTurn(), list[int]()
    module, name = WORK[way]
    original = getattr(module, name)

    @functools.wraps(original)  # whose signature Muon's state reads
    def noting(*arguments: Any, **options: Any) -> Any:
        if len(arguments[0]):  # else it is a count of steps
            time.sleep(0.02)  # the hook's thread is through
            found.append(turn.order.count("release") - turn.order.count("acquire"))
        return original(*arguments, **options)

    training = Training(kfac_in_each_step if way == "kfac" else way, rank, mutex=turn).run(1)
    with mock.patch.object(module, name, noting):
        training.run(STEPS)
    training.close()
    pieces = torch.tensor(len(found))
    dist.all_reduce(pieces)
    assert pieces >= 3 * STEPS, "a piece for each of three layers in each step"
    assert not any(found)


class TheirHook:
    """Somebody's hook below `crossover_wrapper`, whose Futures the test completes from the second backward on."""

    def __init__(self, turn: RecordingTurn) -> None:
        self.theirs: list[torch.futures.Future[torch.Tensor]] = []
        self.buffers: list[torch.Tensor] = []
        self.returned: list[torch.futures.Future[torch.Tensor]] = []
        self._meanwhile: Callable[[], None] | None = None

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if self._meanwhile is None:
                return allreduce_hook(None, bucket)  # type: ignore[arg-type]
            self.theirs.append(torch.futures.Future())
            self.buffers.append(bucket.buffer())
            return self.theirs[-1]

        def note(bucket: dist.GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
            self.returned.append(future)
            if bucket.is_last() and self._meanwhile is not None:
                threading.Thread(target=self._meanwhile).start()

        wrapped = noted(note)(crossover_wrapper(hook))
        self._model = hooked(mlp(3, 8, 8, 3, seed=0), wrapped, CrossoverState(mutex=turn))  # type: ignore[arg-type]
        self.backward(None)  # in which DDP has one bucket
        self.returned.clear()
        turn.order.clear()

    def backward(self, meanwhile: Callable[[], None] | None) -> None:
        """Run backward, and on another thread what happens once all hooks were called."""
        self._meanwhile = meanwhile
        self._model(torch.ones(2, 3)).sum().backward()

    def complete_earlier(self) -> None:
        for future, buffer in zip(self.theirs[:-1], self.buffers, strict=False):
            future.set_result(buffer)


@pytest.mark.usefixtures("process_group")
def test_under_the_wrapper_the_last_future_alone_waits_for_the_turn_and_for_all_earlier_ones() -> (
    None
):
    gate = threading.Event()
    gate.set()
    turn = RecordingTurn(at_acquire=gate.wait)
    hook = TheirHook(turn)
    seen: list[Any] = []

    def complete() -> None:
        hook.theirs[-1].set_result(hook.buffers[-1])
        time.sleep(0.1)
        seen.append((list(turn.order), hook.returned[-1].done()))
        gate.clear()
        hook.complete_earlier()
        seen.append([future.done() for future in hook.returned])
        gate.set()

    hook.backward(complete)
    assert len(hook.theirs) > 2
    assert seen[0] == (["release"], False), "an earlier Future of the step is missing"
    assert seen[1] == [True] * (len(hook.theirs) - 1) + [False], "the gate is closed"
    assert turn.order == ["release", "acquire"]


@pytest.mark.usefixtures("process_group")
def test_a_failure_below_the_wrapper_carries_its_cause_gives_the_turn_away_and_is_final() -> None:
    turn = RecordingTurn()
    hook = TheirHook(turn)

    def fail() -> None:
        hook.complete_earlier()
        hook.theirs[-1].set_exception(OSError("their link broke"))  # type: ignore[arg-type]

    texts = []
    for meanwhile in (fail, None):
        with pytest.raises(
            ExchangeError, match=r"rank 0 of 1: .*bucket \d+ .*their link broke"
        ) as caught:
            hook.backward(meanwhile)
        assert "their link broke" in str(caught.value.__cause__)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert turn.order == ["release"] * 2
