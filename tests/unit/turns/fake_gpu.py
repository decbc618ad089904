"""A GPU that runs behind the host's back, for several processes: nothing on it happens before a test says so.

Streams are queues of operations. Events and the words of stream memory operations have the meaning that CUDA gives
them: a wait covers the last record at the moment of the call, a record happens when its stream comes to it, and
the queues of a killed process are lost. The processes are threads' roles in one Python process.
"""

import contextlib
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from crossover_ddp._system import cuda_driver as driver_module
from crossover_ddp._system import device as device_module
from crossover_ddp._system.cuda_driver import CAN_USE_64_BIT_STREAM_MEM_OPS, IPC_EVENT_SUPPORTED
from crossover_ddp._turns import (
    device_order as device_order_module,
)
from crossover_ddp._turns import (
    event_order as event_order_module,
)
from crossover_ddp._turns import (
    semaphore_order as semaphore_order_module,
)
from crossover_ddp._turns.slots import EVENT_HANDLE_BYTES
from crossover_ddp.gpu_mutex import GPUMutex
from tests.unit.turns.mutexes import membership_of

GPU = torch.device("cuda", 0)
SOON_S = 60.0


class Record:
    """What one call of ``record`` stands for."""

    def __init__(self, owner: "FakeProcess") -> None:
        self.owner = owner
        self.done = threading.Event()


class Operation(NamedTuple):
    """The head of a stream is tried until ``run`` says that it is over."""

    what: str
    run: Callable[[], bool]


class Kernel:
    """Compute of one turn, or of none (0); begins and ends in two steps of the device."""

    def __init__(self, gpu: "FakeGpu", owner: "FakeProcess", turn: int) -> None:
        self.gpu, self.owner, self.turn = gpu, owner, turn
        self.begun = self.ended = False

    def run(self) -> bool:
        if not self.begun:
            self.begun = True
            self.gpu.note_begin(self)
            return False
        self.ended = True
        return True


class FakeProcess:
    """One process's view of the device.

    Args:
        gpu: the device.
        name_space: event handles resolve only within one, as those of processes that share /dev/shm.
    """

    def __init__(self, gpu: "FakeGpu", name_space: str = "host") -> None:
        self.gpu, self.name_space = gpu, name_space
        self.streams: list[FakeStream] = []
        self.current = FakeStream(self)
        self.capturing = False
        self.alive = True
        self.mutex: GPUMutex | None = None

    def join(self, group: str, **arguments: Any) -> GPUMutex:
        with self.gpu.role(self):
            self.mutex = GPUMutex(group, device=GPU, lease=SOON_S, **arguments)
        return self.mutex

    def take_turn(self, kernels: int = 1) -> list[Kernel]:
        """Acquire, launch, release: everything a host does, at once."""
        assert self.mutex is not None
        with self.gpu.role(self):
            self.mutex.acquire()
            launched = [self.launch(self.mutex.stats()["turn"]) for _ in range(kernels)]
            self.mutex.release()
        return launched

    def launch(self, turn: int = 0, stream: "FakeStream | None" = None) -> Kernel:
        kernel = Kernel(self.gpu, self, turn)
        self.gpu.kernels.append(kernel)
        (stream or self.current).queue.append(Operation("kernel", kernel.run))
        return kernel

    def kill(self) -> None:
        """End without a word: the kernel closes its files, the driver drops its queues."""
        assert self.mutex is not None
        self.alive = False
        for stream in self.streams:
            stream.queue.clear()
        membership = membership_of(self.mutex)
        segment, order = membership.segment, membership.order
        self.mutex._finalizer.detach()
        self.mutex._turns = None
        segment.forget()
        if isinstance(order, event_order_module.EventOrder | semaphore_order_module.SemaphoreOrder):
            order._watch._waits.clear()
            order._watch.close()
        if isinstance(order, device_order_module.GpuOrder):
            order._publisher.stop()
            order._publisher.join(SOON_S)


class FakeStream:
    """Stands for ``torch.cuda.Stream``."""

    numbers = itertools.count(1)

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner if isinstance(owner, FakeProcess) else FakeGpu.instance.process
        self.cuda_stream = next(FakeStream.numbers)
        self.queue: deque[Operation] = deque()
        self.owner.streams.append(self)
        self.owner.gpu.streams[self.cuda_stream] = self

    def wait_event(self, event: "FakeEvent") -> None:
        record = event.cell[0]
        if record is not None:
            self.queue.append(Operation("wait", record.done.is_set))

    def wait_stream(self, other: "FakeStream") -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)


class FakeEvent:
    """Stands for ``torch.cuda.Event``."""

    def __init__(
        self, *, interprocess: bool = False, enable_timing: bool = False, blocking: bool = False
    ) -> None:
        assert not (interprocess and enable_timing), "CUDA refuses such an event"
        self.interprocess = interprocess
        self.cell: list[Record | None] = [None]

    def record(self, stream: FakeStream | None = None) -> None:
        owner = FakeGpu.instance.process if stream is None else stream.owner
        record = self.cell[0] = Record(owner)
        target = owner.current if stream is None else stream

        def happen() -> bool:
            record.done.set()
            return True

        target.queue.append(Operation("record", happen))

    def query(self) -> bool:
        return self.cell[0] is None or self.cell[0].done.is_set()

    def synchronize(self) -> None:
        record = self.cell[0]
        deadline_s = time.monotonic() + SOON_S
        while record is not None and not record.done.wait(0.005):
            if not record.owner.alive:
                raise SystemExit  # the thread of a killed process
            assert time.monotonic() < deadline_s, "the device never came to a record"

    def ipc_handle(self) -> bytes:
        gpu = FakeGpu.instance
        if not gpu.ipc_works:
            raise RuntimeError("CUDA error: operation not supported")
        handle = f"{gpu.process.name_space}:{next(gpu.handle_numbers)}".encode().ljust(
            EVENT_HANDLE_BYTES, b"\0"
        )
        gpu.exported[handle] = self
        return handle

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> "FakeEvent":
        gpu = FakeGpu.instance
        name_space = handle.partition(b":")[0].decode()
        gpu.opened.append(handle)
        if name_space != gpu.process.name_space:
            raise RuntimeError("CUDA error: invalid resource handle")
        imported = cls(interprocess=True)
        imported.cell = gpu.exported[handle].cell
        return imported


