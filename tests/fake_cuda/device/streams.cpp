// Streams are threads. An event stands for all tasks that were enqueued before it was recorded. A
// captured graph keeps its tasks, and runs them at each launch in the order of the calls.
#include "runtime.h"

#include <dirent.h>
#include <signal.h>

#include <algorithm>
#include <cstring>

namespace fake {

static std::mutex g_mutex;  // protects captures and the list of streams
static std::set<Stream*>& streams() {
    static auto* all = new std::set<Stream*>;  // never destroyed: threads outlive the end of main
    return *all;
}
static std::set<Graph*>& captures() {
    static auto* all = new std::set<Graph*>;
    return *all;
}
static thread_local cudaStreamCaptureMode tl_mode = cudaStreamCaptureModeGlobal;

// ---- streams
Stream::Stream(int device, unsigned flags, int priority)
    : device(device), flags(flags), priority(priority), ordinal([device] {
          static std::map<int, int> counts;
          return counts[device]++;
      }()),
      seed(-1) {}

void Stream::run() {
    for (;;) {
        Task task;
        {
            std::unique_lock lock(mutex_);
            given_.wait(lock, [&] { return !tasks_.empty(); });
            task = std::move(tasks_.front());
            tasks_.pop_front();
        }
        task();
        task = nullptr;  // release its references before waiting threads see that it is done
        {
            std::lock_guard lock(mutex_);
            ++count_done_;
        }
        done_.notify_all();
    }
}

void Stream::put(Task task) {
    {
        std::lock_guard lock(g_mutex);
        if (graph) {
            graph->tasks.push_back(std::move(task));
            ++clock[this];
            return;
        }
    }
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ++count_given_;
    if (!started_) std::thread([this] { run(); }).detach();
    started_ = true;
    given_.notify_one();
}

bool Stream::idle() {
    std::lock_guard lock(mutex_);
    return count_done_ == count_given_;
}

void Stream::wait() {
    std::unique_lock lock(mutex_);
    const uint64_t until = count_given_;
    done_.wait(lock, [&] { return count_done_ >= until; });
}

static Stream* add(Stream* stream) {
    std::lock_guard lock(g_mutex);
    streams().insert(stream);
    return stream;
}

Stream* stream_of(cudaStream_t handle) {
    if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
    static std::mutex mutex;
    static auto* defaults = new std::map<int, Stream*>;
    std::lock_guard lock(mutex);
    Stream*& stream = (*defaults)[current_device()];
    if (!stream) stream = add(new Stream(current_device(), 0, 0));
    return stream;
}

// ---- captures
static bool concerns(const Graph& graph) {
    const bool own = graph.thread == std::this_thread::get_id();
    if (tl_mode == cudaStreamCaptureModeRelaxed || graph.mode == cudaStreamCaptureModeRelaxed) return false;
    return own || (graph.mode == cudaStreamCaptureModeGlobal && tl_mode == cudaStreamCaptureModeGlobal);
}

cudaError_t unsafe_in_capture() {
    std::lock_guard lock(g_mutex);
    bool found = false;
    for (Graph* graph : captures())
        if (concerns(*graph)) graph->broken = found = true;
    return found ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t no_capture(Stream* stream) {
    std::lock_guard lock(g_mutex);
    if (!stream->graph) return cudaSuccess;
    stream->graph->broken = true;
    return failed(cudaErrorStreamCaptureUnsupported);
}

cudaError_t set_capture_mode(cudaStreamCaptureMode* mode) {
    std::swap(tl_mode, *mode);
    return cudaSuccess;
}

static void release(Graph* graph) {
    for (Stream* stream : graph->streams) {
        stream->graph = nullptr;
        stream->clock.clear();
    }
    graph->streams.clear();
    captures().erase(graph);
}

// Whether all tasks of the capture, on any stream, lie before the end of the stream that began it.
static bool joined(const Graph& graph) {
    return std::all_of(graph.streams.begin(), graph.streams.end(), [&](Stream* stream) {
        const auto seen = graph.origin->clock.find(stream);
        return stream->clock[stream] == (seen == graph.origin->clock.end() ? 0 : seen->second);
    });
}

static void merge(Clock& into, const Clock& from) {
    for (auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}

// ---- events
void Record::reach() {
    {
        std::lock_guard lock(mutex);
        at = std::chrono::steady_clock::now();
        done = true;
    }
    reached.notify_all();
}

void Record::wait() {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return done.load(); });
}

template <class F>
static void each_shared_file(F&& f) {
    DIR* directory = opendir("/dev/shm");
    if (!directory) return;
    while (dirent* entry = readdir(directory)) f(std::string(entry->d_name));
    closedir(directory);
}

static std::shared_ptr<Record> last_of(Event* event) {
    std::lock_guard lock(event->mutex);
    return event->last;
}

// Returns a task that waits for the event's latest recording, as of now.
static Task waiting(Event* event) {
    auto last = last_of(event);
    if (!last) return nullptr;
    return [last] { last->wait(); };
}

static Task recording(Event* event) {
    auto record = std::make_shared<Record>();
    {
        std::lock_guard lock(event->mutex);
        event->last = record;
    }
    return [record] { record->reach(); };
}

static cudaError_t captured(Event* event) {
    std::lock_guard lock(g_mutex);
    if (!event->graph) return cudaSuccess;
    if (captures().count(event->graph)) event->graph->broken = true;
    return failed(cudaErrorCapturedEvent);
}

}  // namespace fake

