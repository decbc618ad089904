// Shared by the libraries of the fake device: knobs, and launches with a lateness. The lateness is
// drawn at the launch, so that it depends only on the order of launches.
#pragma once
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

// Runs `run(data)` in stream order, or at each replay of a graph. `drop(data)` follows the last.
API cudaError_t fake_launch(cudaStream_t stream, void (*run)(void*), void (*drop)(void*), void* data);
// Draws the lateness of the next launch on the stream: FAKE_<kind>_US, and up to
// FAKE_<kind>_JITTER_US more.
API long fake_lateness_us(const char* kind, cudaStream_t stream);
API void fake_sleep_us(long us);
// Records what the device does not cover, for the text of the error that it returns.
API cudaError_t fake_not_covered(const char* what);
API int fake_physical(int device);
// Removes the files in shared memory whose names begin with `prefix`.
API void fake_remove_shared(const char* prefix);
// Removes the files in shared memory of processes that have ended without removing them.
API void fake_sweep();

namespace fake {

inline long knob(const char* name, long otherwise = 0) {
    const char* value = getenv(name);
    return value ? atol(value) : otherwise;
}

// With FAKE_SHARED=1, a lock across processes: one of them uses a device or a link at a time, as
// under time slicing.
class Alone {
  public:
    Alone(const char* what, int number) {
        static const bool shared = getenv("FAKE_SHARED");
        if (!shared) return;
        static thread_local std::map<std::pair<std::string, int>, int> files;
        int& file = files[{what, number}];
        if (!file) {
            const std::string path = "/dev/shm/fake" + std::string(what) + "-" + std::to_string(number);
            file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        }
        file_ = file;
        flock(file_, LOCK_EX);
    }
    ~Alone() {
        if (file_ >= 0) flock(file_, LOCK_UN);
    }

  private:
    int file_ = -1;
};

}  // namespace fake
