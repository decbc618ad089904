"""Codecs by a backend's own collectives. Here gloo's stand for NCCL's, which need a GPU for each rank."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import Codec, CompressedState, Half, Int8, SIDCo, compressed_hook
from crossover_ddp.comm_hooks import CrossoverState, DecoupledState, crossover_hook, decoupled_hook
from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.inside import force_native
from tests.multiprocess.compressed_training import backward, digest, gradients, network, wrapped

STEPS = 12 if IN_CAMPAIGN else 8
ACCUMULATED_STEP, CLIPPED_STEP = 3, STEPS - 2
WORLD_SIZES = (2, 3, 4)
# With more ranks than two only the layout of messages is another one, which is the same for all hooks.
CELLS = [
    ("compressed", 2),
    ("compressed", 4),
    ("crossover", 2),
    ("crossover", 3),
    ("decoupled", 2),
    ("decoupled", 3),
]
if IN_CAMPAIGN:
    CELLS = list(itertools.product(("compressed", "crossover", "decoupled"), WORLD_SIZES))
PAIR = (Int8(), Half())


def train(
    rank: int, hook: str, codec: Codec | tuple[Codec, Codec], device: torch.device | None = None
) -> tuple[list[str], float]:
    """Return the parameters after each step, and bytes over an exact exchange's."""
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    model = wrapped(device, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: Any
    if hook == "compressed":
        state = CompressedState(codec)
        model.register_comm_hook(state, compressed_hook)
    elif hook == "crossover":
        state = CrossoverState(codec=codec)
        model.register_comm_hook(state, crossover_hook)
    else:
        state = DecoupledState(optimizer, codec=codec)
        model.register_comm_hook(state, decoupled_hook)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == ACCUMULATED_STEP:
            with model.no_sync():
                backward(model, rank, 100 + step, device)
        backward(model, rank, step, device)
        if hook == "decoupled" and step == CLIPPED_STEP:
            state.clip_grad_norm_(0.5)
        optimizer.step()
        if hook == "decoupled":
            state.flush()
        found.append(digest(list(model.parameters())))
    stats = state.stats()
    return found, (stats if hook == "compressed" else stats["codec"])["rate"]


def both_ways(rank: int, world_size: int, hook: str) -> None:
    for codec in (Int8(), PAIR):
        on_ring, ring_rate = train(rank, hook, codec)
        with force_native():
            native, rate = train(rank, hook, codec)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, native)
        assert all(each == native for each in everyone), f"{codec}: ranks differ"
        # Gloo's own reduce-scatter adds more than two addends in another order, in the first step, which is exact.
        # The norm that decoupled training clips by is that of owners' parts, which are cut otherwise.
        until = CLIPPED_STEP if hook == "decoupled" else STEPS
        assert world_size > 2 or native[:until] == on_ring[:until], (
            f"{codec}: not the bits of messages on gloo"
        )
        assert ring_rate <= rate < 1.6 * ring_rate, "messages of one size are as long as the longest"


@pytest.mark.parametrize(("hook", "world_size"), CELLS)
def test_parameters_are_equal_on_all_ranks_and_those_of_gloo(hook: str, world_size: int) -> None:
    run_ranks(both_ways, world_size, args=[hook])


@force_native()
def conservation(rank: int, world_size: int) -> None:
    """What was applied and what is kept make up all gradients; a drained step leaves nothing."""
    model, alone = wrapped(), network()
    state = CompressedState(Int8())
    model.register_comm_hook(state, compressed_hook)
    missing = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    for step in range(STEPS):
        if step == STEPS - 2:
            kept = state.state_dict()["residuals"]
            for (name, _), total in zip(alone.named_parameters(), missing, strict=True):
                shared = total.clone()
                if name in kept:
                    shared -= kept[name].view_as(total).double() / world_size
                dist.all_reduce(shared)
                assert float(shared.abs().max()) < 1e-5
            state.drain()
        model.zero_grad()
        alone.zero_grad()
        backward(model, rank, step)
        backward(alone, rank, step)
        for total, own, mean in zip(missing, gradients(alone), gradients(model), strict=True):
            total += own.double() / world_size - mean.double() / world_size
    kept = state.state_dict()["residuals"]
    assert any(bool(each.any()) for each in kept.values()), "the last step was coded"


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost(world_size: int) -> None:
    run_ranks(conservation, world_size)


@force_native()
def with_turns(rank: int, world_size: int) -> None:
    """A mutex goes on as with exact collectives."""
    mutex = GPUMutex(device=f"native-{rank}", process_group=dist.group.WORLD)
    model = wrapped()
    model.register_comm_hook(CompressedState(Int8(), mutex=mutex), compressed_hook)
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step)
    assert mutex.stats()["turns"] >= 4
    assert mutex.stats()["disabled_because"] is None
    mutex.close()


def test_turns_are_taken() -> None:
    run_ranks(with_turns, 2)


@force_native()
def refused(rank: int, world_size: int, case: str) -> None:
    options: dict[str, Any] = {"find_unused_parameters": True} if case == "unused" else {}
    model = wrapped(**options)
    codec = SIDCo(0.05) if case == "size" else Int8()
    if case == "kfac":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.register_comm_hook(KFACState(model, optimizer, codec=codec), kfac_hook)
    else:
        model.register_comm_hook(CompressedState(codec), compressed_hook)
    messages = {
        "size": "expected a codec whose messages have one size, got SIDCo",
        "unused": "expected find_unused_parameters=False for a codec on a backend's own collectives",
        "kfac": "expected gradients on the CPU and gloo for a codec with K-FAC",
    }
    with pytest.raises(UnsupportedConfigurationError, match=messages[case]):
        for step in range(4):
            backward(model, rank, step)


@pytest.mark.parametrize("case", ["size", "unused", "kfac"])
def test_what_cannot_work_is_refused(case: str) -> None:
    run_ranks(refused, 2, args=[case])


@force_native()
def checkpoint(rank: int, world_size: int) -> None:
    """Residuals of one way go on in the other."""
    model = wrapped()
    state = CompressedState(Int8())
    model.register_comm_hook(state, compressed_hook)
    for step in range(3):
        model.zero_grad()
        backward(model, rank, step)
    saved = state.state_dict()
    assert all(each.device.type == "cpu" for each in saved["residuals"].values())
    other, plain = wrapped(), wrapped()
    loaded = CompressedState(Half())
    loaded.load_state_dict(saved)
    other.register_comm_hook(loaded, compressed_hook)
    plain.register_comm_hook(None, allreduce_hook)
    for each in (other, plain):
        backward(each, rank, 3)
    for (name, _), with_kept, without in zip(
        network().named_parameters(), gradients(other), gradients(plain), strict=True
    ):
        kept = saved["residuals"].get(name, torch.zeros(without.numel())).view_as(without).clone()
        dist.all_reduce(kept)
        torch.testing.assert_close(with_kept, without + kept / world_size, rtol=1e-4, atol=1e-6)


def test_residuals_are_taken_along() -> None:
    run_ranks(checkpoint, 2)
