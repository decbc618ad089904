// What the libraries of the fake device share: knobs, and launching with a lateness that is drawn when a thing is
// launched, so that it depends on the order of launches alone.
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

// Runs `run(data)` in stream order; in a graph at each replay. `drop(data)` comes after the last time.
API cudaError_t fake_launch(cudaStream_t stream, void (*run)(void*), void (*drop)(void*), void* data);
// Draws how late the next thing on the stream is: FAKE_<kind>_US, and up to FAKE_<kind>_JITTER_US more.
API long fake_lateness_us(const char* kind, cudaStream_t stream);
API void fake_sleep_us(long us);
// Notes what is not covered, for the text of the error that follows; returns that error.
API cudaError_t fake_not_covered(const char* what);
API int fake_physical(int device);
// Removes files in shared memory: those that begin so; those of processes that have ended without removing them.
API void fake_remove_shared(const char* prefix);
API void fake_sweep();

namespace fake {

inline long knob(const char* name, long otherwise = 0) {
    const char* value = getenv(name);
    return value ? atol(value) : otherwise;
}

// Held while one of all processes uses a device, or a link: as under time slicing, with FAKE_SHARED=1.
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
