"""The device keeps the orders that CUDA promises, and only these: what a program forgets shows."""

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

from tests.harness.waiting import eventually

from . import late
from .gate import held

pytestmark = pytest.mark.fake_cuda


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def here() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


@pytest.mark.parametrize(
    "order, seen", [(lambda _: None, 0.0), (lambda side: here().wait_stream(side), 1.0)]
)
def test_a_stream_runs_beside_others_and_follows_when_told(
    side: torch.cuda.Stream, order: Callable[[torch.cuda.Stream], None], seen: float
) -> None:
    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with held(side) as gate:
        with torch.cuda.stream(side):
            number.fill_(1.0)
        order(side)
        read = number.clone()
        if not seen:
            here().synchronize()
        gate.open()
    assert read.item() == seen


def test_an_event_holds_what_came_before_it_was_recorded(side: torch.cuda.Stream) -> None:
    event = side.record_event()
    with held(side):
        here().wait_event(event)
        here().synchronize()
        event.synchronize()
        assert event.query()
        event.record(side)
        assert not event.query()
    assert event.query()


def test_a_stream_waits_for_what_the_event_held_when_it_was_told(side: torch.cuda.Stream) -> None:
    event = side.record_event()
    with held(here()) as gate:
        here().wait_event(event)
        with held(side):
            event.record(side)
            gate.open()
            assert eventually(here().query, 20)


def test_a_result_whose_shape_the_host_computes_comes_in_stream_order_too() -> None:
    """Another thread's kernels on that stream, in memory that is free again for whoever launches after them."""
    numel, stream, ended = 20_000, here(), threading.Event()
    ones, expected = torch.ones(numel, device="cuda"), torch.arange(numel)

    def launch() -> None:
        with torch.cuda.stream(stream):
            while not ended.wait(1e-4):
                torch.full((numel,), 7, device="cuda")

    beside = threading.Thread(target=launch)
    beside.start()
    try:
        with late(kernel_us=100):
            found = [torch.nonzero(ones).view(-1).cpu() for _ in range(100)]
    finally:
        ended.set()
        beside.join()
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_memory_is_read_when_it_is_copied_and_other_memory_at_once(
    side: torch.cuda.Stream, pinned: bool
) -> None:
    host = torch.ones(1000, pin_memory=pinned)
    on_device = torch.empty(1000, device="cuda")
    with held(side) if pinned else contextlib.nullcontext(), torch.cuda.stream(side):
        on_device.copy_(host, non_blocking=True)
        host.fill_(2.0)
    assert on_device[0].item() == (2.0 if pinned else 1.0)


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda: torch.cuda._compile_kernel("void k() {}", "k"), "CUDA error"),
        (lambda: ones() + torch.ones(3), "one on the CPU"),
        (lambda: ones() + ones("cuda:1"), "all tensors on one device"),
        (lambda: torch.cuda.set_device(2), "cudaErrorInvalidDevice|invalid device"),
        (
            lambda: torch.cuda.Event(interprocess=True).record(),
            "cudaErrorNotSupported|not supported",
        ),
    ],
)
def test_what_cannot_be_computed_right_raises(wrong: Callable[[], object], text: str) -> None:
    with pytest.raises(Exception, match=text):
        wrong()


def ones(device: str = "cuda") -> torch.Tensor:
    return torch.ones(3, device=device)


@pytest.mark.parametrize(
    "illegal, text",
    [
        (lambda number, other: number.item(), "cudaErrorStreamCapture"),
        (lambda number, other: leave_behind(number, other), "cudaErrorStreamCaptureUnjoined"),
        (lambda number, other: torch.rand(2, device="cuda"), "does not cover random numbers"),
    ],
)
def test_what_may_not_be_captured_raises(
    illegal: Callable[[torch.Tensor, torch.cuda.Stream], object], text: str, side: torch.cuda.Stream
) -> None:
    number = torch.ones(1, device="cuda")
    with pytest.raises(Exception, match=text), torch.cuda.graph(torch.cuda.CUDAGraph()):
        illegal(number, side)
    torch.cuda.synchronize()
    assert (number + 1).item() == 2.0


def leave_behind(number: torch.Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(here())
    with torch.cuda.stream(side):
        number.add_(1)
