import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._exchange.collectives import HostBuffer, NativeHalves, Ring, chunk_numel
from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._exchange.staging import StagedBuffer
from tests.unit.exchange.late_copier import LateCopier


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=9), st.sampled_from([2, 4, 8]))
def test_chunks_are_bounded(lengths: list[int], itemsize: int) -> None:
    size_bytes = chunk_numel(Layout.of_lengths(lengths), itemsize) * itemsize
    assert 64 * 1024 <= size_bytes <= 4 * 1024 * 1024


def test_alone_a_ring_offers_the_whole_buffer(process_group: dist.ProcessGroup) -> None:
    ring = Ring.over(process_group)
    buffer = HostBuffer(torch.arange(5.0))
    seen: list[Span] = []
    scatter = ring.reduce_scatter(buffer, Layout.equal(5, 1), 0, seen.append)
    scatter.start()
    scatter.wait()
    scatter.drain()
    assert seen == [Span(0, 5)]
    gather = ring.all_gather(buffer, Layout.equal(5, 1), 0)
    gather.start()
    gather.offer_all()
    gather.wait()
    gather.drain()
    assert torch.equal(buffer.tensor, torch.arange(5.0))


@pytest.mark.parametrize("layout", [Layout.equal(6, 1), Layout.equal(5, 2)])
def test_a_layout_that_does_not_fit_is_refused(process_group: dist.ProcessGroup, layout: Layout) -> None:
    buffer = HostBuffer(torch.zeros(5))
    with pytest.raises(ValueError, match="expected a layout of 1 parts and 5 elements"):
        Ring.over(process_group).all_gather(buffer, layout, 0)


@pytest.mark.parametrize("numel", [0, 1, 5])
def test_native_halves_alone_change_nothing(process_group: dist.ProcessGroup, numel: int) -> None:
    tensor = torch.arange(float(numel))
    halves = NativeHalves(process_group)
    for half in (halves.reduce_scatter, halves.all_gather):
        for work in half(tensor, Layout.equal(numel, 1)):
            work.wait()
    assert torch.equal(tensor, torch.arange(float(numel)))


def test_a_staged_buffer_is_read_only_after_its_copy_and_copied_back_only_where_it_landed() -> None:
    device = torch.arange(6.0)
    copier = LateCopier()
    layout = Layout.of_lengths([2, 3, 1])
    buffer = StagedBuffer(device, layout, rank=1, copier=copier)
    assert buffer.tensor.isnan().all()
    for rank in range(3):
        buffer.ready(layout.part(rank))
        assert torch.equal(buffer.piece(layout.part(rank)), device[slice(*layout.part(rank))])
    buffer.tensor.add_(10)
    buffer.landed(Span(1, 4))
    buffer.release()
    copier.finish()
    assert device.tolist() == [0, 11, 12, 13, 4, 5]


@pytest.mark.defect("strangers-15")
def test_memory_of_a_gather_is_not_written_before_the_last_one_has_been_copied_from_it() -> None:
    copier, layout = LateCopier(), Layout.equal(4, 2)
    devices = [torch.zeros(4) for _ in range(3)]
    for number, device in enumerate(devices):
        buffer = StagedBuffer(device, layout, rank=0, copier=copier, own_only=True)
        buffer.ready(layout.part(0))
        buffer.tensor.fill_(number)  # the ring receives
        buffer.landed(Span(0, 4))
        buffer.release()
        if number == 1:
            copier.finish()
    copier.finish()
    assert [device.unique().tolist() for device in devices] == [[0], [1], [2]]
    assert len(copier._pool) == 2, "memory of a gather that is over was not lent again"


def test_a_staged_owner_step_runs_on_the_device_between_the_copies() -> None:
    device = torch.arange(4.0)
    copier = LateCopier()
    layout = Layout.equal(4, 2)
    buffer = StagedBuffer(device, layout, rank=0, copier=copier)
    own = layout.part(0)
    buffer.ready(own)
    buffer.piece(own).mul_(10)
    on_device: list[bool] = []

    def step(part: torch.Tensor) -> None:
        on_device.append(part.data_ptr() == device.data_ptr())
        part.add_(1)

    buffer.step(own, step)
    assert on_device == [True]
    assert buffer.piece(own).tolist() == [1, 11]


def test_parts_are_fetched_in_the_order_in_which_a_ring_needs_them() -> None:
    copier = LateCopier()
    layout = Layout.equal(4, 4)
    StagedBuffer(torch.arange(4.0), layout, rank=2, copier=copier)
    assert [device.item() for device in copier.downs] == [1, 0, 3, 2]
