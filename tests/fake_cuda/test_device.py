"""The device keeps the orders that CUDA guarantees and no others, so that missing waits show."""

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
def test_a_stream_runs_beside_others_unless_one_waits_for_it(
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


def test_an_event_waits_for_the_work_before_its_recording_only(side: torch.cuda.Stream) -> None:
    event = side.record_event()
    with held(side):
        here().wait_event(event)
        here().synchronize()
        event.synchronize()
        assert event.query()
        event.record(side)
        assert not event.query()
    assert event.query()


def test_a_stream_waits_for_the_recording_that_the_event_had_at_the_call(
    side: torch.cuda.Stream,
) -> None:
    event = side.record_event()
    with held(here()) as gate:
        here().wait_event(event)
        with held(side):
            event.record(side)
            gate.open()
            assert eventually(here().query, 20)


def test_a_result_with_a_shape_computed_on_the_host_is_written_in_stream_order() -> None:
    """Kernels of another thread on the same stream have used the memory of the result before."""
    numel = 20_000
    stream = here()
    ended = threading.Event()
    ones = torch.ones(numel, device="cuda")
    expected = torch.arange(numel)

    def launch() -> None:
        with torch.cuda.stream(stream):
            while not ended.wait(1e-4):
                torch.full((numel,), 7, device="cuda")

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        with late(kernel_us=100):
            found = [torch.nonzero(ones).view(-1).cpu() for _ in range(100)]
    finally:
        ended.set()
        thread.join()
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_reads_pinned_memory_in_stream_order_and_other_memory_before_it_returns(
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
def test_operations_that_the_device_does_not_cover_raise(
    wrong: Callable[[], object], text: str
) -> None:
    with pytest.raises(Exception, match=text):
        wrong()


def ones(device: str = "cuda") -> torch.Tensor:
    return torch.ones(3, device=device)


@pytest.mark.parametrize(
    "illegal, text",
    [
        (lambda number, other: number.item(), "cudaErrorStreamCapture"),
        (lambda number, other: leave_unjoined(number, other), "cudaErrorStreamCaptureUnjoined"),
        (lambda number, other: torch.rand(2, device="cuda"), "does not cover random numbers"),
    ],
)
def test_operations_that_are_illegal_in_a_capture_raise(
    illegal: Callable[[torch.Tensor, torch.cuda.Stream], object], text: str, side: torch.cuda.Stream
) -> None:
    number = torch.ones(1, device="cuda")
    with pytest.raises(Exception, match=text), torch.cuda.graph(torch.cuda.CUDAGraph()):
        illegal(number, side)
    torch.cuda.synchronize()
    assert (number + 1).item() == 2.0


def leave_unjoined(number: torch.Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(here())
    with torch.cuda.stream(side):
        number.add_(1)
