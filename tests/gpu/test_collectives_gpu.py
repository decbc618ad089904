"""The links of journeys on device buffers, with two ranks on one GPU over gloo, and on NCCL."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine.device import Device, Native
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Link, equal_lengths
from tests.harness import run_ranks

pytestmark = pytest.mark.gpu

TIMEOUT_S = 120.0
NUMEL = 300_007  # several pieces, and a remainder
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "equal": equal_lengths,
    "uneven": lambda numel, parts: (numel // 10, *[0] * (parts - 2), numel - numel // 10),
    "one owner": lambda numel, parts: (*[0] * (parts - 1), numel),
}


def addend(rank: int, dtype: torch.dtype, *, shift: int = 0) -> torch.Tensor:
    """Small even numbers: with two ranks their means are exact in every dtype, whatever the order."""
    return ((torch.arange(NUMEL) * (rank + 3) + shift) % 16 * 2).to(dtype)


def mean(world_size: int, dtype: torch.dtype, *, shift: int = 0) -> torch.Tensor:
    addends = [addend(rank, torch.float64, shift=shift) for rank in range(world_size)]
    return (torch.stack(addends).sum(0) / world_size).to(dtype)


def forced_native() -> contextlib.AbstractContextManager[object]:
    """Let one rank, which has nothing to send, take the backend's own collectives all the same."""

    def made(exchange: Exchange, group: dist.ProcessGroup, device: torch.device) -> Native:
        return Native(group, Device(device, by_host=False))

    return mock.patch.object(Exchange, "_made", made)


def exchange_here() -> tuple[Exchange, torch.device]:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    assert dist.group.WORLD is not None
    return Exchange.of(dist.group.WORLD), device


async def both_halves(flat: torch.Tensor, layout: Sequence[int], link: Link) -> None:
    own = await link.reduce_scatter(flat, layout)
    own.add_(0)  # reads what the half has brought
    await link.all_gather(flat, layout)


def average(rank: int, world_size: int) -> list[str]:
    """Average every dtype in every layout, several at a time; name those that came out wrong."""
    wrong, (exchange, device) = [], exchange_here()
    for dtype in DTYPES:
        for name, cut in LAYOUTS.items():
            tensors = [addend(rank, dtype).to(device) for _ in range(3)]
            ways = [functools.partial(both_halves, each, cut(NUMEL, world_size)) for each in tensors]
            for trip in [exchange.begin(way, device, "it") for way in ways]:
                trip.wait()
            if not all(torch.equal(each.cpu(), mean(world_size, dtype)) for each in tensors):
                wrong.append(f"{dtype}, {name}")
    return wrong


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("gloo", 2), pytest.param("nccl", 2, marks=pytest.mark.gpu(count=2))],
)
def test_journeys_average_every_dtype_and_layout(backend: str, world_size: int) -> None:
    found = run_ranks(average, world_size, backend=backend, timeout_s=TIMEOUT_S)
    assert found == [[]] * world_size


# --- pinned memory -------------------------------------------------------------------------------------------


def pinned_bytes(rank: int, world_size: int) -> int:
    """Return what stays pinned when a large tensor, as is DDP's first bucket, was followed by small ones."""
    exchange, device = exchange_here()
    torch._C._host_emptyCache()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for numel in (NUMEL, 1000, 1000):
        flat = torch.zeros(numel, device=device)
        exchange.begin(functools.partial(both_halves, flat, exchange.equal_layout(flat)), device, "it").wait()
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    return torch.cuda.host_memory_stats()["allocated_bytes.current"] - before


@pytest.mark.defect("strangers-15")
def test_pinned_memory_of_the_first_iteration_is_given_back() -> None:
    assert max(run_ranks(pinned_bytes, 2, timeout_s=TIMEOUT_S)) < 4 * NUMEL
