"""The engine's halves on device buffers, with two ranks on one GPU over gloo, and on NCCL.

Copies are made slow on purpose, so that whatever is not ordered is seen. Where a test relies on that, it is
run once more with the order taken out, and must then find wrong values.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange as Journeys
from crossover_ddp._engine.links import Link
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.routes import Routes
from crossover_ddp._exchange.staging import CudaCopier, Side
from crossover_ddp._exchange.transfer import Sharded
from tests.gpu.kernels import sleep_s
from tests.harness import run_ranks
from tests.unit.exchange.fake_bucket import FakeBucket

pytestmark = pytest.mark.gpu

TIMEOUT_S = 120.0
SLOW_S = 0.05
NUMEL = 300_007  # several chunks, and a remainder
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "equal": Layout.equal,
    "uneven": lambda numel, parts: Layout.of_lengths([numel // 10, *[0] * (parts - 2), numel - numel // 10]),
    "one owner": lambda numel, parts: Layout.of_lengths([0] * (parts - 1) + [numel]),
}


def addend(rank: int, dtype: torch.dtype, *, shift: int = 0) -> torch.Tensor:
    """Small even numbers: with two or four ranks their means are exact in every dtype, whatever the order."""
    return ((torch.arange(NUMEL) * (rank + 3) + shift) % 16 * 2).to(dtype)


def mean(world_size: int, dtype: torch.dtype, *, shift: int = 0) -> torch.Tensor:
    addends = [addend(rank, torch.float64, shift=shift) for rank in range(world_size)]
    return (torch.stack(addends).sum(0) / world_size).to(dtype)


def forced_native() -> contextlib.AbstractContextManager[object]:
    """Let one rank, which has nothing to send, take the backend's own way all the same."""
    return mock.patch.object(Routes, "way", lambda routes, device: routes.native)


@contextlib.contextmanager
def engine_of_this_group() -> Iterator[Exchange]:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    assert dist.group.WORLD is not None
    engine = Exchange(dist.group.WORLD)
    sleep_s(0.0)  # measures the clock here, not later on a thread of the engine
    try:
        yield engine
    finally:
        torch.cuda.synchronize()
        engine.close()


def average_all(rank: int, world_size: int) -> list[str]:
    """Average every dtype in every layout, several buckets in flight; name those that came out wrong."""
    wrong = []
    with engine_of_this_group() as engine:
        for dtype in DTYPES:
            expected = mean(world_size, dtype)
            for name, cut in LAYOUTS.items():
                tensors = [addend(rank, dtype).cuda() for _ in range(3)]
                layout = cut(NUMEL, world_size)
                futures = [
                    engine.submit(FakeBucket(tensor, index=index, last=index == 2), layout=layout)  # type: ignore[arg-type]
                    for index, tensor in enumerate(tensors)
                ]
                for future, tensor in zip(futures, tensors, strict=True):
                    assert future.wait().data_ptr() == tensor.data_ptr()
                    if not torch.equal(tensor.cpu(), expected):
                        wrong.append(f"{dtype}, {name}")
    return wrong


def average_by_journeys(rank: int, world_size: int) -> list[str]:
    """Do the same by the links of journeys."""
    wrong, device = [], torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    assert dist.group.WORLD is not None
    exchange = Journeys.of(dist.group.WORLD)

    async def both_halves(flat: torch.Tensor, layout: Sequence[int], link: Link) -> None:
        own = await link.reduce_scatter(flat, layout)
        own.add_(0)  # reads what the half has brought
        await link.all_gather(flat, layout)

    for dtype in DTYPES:
        for name, cut in LAYOUTS.items():
            tensors = [addend(rank, dtype).to(device) for _ in range(3)]
            ways = [functools.partial(both_halves, each, cut(NUMEL, world_size).lengths) for each in tensors]
            for trip in [exchange.begin(way, device, "it") for way in ways]:
                trip.wait()
            if not all(torch.equal(each.cpu(), mean(world_size, dtype)) for each in tensors):
                wrong.append(f"{dtype}, {name}")
    return wrong


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("gloo", 2), ("gloo", 4), pytest.param("nccl", 2, marks=pytest.mark.gpu(count=2))],
)
def test_journeys_average_every_dtype_and_layout(backend: str, world_size: int) -> None:
    found = run_ranks(average_by_journeys, world_size, backend=backend, timeout_s=TIMEOUT_S)
    assert found == [[]] * world_size