class FakeDriver:
    """Stands for `CudaDriver`: addresses on the device are the host's."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.registered: set[int] = set()

    def attribute(self, index: int, attribute: int) -> int:
        works = {IPC_EVENT_SUPPORTED: self.gpu.ipc_works, CAN_USE_64_BIT_STREAM_MEM_OPS: self.gpu.words_work}
        return int(works[attribute])

    def name(self, index: int) -> str:
        return f"GPU-{self.gpu.uuid}"

    def ignore_other_threads_captures(self) -> None: ...

    def register(self, address: int, size_bytes: int) -> int:
        assert address % size_bytes == 0
        self.registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def write(self, stream: int, address: int, value: int) -> None:
        def happen() -> bool:
            assert address in self.registered, "the device writes to memory that was given up"
            ctypes.c_uint64.from_address(address).value = value
            return True

        self.gpu.streams[stream].queue.append(Operation("write", happen))

    def wait(self, stream: int, address: int, value: int) -> None:
        def is_over() -> bool:
            assert address in self.registered, "the device reads memory that was given up"
            return ctypes.c_int64.from_address(address).value - value >= 0

        self.gpu.streams[stream].queue.append(Operation("wait", is_over))


class FakeGpu:
    """The device; the last one made is the one that ``torch.cuda`` shows."""

    instance: "FakeGpu"

    def __init__(self, uuid: str) -> None:
        FakeGpu.instance = self
        self.uuid = uuid
        self.ipc_works = self.words_work = True
        self.driver = FakeDriver(self)
        self.streams: dict[int, FakeStream] = {}
        self.exported: dict[bytes, FakeEvent] = {}
        self.opened: list[bytes] = []
        self.handle_numbers = itertools.count()
        self.kernels: list[Kernel] = []
        self.violations: list[str] = []
        self._roles = threading.local()
        self._others = FakeProcess(self)

    @property
    def process(self) -> FakeProcess:
        """Whose code runs on the calling thread."""
        return getattr(self._roles, "process", self._others)

    @contextlib.contextmanager
    def role(self, process: FakeProcess) -> Iterator[None]:
        former = self.process
        self._roles.process = process
        try:
            yield
        finally:
            self._roles.process = former

    def note_begin(self, kernel: Kernel) -> None:
        """A kernel of a turn begins: those of all other jobs' former turns must have ended."""
        self.violations += [
            f"turn {kernel.turn} began before turn {other.turn} ended"
            for other in self.kernels
            if other.owner is not kernel.owner
            and other.owner.alive
            and 0 < other.turn < kernel.turn
            and not other.ended
        ]

    def step(self, stream: FakeStream) -> bool:
        """Let a stream come to the end of its next operation, if it can; tell whether anything happened."""
        if not stream.queue:
            return False
        what, run = stream.queue[0]
        if run():
            stream.queue.popleft()
            return True
        return what == "kernel"

    def run(self, process: FakeProcess | None = None) -> None:
        """Let the device do all it can, of one process or of all."""
        wanted = [s for s in list(self.streams.values()) if process is None or s.owner is process]
        while any([self.step(stream) for stream in wanted]):
            pass

    def stuck(self, process: FakeProcess) -> bool:
        """Whether the process's streams wait, now that the device has done all it can."""
        self.run()
        return any(stream.queue for stream in process.streams)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, group: str) -> Iterator[FakeGpu]:
    """Put a `FakeGpu` in the place of torch's; its processes are closed at the end."""
    yield from install(monkeypatch, group)


def install(monkeypatch: pytest.MonkeyPatch, uuid: str) -> Iterator[FakeGpu]:
    gpu = FakeGpu(uuid)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda, "Stream", FakeStream)
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "set_device", lambda device: None)
    monkeypatch.setattr(cuda, "current_stream", lambda device=None: gpu.process.current)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: gpu.process.capturing)
    for module in (driver_module, device_module, event_order_module, semaphore_order_module):
        monkeypatch.setattr(module, "cuda_driver", lambda: gpu.driver)
    # The fake processes are one, whose own events would not be opened but used as they are.
    monkeypatch.setattr(
        event_order_module.Pools,
        "take",
        lambda self, device, count: event_order_module._new_pool(device, count),
    )
    monkeypatch.setattr(event_order_module.Pools, "own", lambda self, handles: None)
    try:
        yield gpu
    finally:
        _close(gpu)


def _close(gpu: FakeGpu) -> None:
    gpu.run()
    for process in {id(stream.owner): stream.owner for stream in gpu.streams.values()}.values():
        if process.mutex is not None and process.alive:
            with gpu.role(process):
                process.mutex.close()