using namespace fake;
#define CHECK(call)                                        \
    if (cudaError_t error = (call); error != cudaSuccess) { \
        return error;                                      \
    }

// ---- files in shared memory
API void fake_remove_shared(const char* prefix) {
    each_shared_file([&](const std::string& name) {
        if (name.rfind(prefix, 0) == 0) unlink(("/dev/shm/" + name).c_str());
    });
}
API void fake_sweep() {
    static std::once_flag once;
    std::call_once(once, [] {
        each_shared_file([](const std::string& name) {
            int pid = 0;
            const bool ours = sscanf(name.c_str(), "fakenccl-%d-", &pid) == 1;
            if (ours && kill(pid, 0) && errno == ESRCH) unlink(("/dev/shm/" + name).c_str());
        });
    });
}

// ---- lateness
API void fake_sleep_us(long us) {
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

API long fake_lateness_us(const char* kind, cudaStream_t handle) {
    const std::string name = std::string("FAKE_") + kind;
    const long least = knob((name + "_US").c_str()), jitter = knob((name + "_JITTER_US").c_str());
    if (jitter <= 0) return least;
    static const long by_chance = std::random_device{}() >> 1;
    const long seed = knob("FAKE_SEED", by_chance);
    Stream* stream = stream_of(handle);
    std::lock_guard lock(g_mutex);
    if (stream->seed != seed) {  // the device enters, so that each rank draws its own lateness
        std::seed_seq from{(int)seed, fake_physical(stream->device), stream->ordinal};
        stream->lateness.seed(from);
        stream->seed = seed;
    }
    return least + (long)(stream->lateness() % (unsigned long)jitter);
}

API cudaError_t fake_launch(cudaStream_t handle, void (*run)(void*), void (*drop)(void*), void* data) {
    CHECK(bind());
    std::shared_ptr<void> held(data, drop);
    stream_of(handle)->put([run, held] { run(held.get()); });
    return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* data) {
    return fake_launch(stream, run, [](void*) {}, data);
}

// ---- streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
    CHECK(bind());
    *handle = (cudaStream_t)add(new Stream(current_device(), flags, priority));
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its tasks still run
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    CHECK(bind());
    Stream* stream = stream_of(handle);
    CHECK(no_capture(stream));
    stream->wait();
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    CHECK(bind());
    Stream* stream = stream_of(handle);
    CHECK(no_capture(stream));
    return stream->idle() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    CHECK(bind());
    CHECK(unsafe_in_capture());
    std::set<Stream*> all;
    {
        std::lock_guard lock(g_mutex);
        all = streams();
    }
    for (Stream* stream : all)
        if (stream->device == current_device()) stream->wait();
    return cudaSuccess;
}

