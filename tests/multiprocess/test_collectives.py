"""The halves and the engine between real ranks: values, many buckets at once, and what a dead peer does."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._exchange.collectives import HostBuffer, NativeHalves, Ring
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.staging import Side, StagedBuffer
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
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


def check_native_halves(rank: int, world_size: int) -> None:
    halves = NativeHalves(group())
    for seed in range(ROUNDS):
        given = problem(seed, world_size, torch.float32, equal=seed % 2 == 0)
        tensor = given.of(rank)
        for half in (halves.reduce_scatter, halves.all_gather):
            for work in half(tensor, given.layout):
                work.wait()
        assert torch.equal(tensor.double(), given.total), f"native halves of {given}"


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


def check_engine(rank: int, world_size: int, *, staged: bool) -> None:
    """Several buckets at once, of all dtypes and layouts, some with an owner's step."""
    engine = Exchange(group(), chunk_bytes=1024)
    if staged:
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


def check_native_engine(rank: int, world_size: int) -> None:
    """The path of other backends, played by gloo's own collectives."""
    engine = Exchange(group())
    engine.routes.backends = {"cpu": "some-native-backend"}
    for seed in range(ROUNDS):
        given = problem(seed, world_size, torch.float64, equal=True)
        tensor = given.of(rank) * world_size
        step = double_in_place if seed % 3 == 0 else None
        result = engine.submit(FakeBucket(tensor), owner_step=step).wait()
        assert torch.equal(result, given.total * (2 if step else 1))
    engine.close()


def check_engine_beside_other_traffic(rank: int, world_size: int) -> None:
    """User messages and collectives on the same group, while buckets are in flight, stay apart."""
    engine = Exchange(group())
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for round_ in range(3):
        tensor = torch.full((200_000,), float(rank))
        future = engine.submit(FakeBucket(tensor))
        received = torch.empty(1000)
        works = [dist.isend(torch.full((1000,), 7.0 * rank), right, tag=tag) for tag in range(1)]
        dist.recv(received, left, tag=0)
        total = torch.tensor(1.0 + rank)
        dist.all_reduce(total)
        for work in works:
            assert work is not None
            work.wait()
        assert received.eq(7.0 * left).all(), f"round {round_}"
        assert total.item() == world_size * (world_size + 1) / 2
        assert future.wait().eq((world_size - 1) / 2).all()
    engine.close()


def check_two_engines_on_one_group(rank: int, world_size: int) -> None:
    first, second = Exchange(group()), Exchange(group())
    tensors = [torch.full((5000,), float(rank)) for _ in range(2)]
    futures = [
        engine.submit(FakeBucket(tensor)) for engine, tensor in zip((first, second), tensors, strict=True)
    ]
    for future in futures:
        assert future.wait().eq((world_size - 1) / 2).all()
    first.close()
    second.close()


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_all(rank: int, world_size: int) -> None:
    check_ring(rank, world_size)
    check_native_halves(rank, world_size)
    check_staged_ring(rank, world_size)
    check_engine(rank, world_size, staged=False)
    check_engine(rank, world_size, staged=True)
    check_native_engine(rank, world_size)
    if world_size > 1:
        check_engine_beside_other_traffic(rank, world_size)
        check_two_engines_on_one_group(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_halves_and_engine_are_exact(world_size: int) -> None:
    run_ranks(check_all, world_size)


def rounding_error(rank: int, world_size: int, dtype: torch.dtype) -> float:
    """Return the largest relative error against the mean in float64."""
    addends = [
        torch.randn(10_000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world_size)
    ]
    exact = torch.stack([addend.double() for addend in addends]).mean(0)
    engine = Exchange(group(), chunk_bytes=4096)
    result = engine.submit(FakeBucket(addends[rank].clone())).wait().double()
    engine.close()
    scale = torch.stack([addend.double().abs() for addend in addends]).mean(0)
    return float(((result - exact).abs() / scale).max())


def rounding_errors(rank: int, world_size: int) -> dict[str, float]:
    return {str(dtype): rounding_error(rank, world_size, dtype) for dtype in DTYPES}


@pytest.mark.parametrize("world_size", [2, 4])
def test_rounding_stays_within_one_unit_per_operation(world_size: int) -> None:
    for errors in run_ranks(rounding_errors, world_size):
        for dtype in DTYPES:
            # One rounding for the division and one for each addition.
            assert errors[str(dtype)] <= world_size * torch.finfo(dtype).eps, (dtype, errors)


def fail_in_the_middle(rank: int, world_size: int, event: str) -> tuple[str, float, float, str] | None:
    """Return the failure, how long it took, how long the next one took, and what that one said."""
    impatient = dist.new_group(timeout=timedelta(seconds=4))
    assert impatient is not None
    engine = Exchange(impatient)
    engine.submit(FakeBucket(torch.ones(100))).wait()
    if rank == 1 and event == "absent":
        dist.barrier()
        return None
    die: Callable[[torch.Tensor], None] = kill_this_process if rank == 1 else double_in_place
    begin_s = time.monotonic()
    futures = [
        engine.submit(FakeBucket(torch.ones(3_000_000), index=index, last=index == 2), owner_step=die)
        for index in range(3)
    ]
    text = failure_of(futures[-1])
    took_s = time.monotonic() - begin_s
    begin_s = time.monotonic()
    later = failure_of(engine.submit(FakeBucket(torch.ones(5), index=9)))
    later_s = time.monotonic() - begin_s
    if event == "absent":
        dist.barrier()
    engine.close()
    return text, took_s, later_s, later


def kill_this_process(part: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failure_of(future: torch.futures.Future[torch.Tensor]) -> str:
    with pytest.raises(ExchangeError) as caught:
        future.wait()
    assert caught.value.__cause__ is not None
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "event"), [(2, "killed"), (4, "killed"), (3, "absent")])
def test_a_lost_peer_fails_the_others_in_bounded_time(world_size: int, event: str) -> None:
    deaths = {1: signal.SIGKILL} if event == "killed" else {}
    results = run_ranks(fail_in_the_middle, world_size, args=(event,), deaths=deaths)
    for rank, result in enumerate(results):
        if rank == 1:
            continue
        text, took_s, later_s, later = result
        assert text.startswith(f"rank {rank} of {world_size}: the ")
        assert "of bucket" in text
        assert took_s < 4 + 3, text
        assert later == text
        assert later_s < 0.5


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
