// Streams, events and graphs, for the functions of the runtime and of the driver.
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

using Task = std::function<void()>;  // may run several times, if a graph keeps it
struct Stream;
// A point in a capture: for each stream the number of its tasks that lie before it.
using Clock = std::map<Stream*, size_t>;

struct Graph {
    std::vector<Task> tasks;  // in the order of the calls, which satisfies all waits
    // Used only during the capture:
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
    void wait();  // for all tasks that it has been given so far

    const int device;
    const unsigned flags;
    const int priority;
    const int ordinal;
    std::mt19937_64 lateness;
    long seed;
    Graph* graph = nullptr;  // captures this stream; null if none does
    Clock clock;             // this stream's point in the capture

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
    Graph* graph = nullptr;  // captured its last recording; null if none did
    Clock clock;
};

// Makes a context on the thread's device, for calls that need one. An error in a forked process.
cudaError_t bind();
cudaError_t failed(cudaError_t error);
int current_device();
bool thread_has_context();
bool device_has_context(int device);
int device_count();
cudaUUID_t uuid_of(int device);
Stream* stream_of(cudaStream_t handle);
// Returns the error of a call that is illegal during a capture, and breaks the capture.
cudaError_t unsafe_in_capture();
cudaError_t no_capture(Stream* stream);
cudaError_t set_capture_mode(cudaStreamCaptureMode* mode);

}  // namespace fake
