"""Orders that the fake device would no longer keep: its own tests must notice. Each builds the device anew."""

from typing import Final

from tests.seeded.fault import Fault

_STREAMS = "tests/fake_cuda/device/streams.cpp"
_RUNTIME = "tests/fake_cuda/device/runtime.cpp"
_NCCL = "tests/fake_cuda/device/nccl.cpp"
_OWN = ("tests/fake_cuda/test_device.py",)
_COLLECTIVES = ("tests/fake_cuda/test_nccl.py",)

DEVICE: Final = (
    Fault(
        "a stream does not wait for an event",
        _STREAMS,
        "    if (Task task = waiting(event)) stream->put(task);\n",
        "    waiting(event);\n",
        _OWN,
    ),
    Fault(
        "a stream waits for what an event holds when it comes to it",
        _STREAMS,
        "    return [last] { last->wait(); };\n",
        "    return [event] { last_of(event)->wait(); };\n",
        _OWN,
    ),
    Fault(
        "an event happens when it is recorded, not behind what its stream has",
        _STREAMS,
        "    stream->put(recording(event));\n    return cudaSuccess;\n}\nAPI cudaError_t cudaEventRecord(",
        "    recording(event)();\n    return cudaSuccess;\n}\nAPI cudaError_t cudaEventRecord(",
        _OWN,
    ),
    Fault(
        "another process's event is there at once",
        _STREAMS,
        "    while (shared.done < record) fake_sleep_us(POLL_US);\n",
        "    (void)shared;\n    (void)record;\n",
        _OWN,
    ),
    Fault(
        "the host does not wait for a stream",
        _STREAMS,
        "    done_.wait(lock, [&] { return count_done_ >= until; });\n",
        "    (void)until;\n",
        _OWN,
    ),
    Fault(
        "an event is said to have happened as soon as it was recorded",
        _STREAMS,
        "    return !last || last->done ? cudaSuccess : cudaErrorNotReady;\n",
        "    return cudaSuccess;\n",
        _OWN,
    ),
    Fault(
        "pinned memory is read when its copy is asked for",
        _RUNTIME,
        "    if (pageable(from)) staged = ",
        "    staged = ",
        _OWN,
    ),
    Fault(
        "a collective does not wait for those of before it on the stream",
        _NCCL,
        "enqueue(call.comm, stream, [=](uint64_t number) { call.run(number, late_us); })",
        "enqueue(call.comm, stream, [=](uint64_t number) {\n"
        "        std::thread([=] { call.run(number, late_us); }).detach();\n"
        "    })",
        _COLLECTIVES,
    ),
    Fault(
        "a collective is never late",
        _NCCL,
        '    const long late_us = fake_lateness_us("NCCL", stream);\n',
        "    const long late_us = 0;\n",
        _COLLECTIVES,
    ),
)