def test_staged_halves_average_every_dtype_and_layout() -> None:
    assert run_ranks(average_all, 2, timeout_s=TIMEOUT_S) == [[], []]


def test_staged_halves_work_for_four_ranks() -> None:
    assert run_ranks(average_all, 4, timeout_s=TIMEOUT_S) == [[], [], [], []]


@pytest.mark.gpu(count=2)
def test_native_halves_average_every_dtype_and_layout() -> None:
    assert run_ranks(average_all, 2, backend="nccl", timeout_s=TIMEOUT_S) == [[], []]


# --- order on the device -------------------------------------------------------------------------------------


def slow_up(copier: CudaCopier, device: torch.Tensor, host: torch.Tensor) -> None:
    with torch.cuda.stream(copier.up_stream):
        if dist.get_rank() > 0:  # rank 0 may be far ahead
            sleep_s(SLOW_S)
        device.copy_(host, non_blocking=True)


@contextlib.contextmanager
def seeded(fault: str) -> Iterator[None]:
    """Make copies up slow, and take one of the orderings out."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(CudaCopier, "up", slow_up))
        if fault == "producer":
            patches.enter_context(mock.patch.object(CudaCopier, "begin", lambda copier: None))
        elif fault == "consumer":
            patches.enter_context(mock.patch.object(Side, "future", lambda side: torch.futures.Future()))
        elif fault == "pinned":
            patches.enter_context(mock.patch.object(CudaCopier, "take", careless_take))
        yield


@functools.cache
def careless_take(copier: CudaCopier, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, pin_memory=True)


def overwrite_at_once(rank: int, world_size: int, fault: str) -> list[int]:
    """A slow producer before the hook, and a consumer that takes the result and spoils the buffer at once."""
    wrong = []
    with seeded(fault), engine_of_this_group() as engine:
        buffer = torch.zeros(NUMEL, device="cuda")
        addends = [addend(rank, torch.float32, shift=step).cuda() for step in range(4)]
        results = []
        torch.cuda.synchronize()
        for values in addends:
            sleep_s(SLOW_S)
            buffer.copy_(values)
            future = engine.submit(FakeBucket(buffer))  # type: ignore[arg-type]
            results.append(future.wait().clone())
            buffer.fill_(-1.0)
        torch.cuda.synchronize()
        for step, result in enumerate(results):
            if not torch.equal(result.cpu(), mean(world_size, torch.float32, shift=step)):
                wrong.append(step)
    return wrong


def test_the_exchange_follows_a_slow_producer_and_precedes_an_eager_consumer() -> None:
    assert run_ranks(overwrite_at_once, 2, args=("",), timeout_s=TIMEOUT_S) == [[], []]


@pytest.mark.parametrize("fault", ["producer", "consumer"])
def test_without_the_order_of_streams_values_are_wrong(fault: str) -> None:
    wrong = run_ranks(overwrite_at_once, 2, args=(fault,), timeout_s=TIMEOUT_S)
    assert any(wrong), "the test above cannot fail: it proves nothing"


def reuse_pinned_memory(rank: int, world_size: int, fault: str) -> list[str]:
    """Begin each transfer while the copies up of the one before are under way; name those that came out wrong."""
    with seeded(fault), engine_of_this_group() as engine:
        shifts = (0, 5, 9)
        buckets = [addend(rank, torch.float32, shift=shift).cuda() for shift in shifts]
        spread = [addend(0, torch.float32, shift=shift if rank == 0 else 1).cuda() for shift in shifts]
        torch.cuda.synchronize()
        done = []
        for tensor in spread:  # nothing is copied down on rank 1: the network writes to its memory first
            done.append(engine.spread(Sharded(tensor, Layout.of_lengths([NUMEL, 0]))))
            while not done[-1].done():  # on the host; the compute stream does not wait
                pass
        for index, bucket in enumerate(buckets):
            done.append(engine.submit(FakeBucket(bucket, index=index, last=index == 2)))  # type: ignore[arg-type]
        for future in done:
            future.wait()
        found = {
            "buckets": [
                (each, mean(2, torch.float32, shift=n)) for each, n in zip(buckets, shifts, strict=True)
            ],
            "spread": [
                (each, addend(0, torch.float32, shift=n)) for each, n in zip(spread, shifts, strict=True)
            ],
        }
        return [
            name
            for name, pairs in found.items()
            if not all(torch.equal(got.cpu(), wanted) for got, wanted in pairs)
        ]


@pytest.mark.defect("strangers-15")
def test_pinned_memory_is_not_written_before_it_has_been_read() -> None:
    assert run_ranks(reuse_pinned_memory, 2, args=("",), timeout_s=TIMEOUT_S) == [[], []]


def test_without_that_order_values_are_wrong() -> None:
    found = run_ranks(reuse_pinned_memory, 2, args=("pinned",), timeout_s=TIMEOUT_S)
    assert any(found), "the test above cannot fail: it proves nothing"


def pinned_bytes(rank: int, world_size: int) -> int:
    """Return what stays pinned when DDP's first bucket, the whole model, was followed by small ones."""
    with engine_of_this_group() as engine:
        torch._C._host_emptyCache()
        before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        for numel in (NUMEL, 1000, 1000):
            engine.submit(FakeBucket(torch.zeros(numel, device="cuda"))).wait()  # type: ignore[arg-type]
        torch.cuda.synchronize()
        return torch.cuda.host_memory_stats()["allocated_bytes.current"] - before


