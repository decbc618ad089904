"""The halves between real ranks, staged and not, on random layouts; and the groups a hook may be registered with."""

import contextlib
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._exchange.collectives import HostBuffer, Ring
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.staging import Side, StagedBuffer
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.unit.exchange.fake_bucket import FakeBucket
from tests.unit.exchange.late_copier import LateCopier

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Small integers: every sum is exact in every dtype, in any order of additions.
EXACT = range(-4, 5)
ROUNDS = 12


class Problem(NamedTuple):
    """One random buffer per rank, and how it is cut; the same on all ranks."""

    addends: list[torch.Tensor]
    layout: Layout
    chunk_bytes: int

    @property
    def total(self) -> torch.Tensor:
        return torch.stack([addend.double() for addend in self.addends]).sum(0)

    def of(self, rank: int) -> torch.Tensor:
        return self.addends[rank].clone()


def problem(seed: int, world_size: int, dtype: torch.dtype, *, equal: bool) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [draw(0, 700) * draw(0, 2) for _ in range(world_size)]
    layout = Layout.equal(draw(0, 3000), world_size) if equal else Layout.of_lengths(lengths)
    addends = [
        torch.randint(EXACT.start, EXACT.stop, (layout.numel,), generator=generator).to(dtype)
        for _ in range(world_size)
    ]
    return Problem(addends, layout, draw(8, 2000))


def reduce_on_ring(ring: Ring, buffer: HostBuffer, layout: Layout, sequence: int) -> None:
    scatter = ring.reduce_scatter(buffer, layout, sequence)
    scatter.start()
    scatter.wait()
    scatter.drain()


def gather_on_ring(ring: Ring, buffer: HostBuffer, layout: Layout, sequence: int) -> None:
    gather = ring.all_gather(buffer, layout, sequence)
    gather.start()
    gather.offer_all()
    gather.wait()
    gather.drain()


def check_ring(rank: int, world_size: int) -> None:
    for seed in range(ROUNDS):
        for dtype in DTYPES:
            given = problem(seed, world_size, dtype, equal=seed % 2 == 0)
            ring = Ring.over(group(), chunk_bytes=given.chunk_bytes, window=1 + seed % 3)
            tensor = given.of(rank)
            reduce_on_ring(ring, HostBuffer(tensor), given.layout, seed)
            own = slice(*given.layout.part(rank))
            assert torch.equal(tensor[own].double(), given.total[own]), f"reduce-scatter of {given}"
            gather_on_ring(ring, HostBuffer(tensor), given.layout, seed)
            assert torch.equal(tensor.double(), given.total), f"all-gather of {given}"


def check_staged_ring(rank: int, world_size: int) -> None:
    for seed in range(ROUNDS):
        given = problem(seed, world_size, torch.float32, equal=seed % 2 == 0)
        ring = Ring.over(group(), chunk_bytes=given.chunk_bytes)
        copier = LateCopier()
        device = given.of(rank)
        buffer = StagedBuffer(device, given.layout, rank, copier)
        reduce_on_ring(ring, buffer, given.layout, seed)
        gather_on_ring(ring, buffer, given.layout, seed)
        buffer.release()
        copier.finish()
        assert torch.equal(device.double(), given.total), f"staged ring of {given}"


class FakeSide(Side):
    """A device whose copies come late, on a machine without one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late = LateCopier()
        self.copier = self.late  # type: ignore[assignment]

    def current(self) -> contextlib.AbstractContextManager[object]:
        self.late.finish()  # what a stream's order would see to
        return contextlib.nullcontext()

    def follow_compute(self) -> None:
        pass

    def adopt_thread(self) -> None:
        pass

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()


def check_engine(rank: int, world_size: int) -> None:
    """Several buckets at once, of all dtypes and layouts, some with an owner's step."""
    engine = Exchange(group(), chunk_bytes=1024)
    engine.routes.sides[torch.device("cpu")] = FakeSide()
    waiting = []
    for seed in range(ROUNDS):
        given = problem(100 + seed, world_size, DTYPES[seed % 4], equal=seed % 2 == 0)
        # Multiples of the world size, so that dividing before the sum is exact as well.
        tensor = given.of(rank) * world_size
        bucket = FakeBucket(tensor, index=seed, last=seed == ROUNDS - 1)
        step = double_in_place if seed % 3 == 0 else None
        future = engine.submit(bucket, owner_step=step, layout=given.layout)
        waiting.append((future, given.total * (2 if step else 1), tensor))
    for future, expected, tensor in reversed(waiting):
        result = future.wait()
        assert result.data_ptr() == tensor.data_ptr()
        assert torch.equal(result.double(), expected)
    engine.close()


def double_in_place(part: torch.Tensor) -> None:
    part.mul_(2)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_all(rank: int, world_size: int) -> None:
    check_ring(rank, world_size)
    check_staged_ring(rank, world_size)
    check_engine(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_halves_and_engine_are_exact(world_size: int) -> None:
    run_ranks(check_all, world_size)


def hook_on_another_group(rank: int, world_size: int) -> str:
    """Register the hook with a group of some of the ranks only."""
    half = dist.new_group([0, 1])
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(half, reduce_scatter_all_gather_hook)
    with pytest.raises(UnsupportedConfigurationError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_a_hook_on_a_group_of_other_ranks_is_refused_everywhere() -> None:
    first, second, outside = run_ranks(hook_on_another_group, 3)
    assert first == second
    assert "of ranks [0, 1, 2], got a process_group of ranks [0, 1]" in first
    assert "expected a process group that this process belongs to" in outside


def hook_on_a_twin_group(rank: int, world_size: int) -> bool:
    """A group of the same ranks is as good as the model's own, in whatever order it names them."""
    twin = dist.new_group([1, 0])
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    model.register_comm_hook(twin, reduce_scatter_all_gather_hook)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert isinstance(model.module.weight, torch.Tensor)
    return bool(model.module.weight.grad.eq(0.5).all()) if model.module.weight.grad is not None else False


def test_a_hook_on_a_twin_group_is_right() -> None:
    assert run_ranks(hook_on_a_twin_group, 2) == [True, True]
