"""Decoupled training in real ranks: what one rank may do alone, and that results are plain DDP's, deferred or not."""

import copy
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from crossover_ddp import DecoupledState, GPUMutex
from tests.harness import in_ranks, inside, spawn_script
from tests.harness.campaign import only_in_campaign
from tests.harness.oracles import heard
from tests.harness.training import Training, decoupled
from tests.multiprocess.averaging_oracle import MAKERS, loss_of, network

WARM_UP, BLOCK, END = inside.TRIAL
STEPS = END + 10
SETTLED = 2  # backward passes before DDP's buckets are known to stay
FORWARDS = STEPS + STEPS // 3


def training_of(way: Any, rank: int, optimizer: str = "momentum", **options: Any) -> Training:
    return Training(
        way,
        rank,
        module=network().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        optimizers=lambda model: [MAKERS[optimizer](model.parameters())],
        loss=loss_of,
        **{"bucket_cap_mb": 0.002, **options},
    )


def end(training: Training) -> torch.Tensor:
    training.model.eval()
    training.model(torch.zeros(1, 1, 6, 6))  # between two steps buffers may differ
    flat = torch.cat([value.flatten().double() for value in training.weights()])
    training.close()
    return flat


@in_ranks(2)
def test_one_rank_may_look_alone(rank: int) -> None:
    """Checkpoints, averages and evaluations of one rank need no other rank."""
    training, plain = training_of("decoupled", rank, "adamw"), training_of(None, rank, "adamw")
    average = AveragedModel(training.model.module) if rank == 0 else None
    looks: list[Callable[[], object]] = [
        training.state.flush,
        lambda: training.model.state_dict(),
        lambda: training.optimizer.state_dict(),
        lambda: average.update_parameters(training.model.module),
        lambda: copy.deepcopy(training.model.module)(torch.ones(2, 1, 6, 6)),
        lambda: time.sleep(0.05),
    ]
    for step in range(12):
        training.step()
        plain.step()
        if rank == 0:
            looks[step % len(looks)]()
    assert torch.equal(end(training), end(plain))


@in_ranks(2)
def test_gradients_without_bucket_views_are_those_of_plain_ddp_after_forward(rank: int) -> None:
    """Without bucket views, what the user holds by then is copied; what he has dropped is not."""
    one, plain = (
        training_of(way, rank, gradient_as_bucket_view=False) for way in ("decoupled", None)
    )
    for step in range(8):
        losses = [each.loss(step) for each in (one, plain)]
        if step:
            for a, b in zip(one.held[1:], plain.held[1:], strict=True):
                assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
        for training, loss in zip((one, plain), losses, strict=True):
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            training.held[0].grad = None
    assert one.state.stats()["steps_deferred"] > 5
    assert torch.equal(end(one), end(plain))


def train(training: Training, verdict: bool | None = None) -> tuple[list[float], list[bool]]:
    """Return losses, and after which steps updates were deferred; ``verdict``: what the trial's clock shall show."""
    model, state = training.model, training.state
    if verdict is not None:
        inside.pretend_times(state, deferred_s=1.0 if verdict else 3.0, whole_s=2.0)
    losses, deferred = [], []
    for step in range(STEPS):
        if step % 3 == 2:
            with model.no_sync():
                training.backward(1000 + step)
        training.backward(step)
        if training.rank == 0 and step % 7 == 5 and state is not None:
            state.flush()  # on one rank only: that it does not defer then must not confuse the others
        training.optimizer.step()
        deferred.append(training.is_pending)
        # Every other time gradients stay allocated, and are added to in place.
        training.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 10 == 9:
            model.eval()
            losses.append(float(model(torch.ones(2, 1, 6, 6)).sum()))
            model.train()
    return losses, deferred


@pytest.mark.torch_version
@in_ranks(2, timeout_s=120.0)
def test_training_is_that_of_the_split_hook_whatever_is_chosen(rank: int) -> list[bool]:
    """And nobody is warned. With bucket views and a verdict the job takes turns, one for each backward pass."""
    plain = training_of("split", rank)
    expected, chosen = train(plain)[0], []
    for views, verdict in itertools.product((True, False), (True, False, None)):
        mutex = GPUMutex(device=f"device{rank}") if views and verdict is not None else None
        way = decoupled(defer="auto")
        with heard() as said:
            training = training_of(way, rank, mutex=mutex, gradient_as_bucket_view=views)
            losses, deferred = train(training, verdict)
        assert said == []
        chosen.append(training.state.deferring)
        training.close()
        assert losses == expected
        assert all(map(torch.equal, training.held, plain.held))
        if verdict is not None:
            assert chosen[-1] is verdict
            assert rank == 0 or set(deferred[SETTLED + END :]) == {verdict}
        second_block = deferred[SETTLED + WARM_UP + BLOCK : SETTLED + WARM_UP + 2 * BLOCK]
        assert rank == 0 or not any(second_block), "it is not deferred"
        if mutex is not None:
            dist.barrier()
            assert STEPS <= mutex.stats()["turns"] <= FORWARDS + 4
            mutex.close()
    return chosen


@pytest.mark.parametrize(
    ("width", "trained", "cap_mb"),
    [(8, True, 0.25), (2**12, True, 4.0), (2**12, False, 0.25), (2**15, True, 25.0)],
)
def test_options_for_ddp_follow_the_size_of_what_is_trained(
    width: int, trained: bool, cap_mb: float
) -> None:
    layer = nn.Linear(width, width, device="meta").requires_grad_(trained)
    expected = {"gradient_as_bucket_view": True, "bucket_cap_mb": pytest.approx(cap_mb, rel=1e-3)}
    assert DecoupledState.ddp_options(layer) == expected


def test_an_unknown_way_to_defer_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="expected defer='auto' or 'always', got defer='never'"):
        DecoupledState(optimizer, defer="never")  # type: ignore[arg-type]


WORKER = Path(__file__).with_name("memory_worker.py")
BUCKET_BYTES = 4 * 1600 * 1600


def peaks_bytes(way: str) -> list[int]:
    with spawn_script(WORKER, 4, args=[way], forked=True) as ranks:
        outputs = ranks.wait(120)
    return [int(re.findall(r"peak of (\d+) bytes", output)[0]) for output in outputs]


@pytest.mark.parametrize(
    ("plain", "hooked", "more_buckets"),
    [
        ("plain", "decoupled", 1),
        # Four ranks save as much as directions take, which are computed while backward's memory is in use.
        pytest.param("muon", "muon owners", 2, marks=only_in_campaign),
        pytest.param("adamw", "adamw owners", 0, marks=only_in_campaign),
    ],
)
def test_peak_is_that_of_plain_ddp_and_some_buckets(
    plain: str, hooked: str, more_buckets: int
) -> None:
    """Of memory, with four ranks: decoupled training's, owners', and Muon's beside plain DDP's."""
    expected = peaks_bytes(plain)
    assert min(expected) > 3 * 6 * BUCKET_BYTES, "parameters, gradients, momentum"
    # On a busy machine a single rank may peak higher: what it receives early waits for it.
    assert median(peaks_bytes(hooked)) <= median(expected) + more_buckets * BUCKET_BYTES