@pytest.mark.defect("strangers-15")
def test_pinned_memory_of_the_first_iteration_is_given_back() -> None:
    assert max(run_ranks(pinned_bytes, 2, timeout_s=TIMEOUT_S)) < 4 * NUMEL


def native_alone(rank: int, world_size: int, fault: str) -> list[int]:
    """Take the native way with one rank, which normally has nothing to send: NCCL's streams without a peer."""
    wrong = []
    with contextlib.ExitStack() as patches:
        patches.enter_context(forced_native())
        if fault == "producer":
            patches.enter_context(mock.patch.object(Side, "follow_compute", lambda side: None))
        elif fault == "consumer":
            patches.enter_context(mock.patch.object(Side, "future", lambda side: torch.futures.Future()))
        engine = patches.enter_context(engine_of_this_group())
        buffer = torch.zeros(NUMEL, device="cuda")
        addends = [addend(rank, torch.float32, shift=step).cuda() for step in range(4)]
        results = []
        torch.cuda.synchronize()
        for values in addends:
            sleep_s(3 * SLOW_S)  # the owner's step must be over long before, if it does not wait
            buffer.copy_(values)
            future = engine.submit(FakeBucket(buffer), owner_step=slow_quadruple)  # type: ignore[arg-type]
            results.append(future.wait().clone())
            buffer.fill_(-1.0)
        torch.cuda.synchronize()
        assert engine.engine._failure is None
        for values, result, step in zip(addends, results, range(4), strict=True):
            if not torch.equal(result, 4 * values):
                wrong.append(step)
    return wrong


def slow_quadruple(part: torch.Tensor) -> None:
    sleep_s(SLOW_S)
    part.mul_(4)


def test_the_native_way_follows_a_slow_producer_and_precedes_an_eager_consumer() -> None:
    assert run_ranks(native_alone, 1, args=("",), backend="nccl", timeout_s=TIMEOUT_S) == [[]]


@pytest.mark.parametrize("fault", ["producer", "consumer"])
def test_without_the_order_of_streams_the_native_way_is_wrong(fault: str) -> None:
    [wrong] = run_ranks(native_alone, 1, args=(fault,), backend="nccl", timeout_s=TIMEOUT_S)
    assert wrong, "the test above cannot fail: it proves nothing"
