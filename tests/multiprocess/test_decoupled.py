"""Decoupled training in real ranks: its results are plain DDP's, deferred or not."""

import contextlib
import copy
import itertools
import math
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
from tests.harness.groups import impatient_group
from tests.harness.networks import mlp
from tests.harness.oracles import error_of, heard
from tests.harness.training import Training, decoupled
from tests.multiprocess.averaging_oracle import MAKERS, loss_of, network
from tests.unit.decoupled import decoupled_training
from tests.unit.decoupled.decoupled_training import Training as Small
from tests.unit.decoupled.decoupled_training import both as small_and_plain
from tests.unit.decoupled.decoupled_training import inputs

WARM_UP, BLOCK, END = inside.RACE
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
    training.model(torch.zeros(1, 1, 6, 6))  # buffers may differ between two steps
    flat = torch.cat([value.flatten().double() for value in training.weights()])
    training.close()
    return flat


@in_ranks(2)
def test_one_rank_may_read_and_save_alone(rank: int) -> None:
    """Checkpoints, averages and evaluations on one rank need no other rank."""
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


@pytest.mark.torch_version
@in_ranks(2)
def test_norms_of_deferred_steps_and_others_have_the_same_bits(rank: int) -> None:
    """Also if only one rank asks for them, in steps whose sums travel and in others."""
    runs = [
        Training(decoupled(defer=defer), rank, module=mlp(6, 700, 6, seed=3))
        for defer in ("always", "auto")
    ]
    inside.pretend_times(runs[1].state, deferred_s=3.0, whole_s=2.0)
    deferred = []
    for step in range(60):
        norms = []
        for training in runs:
            training.backward(step)
            gradients = [p.grad for p in training.held]
            if step < 40 or rank == step % 2:
                norms.append([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
            torch._foreach_mul_(gradients, 0.5)
            training.update()
        if norms:
            assert torch.equal(*map(torch.stack, norms))
        deferred.append(runs[0].is_pending)
    assert runs[1].state.deferring is False
    assert all(deferred[4:40])
    assert torch.equal(*[end(training) for training in runs])


@pytest.mark.torch_version
@in_ranks(2)
def test_a_scaler_skips_steps_that_overflow_on_one_rank(rank: int) -> None:
    runs = [Training(way, rank) for way in ("decoupled", None)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in runs]
    for step in range(20):
        for training, scaler in zip(runs, scalers, strict=True):
            overflows = step in (7, 8, 15) and rank == step % 2
            scaler.scale(training.loss(step) * (math.inf if overflows else 1.0)).backward()
            scaler.unscale_(training.optimizer)
            nn.utils.clip_grad_norm_(training.held, 1e9)
            scaler.step(training.optimizer)
            scaler.update()
            training.drop()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert runs[0].state.stats()["steps_deferred"] >= 14
    assert torch.equal(*[end(training) for training in runs])


@in_ranks(2)
def test_gradients_without_bucket_views_are_those_of_plain_ddp_after_forward(rank: int) -> None:
    """Without bucket views the mean is copied into gradients, unless the user has dropped them."""
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


@in_ranks(2)
def test_gradients_that_others_drop_leave_updates_pending(rank: int) -> None:
    """Hugging Face's Trainer drops them by the model, and Fabric by an optimizer of its own."""
    one, plain = (training_of(way, rank) for way in ("decoupled", None))
    for step in range(8):
        for training in (one, plain):
            training.backward(step)
            training.optimizer.step()
            pending = training.is_pending
            if step % 2:
                torch.optim.Optimizer.zero_grad(training.optimizer)
            else:
                training.model.zero_grad(set_to_none=step != 6)
            assert training.is_pending == (pending and step != 6)
            assert step == 6 or all(p.grad is None for p in training.held)
    assert one.state.stats()["steps_deferred"] > 4
    assert torch.equal(end(one), end(plain))


def train(training: Training, verdict: bool | None = None) -> tuple[list[float], list[bool]]:
    """Return losses, and for each step whether it was deferred.

    Args:
        training: the training to run.
        verdict: whether the race's clock shows that deferred steps are faster; None: the real one.
    """
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
            state.flush()  # on one rank only, which therefore does not defer this step
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
def test_training_equals_the_split_hooks_whatever_the_race_chooses(rank: int) -> list[bool]:
    """Nothing is logged. With bucket views and a verdict the job takes a turn per backward pass."""
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
        first_block = deferred[SETTLED + WARM_UP : SETTLED + WARM_UP + BLOCK]
        assert rank == 0 or not any(first_block), "it is not deferred"
        if mutex is not None:
            dist.barrier()
            assert STEPS <= mutex.stats()["turns"] <= FORWARDS + 4
            mutex.close()
    return chosen


@pytest.mark.defect("decoupled-5")
@in_ranks(2)
def test_gradients_read_after_a_forward_that_failed_are_the_mean(rank: int) -> None:
    """Rank 0 reads while rank 1 still computes; a forward has failed before or after backward."""
    found, failing = [], contextlib.suppress(RuntimeError)
    for training in small_and_plain(
        net=lambda: mlp(6, 6, seed=0), make=lambda m: torch.optim.SGD(m.parameters())
    ):
        training.run()
        for moment in ("before", "after"):
            loss = training.model(inputs(rank)).sum() * (1 + rank)
            if moment == "before":
                with failing:
                    training.model(torch.ones(2, 5))
            time.sleep(0.2 * rank)
            loss.backward()
            if moment == "after":
                with failing:
                    training.model(torch.ones(2, 5))
            found.append([p.grad.tolist() for p in training.model.module.parameters()])
            training.drop()
        training.close()
    assert found[:2] == found[2:]


@pytest.mark.defect("decoupled-12")
@pytest.mark.quiet
@pytest.mark.parametrize(("defer", "cap_mb"), [("always", 1e-4), ("auto", 25)])
@in_ranks(2)
def test_a_bucket_refused_on_one_rank_raises_on_the_others(
    rank: int, defer: str, cap_mb: float
) -> None:
    """Rank 1 continues after the error, as a script that leaves a bad batch out."""
    ddp = {"process_group": impatient_group(2), "bucket_cap_mb": cap_mb}
    training = Small(decoupled=True, ddp=ddp, defer=defer).run(12)
    if rank:
        with inside.refuse_bucket("last"), pytest.raises(KeyError, match="ours"):
            training.step()
        training.drop()
    told = error_of(lambda: training.run(8))
    assert re.search(r"rank \d.* bucket \d", told) or (rank and told == "no error"), told


@pytest.mark.defect("decoupled-6")
@in_ranks(2)
def test_the_infinity_norm_is_nan_if_any_gradient_is_nan(rank: int) -> None:
    # Each rank owns a row.
    training = Small(
        decoupled=True, net=lambda: nn.Linear(6, 2, bias=False), ddp={"bucket_cap_mb": 25}
    )
    (training.model(torch.ones(1, 6)) * torch.tensor([1.0, float("nan")])).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        training.state.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True)


@pytest.mark.defect("decoupled-16")
@in_ranks(2)
def test_buffers_between_steps_are_the_same_deferred_or_not(rank: int) -> None:
    """Code that reads the model after a step finds plain DDP's running mean: this rank's own."""
    found: list[list[torch.Tensor]] = []
    for is_ours in (False, True):
        net = nn.Sequential(decoupled_training.network(), nn.BatchNorm1d(6))
        training = Small(
            decoupled=is_ours, net=lambda net=net: net, **({"defer": "auto"} if is_ours else {})
        )
        means = []
        for step in range(24):
            training.steps = 2 * step + rank
            training.step()
            means.append(net.state_dict()["1.running_mean"].clone())
        found.append(means)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("width", "trained", "cap_mb"),
    [(8, True, 0.25), (2**12, True, 4.0), (2**12, False, 0.25), (2**15, True, 25.0)],
)
def test_ddp_options_follow_the_size_of_the_gradients(
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
        # The savings of four ranks equal the directions, computed while backward's memory is used.
        pytest.param("muon", "muon owners", 2, marks=only_in_campaign),
        pytest.param("adamw", "adamw owners", 0, marks=only_in_campaign),
    ],
)
def test_peak_memory_is_plain_ddps_and_some_buckets(
    plain: str, hooked: str, more_buckets: int
) -> None:
    """Peak memory of four ranks, with decoupled training, owners and Muon, and with plain DDP."""
    expected = peaks_bytes(plain)
    assert min(expected) > 3 * 6 * BUCKET_BYTES, "parameters, gradients, momentum"
    # On a busy machine a single rank may peak higher, since it keeps what it receives early.
    assert median(peaks_bytes(hooked)) <= median(expected) + more_buckets * BUCKET_BYTES