// ---- captures and graphs
API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    CHECK(bind());
    Stream* stream = stream_of(handle);
    if (handle == nullptr || handle == cudaStreamLegacy) return failed(cudaErrorStreamCaptureUnsupported);
    std::lock_guard lock(g_mutex);
    if (stream->graph) return failed(cudaErrorIllegalState);
    static unsigned long long count = 0;
    auto* graph = new Graph{{}, stream, mode, std::this_thread::get_id(), ++count, false, {stream}};
    stream->graph = graph;
    captures().insert(graph);
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
    Stream* stream = stream_of(handle);
    std::lock_guard lock(g_mutex);
    Graph* graph = stream->graph;
    *out = nullptr;
    if (!graph) return failed(cudaErrorIllegalState);
    if (graph->origin != stream) return failed(cudaErrorStreamCaptureUnmatched);
    if (graph->mode != cudaStreamCaptureModeRelaxed && graph->thread != std::this_thread::get_id())
        return failed(cudaErrorStreamCaptureWrongThread);
    const cudaError_t wrong = graph->broken    ? cudaErrorStreamCaptureInvalidated
                              : !joined(*graph) ? cudaErrorStreamCaptureUnjoined
                                                : cudaSuccess;
    release(graph);
    if (wrong != cudaSuccess) return failed(wrong);
    *out = (cudaGraph_t)graph;
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
    CHECK(bind());
    Stream* stream = stream_of(handle);
    std::lock_guard lock(g_mutex);
    const Graph* found = stream->graph;
    *status = !found          ? cudaStreamCaptureStatusNone
              : found->broken ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
    if (id) *id = found ? found->id : 0;
    if (graph) *graph = (cudaGraph_t)found;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { return set_capture_mode(mode); }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = (cudaGraphExec_t) new std::vector<Task>(((Graph*)graph)->tasks);
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(exec, graph, flags);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
    CHECK(bind());
    Stream* stream = stream_of(handle);
    for (const Task& task : *(std::vector<Task>*)exec) stream->put(task);
    return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    if (nodes) return failed(fake_not_covered("the nodes of a graph"));
    *count = ((Graph*)graph)->tasks.size();
    return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    ((Graph*)graph)->tasks.clear();  // not deleted: an event may still point to it
    return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete (std::vector<Task>*)exec;
    return cudaSuccess;
}

// ---- events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
    CHECK(bind());
    if (flags & cudaEventInterprocess) return failed(cudaErrorNotSupported);
    *handle = (cudaEvent_t) new Event(flags);
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
    CHECK(bind());
    auto* event = (Event*)handle;
    Stream* stream = stream_of(on);
    {
        std::lock_guard lock(g_mutex);
        event->graph = nullptr;
        if (stream->graph) {
            if (flags & cudaEventRecordExternal) return failed(fake_not_covered("cudaEventRecordExternal"));
            event->graph = stream->graph;
            event->clock = stream->clock;
            return cudaSuccess;
        }
    }
    stream->put(recording(event));
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) { return cudaEventRecordWithFlags(handle, on, 0); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t by, cudaEvent_t handle, unsigned flags) {
    CHECK(bind());
    auto* event = (Event*)handle;
    Stream* stream = stream_of(by);
    {
        std::lock_guard lock(g_mutex);
        if (stream->graph && !event->graph) {
            if (flags & cudaEventWaitExternal) return failed(fake_not_covered("cudaEventWaitExternal"));
            stream->graph->broken = true;
            return failed(cudaErrorStreamCaptureIsolation);
        }
        if (event->graph) {
            if (!captures().count(event->graph)) return failed(cudaErrorCapturedEvent);
            if (stream->graph && stream->graph != event->graph) return failed(cudaErrorStreamCaptureMerge);
            stream->graph = event->graph;
            stream->graph->streams.insert(stream);
            merge(stream->clock, event->clock);
            return cudaSuccess;
        }
    }
    if (Task task = waiting(event)) stream->put(task);
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    CHECK(bind());
    CHECK(unsafe_in_capture());
    auto* event = (Event*)handle;
    CHECK(captured(event));
    auto last = last_of(event);
    return !last || last->done ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    CHECK(bind());
    CHECK(unsafe_in_capture());
    auto* event = (Event*)handle;
    CHECK(captured(event));
    if (Task task = waiting(event)) task();
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    auto begin = last_of((Event*)from), end = last_of((Event*)to);
    if (!begin || !end || ((((Event*)from)->flags | ((Event*)to)->flags) & cudaEventDisableTiming))
        return failed(cudaErrorInvalidResourceHandle);
    if (!begin->done || !end->done) return cudaErrorNotReady;
    *ms = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
    return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    delete (Event*)handle;
    return cudaSuccess;
}
