"""Codecs by a backend's own collectives. Here gloo's stand for NCCL's, which need a GPU for each rank."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import Codec, CompressedState, Half, Int8, compressed_hook
from crossover_ddp.comm_hooks import CrossoverState, DecoupledState, crossover_hook, decoupled_hook
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
) -> tuple[list[str], float, torch.Tensor]:
    """Return the parameters after each step, bytes over an exact exchange's, and how far the parameters have come."""
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
    ends = zip(model.parameters(), network().to(device).parameters(), strict=True)
    way = torch.cat([(end - begin).detach().flatten() for end, begin in ends])
    return found, (stats if hook == "compressed" else stats["codec"])["rate"], way


def both_ways(rank: int, world_size: int, hook: str) -> None:
    for codec in (Int8(), PAIR):
        on_ring, ring_rate, ring_way = train(rank, hook, codec)
        with force_native():
            native, rate, way = train(rank, hook, codec)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, native)
        assert all(each == native for each in everyone), f"{codec}: ranks differ"
        # Gloo's own reduce-scatter adds more than two addends in another order, in the first step, which is exact.
        # The norm that decoupled training clips by is that of owners' parts, which are cut otherwise.
        until = CLIPPED_STEP if hook == "decoupled" else STEPS
        assert world_size > 2 or native[:until] == on_ring[:until], (
            f"{codec}: not the bits of messages on gloo"
        )
        assert (way - ring_way).norm() < 0.05 * ring_way.norm()
        assert ring_rate <= rate < 1.6 * ring_rate, "messages of one size are as long as the longest"


@pytest.mark.parametrize(("hook", "world_size"), CELLS)
def test_parameters_are_equal_on_all_ranks_and_those_of_gloo(hook: str, world_size: int) -> None:
    run_ranks(both_ways, world_size, args=[hook])


@force_native()
def refused(rank: int, world_size: int) -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_comm_hook(KFACState(model, optimizer, codec=Int8()), kfac_hook)
    expected = "expected gradients on the CPU and gloo for a codec with K-FAC"
    with pytest.raises(UnsupportedConfigurationError, match=expected):
        for step in range(4):
            backward(model, rank, step)


def test_kfac_with_a_codec_is_refused() -> None:
    run_ranks(refused, 2)


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
