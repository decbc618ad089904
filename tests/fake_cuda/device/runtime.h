// Streams, events and graphs, as the runtime's and the driver's names use them.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake.h"

namespace fake {

using Task = std::function<void()>;  // may be run again: a graph keeps it
struct Stream;
// How much of each stream's part in a capture lies before a point.
using Clock = std::map<Stream*, size_t>;

struct Graph {
    std::vector<Task> tasks;  // in the order of the calls, which is one that all waits allow
    // While it is captured:
    Stream* origin = nullptr;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id thread;
    unsigned long long id = 0;
    bool broken = false;
    std::set<Stream*> streams;
};

struct Stream {
    Stream(int device, unsigned flags, int priority);
    void put(Task task);
    bool idle();
    void wait();  // for what it has been given so far

    const int device;
    const unsigned flags;
    const int priority;
    const int ordinal;
    std::mt19937_64 lateness;
    long seed;
    Graph* graph = nullptr;  // that it is captured into
    Clock clock;             // of the capture

  private:
    void run();
    std::mutex mutex_;
    std::condition_variable given_, done_;
    std::deque<Task> tasks_;
    uint64_t count_given_ = 0, count_done_ = 0;
    bool started_ = false;
};

// One recording of an event.
struct Record {
    std::atomic<bool> done{false};
    std::chrono::steady_clock::time_point at;
    std::mutex mutex;
    std::condition_variable reached;
    void reach();
    void wait();
};

struct Event {
    explicit Event(unsigned flags) : flags(flags) {}
    const unsigned flags;
    std::mutex mutex;
    std::shared_ptr<Record> last;
    Graph* graph = nullptr;  // its last recording was captured into this one
    Clock clock;
};

// A call that needs a context: makes one on the thread's device. Returns the error of a forked process.
cudaError_t bind();
cudaError_t failed(cudaError_t error);
int current_device();
bool thread_has_context();
bool device_has_context(int device);
int device_count();
cudaUUID_t uuid_of(int device);
Stream* stream_of(cudaStream_t handle);
// The error of a call that may not be made while a graph is captured; the capture is broken by it.
cudaError_t unsafe_in_capture();
cudaError_t no_capture(Stream* stream);
cudaError_t set_capture_mode(cudaStreamCaptureMode* mode);

}  // namespace fake
