// A CUDA runtime and a few driver calls on the CPU: streams are threads, events have CUDA's snapshot meaning,
// copies are late, kernels do nothing but spin_kernel, which sleeps. Interprocess events and 64-bit words
// work between processes.
#include <cuda.h>
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
using Task = std::function<void()>;
static long env(const char* n, long d) {
    const char* v = getenv(n);
    return v ? atol(v) : d;
}
static void us(long t) {
    if (t > 0) std::this_thread::sleep_for(std::chrono::microseconds(t));
}
static int g_devices() {
    static const int n = (int)env("FAKE_DEVICES", 1);
    return n;
}
// The arithmetic is torch's: it is loaded when torch, and nobody else, first asks for devices.
static void load_kernels() {
    static std::once_flag once;
    if (dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY) == nullptr) return;
    std::call_once(once, [] {
        Dl_info here;
        dladdr((const void*)load_kernels, &here);
        std::string path(here.dli_fname);
        path = path.substr(0, path.rfind('/') + 1) + "kernels.so";
        if (dlopen(path.c_str(), RTLD_NOW) == nullptr) {
            fprintf(stderr, "fake CUDA device: %s\n", dlerror());
            abort();
        }
    });
}
static thread_local int tl_dev = 0;
static thread_local bool tl_ctx = false;
static thread_local cudaError_t tl_err = cudaSuccess;
static std::atomic<unsigned> g_primary{0};  // a bit for each device that has a context in this process
static cudaError_t ret(cudaError_t e) {
    if (e != cudaSuccess) tl_err = e;
    return e;
}
static void bind() {
    tl_ctx = true;
    g_primary |= 1u << tl_dev;
}
struct Stream {
    std::deque<Task> q;
    std::mutex m;
    std::condition_variable cv;
    bool busy = false;
    unsigned flags = 0;
    int prio = 0;
    Stream() {
        std::thread([this] { run(); }).detach();
    }
    void run() {
        for (;;) {
            Task t;
            {
                std::unique_lock<std::mutex> l(m);
                cv.wait(l, [&] { return !q.empty(); });
                t = std::move(q.front());
                q.pop_front();
                busy = true;
            }
            t();
            {
                std::lock_guard<std::mutex> l(m);
                busy = false;
            }
            cv.notify_all();
        }
    }
    void put(Task t) {
        {
            std::lock_guard<std::mutex> l(m);
            q.push_back(std::move(t));
        }
        cv.notify_all();
    }
    bool idle() {
        std::lock_guard<std::mutex> l(m);
        return q.empty() && !busy;
    }
    void sync() {
        std::unique_lock<std::mutex> l(m);
        cv.wait(l, [&] { return q.empty() && !busy; });
    }
};
static std::mutex g_m;
static std::set<Stream*>* g_streams = new std::set<Stream*>;
static Stream* add(Stream* s) {
    std::lock_guard<std::mutex> l(g_m);
    g_streams->insert(s);
    return s;
}
static Stream* dflt() {
    static std::mutex m;
    static std::map<int, Stream*>* all = new std::map<int, Stream*>;
    std::lock_guard<std::mutex> l(m);
    Stream*& s = (*all)[tl_dev];
    if (!s) s = add(new Stream);
    return s;
}
static Stream* S(const void* s) {
    bind();
    return (s == nullptr || (size_t)s <= 2) ? dflt() : (Stream*)s;
}
struct Rec {
    std::atomic<bool> done{false};
    std::mutex m;
    std::condition_variable cv;
    void set() {
        {
            std::lock_guard<std::mutex> l(m);
            done = true;
        }
        cv.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> l(m);
        cv.wait(l, [&] { return done.load(); });
    }
};
struct Shared {
    std::atomic<uint64_t> recorded, done;
};
struct Event {
    std::shared_ptr<Rec> last;
    unsigned flags = 0;
    Shared* shared = nullptr;
    char name[48] = {};
    std::mutex m;
    std::chrono::steady_clock::time_point at;
};
static Shared* map_shared(const char* name, bool make) {
    int fd = open(name, O_RDWR | (make ? O_CREAT | O_EXCL : 0), 0600);
    if (fd < 0) return nullptr;
    if (make && ftruncate(fd, 4096)) {
        close(fd);
        return nullptr;
    }
    void* p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return p == MAP_FAILED ? nullptr : (Shared*)p;
}
struct Mem {
    size_t size;
    cudaMemoryType type;
    int device;
};
static std::mutex g_mm;
static std::map<char*, Mem>* g_mem = new std::map<char*, Mem>;
static size_t g_used = 0;
static void* alloc(size_t n, cudaMemoryType t) {
    size_t r = (n + 4095) & ~4095ul;
    void* p = mmap(nullptr, r ? r : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    std::lock_guard<std::mutex> l(g_mm);
    (*g_mem)[(char*)p] = {r, t, tl_dev};
    if (t == cudaMemoryTypeDevice) g_used += r;
    return p;
}
static void release(void* p) {
    std::lock_guard<std::mutex> l(g_mm);
    auto i = g_mem->find((char*)p);
    if (i == g_mem->end()) return;
    if (i->second.type == cudaMemoryTypeDevice) g_used -= i->second.size;
    munmap(p, i->second.size);
    g_mem->erase(i);
}
static long jitter(long most) {
    static thread_local std::mt19937 r{std::random_device{}()};
    return most > 0 ? (long)(r() % most) : 0;
}
static void copy_on(Stream* s, void* d, const void* a, size_t n) {
    long each = env("FAKE_COPY_US", 0), most = env("FAKE_COPY_JITTER_US", 0);
    s->put([=] {
        us(each + jitter(most));
        memcpy(d, a, n);
    });
}
static std::unordered_map<const void*, std::string>* names() {
    static auto* m = new std::unordered_map<const void*, std::string>;
    return m;
}
static std::mutex g_names;
static std::atomic<long> g_kernels{0};
static cudaError_t launch(const void* f, void** args, cudaStream_t st) {
    std::string n;
    {
        std::lock_guard<std::mutex> l(g_names);
        auto i = names()->find(f);
        if (i != names()->end()) n = i->second;
    }
    g_kernels++;
    if (getenv("FAKE_TRACE")) fprintf(stderr, "kernel %s\n", n.substr(0, 160).c_str());
    if (n.find("spin_kernel") != std::string::npos) {
        int64_t cycles = *(int64_t*)args[0];
        S(st)->put([=] { us(cycles / 1000); });
    } else
        S(st)->put([] {});
    return cudaSuccess;
}
#define API extern "C" __attribute__((visibility("default")))
// --- device
API cudaError_t cudaGetDeviceCount(int* n) {
    load_kernels();
    *n = g_devices();
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
    *d = tl_dev;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= g_devices()) return ret(cudaErrorInvalidDevice);
    tl_dev = d;
    bind();
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
    *v = 13020;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
    *v = 13020;
    return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
    auto e = tl_err;
    tl_err = cudaSuccess;
    return e;
}
API cudaError_t cudaPeekAtLastError() { return tl_err; }
API const char* cudaGetErrorString(cudaError_t e) {
    static thread_local char b[40];
    snprintf(b, 40, "fake error %d", (int)e);
    return b;
}
API const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) {
    *a = 0;
    *b = -5;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Fake H200");
    p->major = 9;
    p->totalGlobalMem = 8ul << 30;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerMultiprocessor = 65536;
    p->regsPerBlock = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerMultiprocessor = 233472;
    p->sharedMemPerBlockOptin = 232448;
    p->l2CacheSize = 60 << 20;
    p->maxGridSize[0] = 1u << 30;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->concurrentKernels = 1;
    p->unifiedAddressing = 1;
    p->memPitch = 1u << 30;
    p->textureAlignment = 512;
    memset(&p->uuid, 0x42 + d, 16);
    p->pciBusID = d + 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
    *v = a == cudaDevAttrComputeCapabilityMajor   ? 9
         : a == cudaDevAttrComputeCapabilityMinor ? 0
         : a == cudaDevAttrMultiProcessorCount    ? 132
         : a == cudaDevAttrMaxThreadsPerBlock     ? 1024
                                                  : 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) {
    *v = 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    bind();
    std::set<Stream*> all;
    {
        std::lock_guard<std::mutex> l(g_m);
        all = *g_streams;
    }
    for (auto* s : all) s->sync();
    return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
    *t = 8ul << 30;
    *f = *t - g_used;
    return cudaSuccess;
}
// --- memory
API cudaError_t cudaMalloc(void** p, size_t n) {
    bind();
    *p = alloc(n, cudaMemoryTypeDevice);
    return *p ? cudaSuccess : ret(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* p) {
    if (p) {
        cudaDeviceSynchronize();
        release(p);
    }
    return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
    bind();
    *p = alloc(n, cudaMemoryTypeHost);
    return *p ? cudaSuccess : ret(cudaErrorMemoryAllocation);
}
API cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
API cudaError_t cudaFreeHost(void* p) {
    if (p) {
        cudaDeviceSynchronize();
        release(p);
    }
    return cudaSuccess;
}
API cudaError_t cudaHostRegister(void*, size_t, unsigned) {
    bind();
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void*) {
    bind();
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    std::lock_guard<std::mutex> l(g_mm);
    auto i = g_mem->upper_bound((char*)p);
    if (i != g_mem->begin() && (--i, (char*)p < i->first + i->second.size)) {
        a->type = i->second.type;
        a->device = i->second.device;
        a->devicePointer = a->hostPointer = (void*)p;
    }
    return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
    copy_on(S(st), d, s, n);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
    copy_on(dflt(), d, s, n);
    dflt()->sync();
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
    S(st)->put([=] { memset(d, v, n); });
    return cudaSuccess;
}
API cudaError_t cudaMemset(void* d, int v, size_t n) {
    cudaMemsetAsync(d, v, n, nullptr);
    dflt()->sync();
    return cudaSuccess;
}
// --- streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) {
    bind();
    auto* x = new Stream;
    x->flags = f;
    x->prio = p;
    add(x);
    *s = (cudaStream_t)x;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) {
    return cudaStreamCreateWithPriority(s, f, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    S(s)->sync();
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) { return S(s)->idle() ? cudaSuccess : cudaErrorNotReady; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
    *p = S(s)->prio;
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* c) {
    if (!getenv("FAKE_STRICT")) S(s);
    *c = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
    if (!getenv("FAKE_STRICT")) S(s);
    *c = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* u) {
    S(s)->put([=] { f(u); });
    return cudaSuccess;
}
// --- events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
    bind();
    auto* x = new Event;
    x->flags = f;
    if (f & cudaEventInterprocess) {
        if (!(f & cudaEventDisableTiming)) return ret(cudaErrorInvalidValue);
        static std::atomic<int> n{0};
        snprintf(x->name, 48, "/dev/shm/fakecuda-%d-%d", getpid(), n++);
        x->shared = map_shared(x->name, true);
        if (!x->shared) return ret(cudaErrorUnknown);
    }
    *e = (cudaEvent_t)x;
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
    auto* x = (Event*)e;
    auto r = std::make_shared<Rec>();
    {
        std::lock_guard<std::mutex> l(x->m);
        x->last = r;
    }
    uint64_t seq = x->shared ? ++x->shared->recorded : 0;
    Shared* sh = x->shared;
    S(s)->put([=] {
        x->at = std::chrono::steady_clock::now();
        if (sh) sh->done = seq;
        r->set();
    });
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
    bind();
    auto* x = (Event*)e;
    if (x->shared) return x->shared->done >= x->shared->recorded ? cudaSuccess : cudaErrorNotReady;
    std::lock_guard<std::mutex> l(x->m);
    return !x->last || x->last->done ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    bind();
    auto* x = (Event*)e;
    if (x->shared) {
        uint64_t w = x->shared->recorded;
        while (x->shared->done < w) us(20);
        return cudaSuccess;
    }
    std::shared_ptr<Rec> r;
    {
        std::lock_guard<std::mutex> l(x->m);
        r = x->last;
    }
    if (r) r->wait();
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    auto* x = (Event*)e;
    if (x->shared) {
        uint64_t w = x->shared->recorded;
        Shared* sh = x->shared;
        S(s)->put([=] {
            while (sh->done < w) us(20);
        });
        return cudaSuccess;
    }
    std::shared_ptr<Rec> r;
    {
        std::lock_guard<std::mutex> l(x->m);
        r = x->last;
    }
    if (r) S(s)->put([=] { r->wait(); });
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = std::chrono::duration<float, std::milli>(((Event*)b)->at - ((Event*)a)->at).count();
    return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
    auto* x = (Event*)e;
    if (x->name[0]) unlink(x->name);
    return cudaSuccess;
}
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t e) {
    auto* x = (Event*)e;
    if (!x->shared) return ret(cudaErrorInvalidResourceHandle);
    memset(h, 0, sizeof *h);
    memcpy(h, x->name, 48);
    return cudaSuccess;
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t h) {
    bind();
    char own[32];
    snprintf(own, 32, "/dev/shm/fakecuda-%d-", getpid());
    if (!strncmp((char*)&h, own, strlen(own))) return ret(cudaErrorDeviceUninitialized);
    auto* x = new Event;
    x->shared = map_shared((char*)&h, false);
    if (!x->shared) return ret(cudaErrorMapBufferObjectFailed);
    *e = (cudaEvent_t)x;
    return cudaSuccess;
}
// --- kernels
static std::atomic<size_t> g_fat{16};
API void** __cudaRegisterFatBinary(void*) { return (void**)(g_fat++ * 16); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* dev, int, uint3*, uint3*, dim3*, dim3*, int*) {
    std::lock_guard<std::mutex> l(g_names);
    (*names())[host] = dev;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
struct Conf {
    dim3 g, b;
    size_t sh;
    void* st;
};
static thread_local std::deque<Conf> tl_conf;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sh, void* st) {
    tl_conf.push_back({g, b, sh, st});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sh, void* st) {
    auto c = tl_conf.back();
    tl_conf.pop_back();
    *g = c.g;
    *b = c.b;
    *sh = c.sh;
    *(void**)st = c.st;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
    *k = (cudaKernel_t)f;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void** a, size_t, cudaStream_t s) {
    return launch((const void*)k, a, s);
}
API cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void** a, size_t, cudaStream_t s) {
    return launch(f, a, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
    return launch(f, a, c->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 90;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
    *n = 2;
    return cudaSuccess;
}
API cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
    *n = 2;
    return cudaSuccess;
}
// --- driver
static CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }
#define CTX \
    if (!tl_ctx) return CUDA_ERROR_INVALID_CONTEXT
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult r, const char** s) {
    *s = r == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_FAKE";
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult r, const char** s) { return cuGetErrorName(r, s); }
API CUresult cuDeviceGet(CUdevice* d, int n) {
    if (n >= g_devices()) return CUDA_ERROR_INVALID_DEVICE;
    *d = n;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
    *v = a == 133 ? 0 : 1;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
    memset(u, 0x42 + d, 16);
    return CUDA_SUCCESS;
}
#undef cuDeviceGetUuid
API CUresult cuDeviceGetUuid(CUuuid* u, CUdevice d) {
    memset(u, 0x42 + d, 16);
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned* f, int* active) {
    *f = 0;
    *active = g_primary >> d & 1;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* c) {
    *c = tl_ctx ? (CUcontext)(size_t)(8 + tl_dev) : nullptr;
    return CUDA_SUCCESS;
}
API CUresult cuMemHostRegister_v2(void*, size_t, unsigned) {
    CTX;
    return CUDA_SUCCESS;
}
API CUresult cuMemHostUnregister(void*) {
    CTX;
    return CUDA_SUCCESS;
}
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* d, void* p, unsigned) {
    CTX;
    *d = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}
API CUresult cuStreamWriteValue64_v2(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned) {
    CTX;
    S(s)->put([=] { __atomic_store_n((uint64_t*)a, v, __ATOMIC_SEQ_CST); });
    return CUDA_SUCCESS;
}
API CUresult cuStreamWaitValue64_v2(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned) {
    CTX;
    S(s)->put([=] {
        while ((int64_t)(__atomic_load_n((uint64_t*)a, __ATOMIC_SEQ_CST) - v) < 0) us(20);
    });
    return CUDA_SUCCESS;
}
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* n, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* q) {
    *f = dlsym(RTLD_DEFAULT, n);
    if (!*f) *f = (void*)unsupported;
    if (q) *q = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
API unsigned fake_contexts() { return g_primary; }
API long fake_kernels() { return g_kernels; }
