// Devices, contexts, memory and the kernels that are not operators.
#include "runtime.h"

#undef cudaGetDeviceProperties
#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstring>
#include <unordered_map>

namespace fake {

constexpr size_t PAGE = 4096;
static thread_local int tl_device = 0;
static thread_local bool tl_context = false;
static thread_local cudaError_t tl_error = cudaSuccess;
static thread_local std::string tl_not_covered;
static std::atomic<unsigned> g_contexts{0};  // one bit per device, by this process's numbers
static std::atomic<bool> g_forked{false};    // forked from a process with contexts, which it lacks

cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) tl_error = error;
    return error;
}

// ---- devices
static std::string uuid_text(int physical) {
    char text[48];
    const int b = 0x42 + physical;
    snprintf(
        text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b,
        b, b, b, b, b, b, b, b, b);
    return text;
}

// The physical devices that this process sees, indexed by its own numbers. Like the driver it reads
// CUDA_VISIBLE_DEVICES up to the first entry that is not a device.
static const std::vector<int>& visible() {
    static const std::vector<int> found = [] {
        const int count = (int)knob("FAKE_DEVICES", 1);
        std::vector<int> devices;
        const char* given = getenv("CUDA_VISIBLE_DEVICES");
        if (!given) {
            for (int i = 0; i < count; ++i) devices.push_back(i);
            return devices;
        }
        std::string text = std::string(given) + ",";
        for (size_t end; (end = text.find(',')) != std::string::npos; text = text.substr(end + 1)) {
            const std::string entry = text.substr(0, end);
            int device = -1;
            if (entry.rfind("GPU-", 0) == 0) {
                for (int i = 0; i < count; ++i)
                    if (uuid_text(i).rfind(entry, 0) == 0) device = i;
            } else if (!entry.empty() && entry.find_first_not_of("0123456789") == std::string::npos) {
                device = atoi(entry.c_str());
            }
            if (device < 0 || device >= count) break;
            devices.push_back(device);
        }
        return devices;
    }();
    return found;
}
int device_count() { return (int)visible().size(); }
cudaUUID_t uuid_of(int device) {
    cudaUUID_t uuid;
    memset(&uuid, 0x42 + visible()[device], sizeof uuid);
    return uuid;
}
int current_device() { return tl_device; }
bool thread_has_context() { return tl_context; }
bool device_has_context(int device) { return g_contexts >> device & 1; }

cudaError_t bind() {
    static const int once = pthread_atfork(nullptr, nullptr, [] { g_forked = g_forked || g_contexts; });
    (void)once;
    if (g_forked) return failed(cudaErrorInitializationError);
    if (device_count() == 0) return failed(cudaErrorNoDevice);
    tl_context = true;
    g_contexts |= 1u << tl_device;
    return cudaSuccess;
}

// The arithmetic is torch's. It is loaded when torch first asks for devices, not for other callers.
static void load_kernels() {
    static std::once_flag once;
    void* torch = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
    if (torch == nullptr) return;
    dlclose(torch);
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

// ---- memory
struct Block {
    size_t size;
    cudaMemoryType type;
    int device;
    bool mapped;  // allocated here, not memory of the caller that was registered
};
static std::mutex g_memory_mutex;
static std::map<char*, Block>& blocks() {
    static auto* all = new std::map<char*, Block>;
    return *all;
}
static size_t g_used[64];

static size_t device_bytes() { return (size_t)knob("FAKE_MEMORY_MB", 8192) << 20; }

static cudaError_t allocate(void** out, size_t size, cudaMemoryType type) {
    const cudaError_t error = bind();
    if (error != cudaSuccess) return error;
    if (const cudaError_t illegal = unsafe_in_capture()) return illegal;
    const size_t whole = std::max((size + PAGE - 1) / PAGE * PAGE, PAGE);
    std::lock_guard lock(g_memory_mutex);
    const bool on_device = type == cudaMemoryTypeDevice;
    if (on_device && g_used[tl_device] + whole > device_bytes()) return failed(cudaErrorMemoryAllocation);
    void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    blocks()[(char*)memory] = {whole, type, tl_device, true};
    if (on_device) g_used[tl_device] += whole;
    *out = memory;
    return cudaSuccess;
}

static cudaError_t release(void* memory) {
    if (memory == nullptr) return bind();
    if (const cudaError_t error = cudaDeviceSynchronize()) return error;
    std::lock_guard lock(g_memory_mutex);
    const auto found = blocks().find((char*)memory);
    if (found == blocks().end() || !found->second.mapped) return failed(cudaErrorInvalidValue);
    if (found->second.type == cudaMemoryTypeDevice) g_used[found->second.device] -= found->second.size;
    munmap(memory, found->second.size);
    blocks().erase(found);
    return cudaSuccess;
}

static bool find(const void* address, Block* out) {
    std::lock_guard lock(g_memory_mutex);
    auto found = blocks().upper_bound((char*)address);
    if (found == blocks().begin()) return false;
    --found;
    if ((char*)address >= found->first + found->second.size) return false;
    *out = found->second;
    return true;
}

static bool pageable(const void* address) {
    Block block;
    return !find(address, &block);
}

// As on a real device, the call reads or writes memory that is not pinned before it returns.
static cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t handle) {
    if (const cudaError_t error = bind()) return error;
    Stream* stream = stream_of(handle);
    const long late_us = fake_lateness_us("COPY", handle);
    const bool wait = pageable(to);
    if (wait)
        if (const cudaError_t error = no_capture(stream)) return error;
    std::shared_ptr<std::vector<char>> staged;
    if (pageable(from)) staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
    stream->put([=] {
        fake_sleep_us(late_us);
        memcpy(to, staged ? staged->data() : from, size);
    });
    if (wait) stream->wait();
    return cudaSuccess;
}

// ---- kernels of torch's libraries
static std::mutex g_names_mutex;
static std::unordered_map<const void*, std::string>& names() {
    static auto* all = new std::unordered_map<const void*, std::string>;
    return *all;
}

static cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
    std::string name;
    {
        std::lock_guard lock(g_names_mutex);
        name = names()[function];
    }
    if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep
        const int64_t cycles = *(int64_t*)arguments[0];
        if (const cudaError_t error = bind()) return error;
        stream_of(stream)->put([cycles] { fake_sleep_us(cycles / 1000); });
        return cudaSuccess;
    }
    int status = 0;
    char* readable = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    const cudaError_t error = fake_not_covered(("the kernel " + std::string(readable ? readable : name)).c_str());
    free(readable);
    return failed(error);
}

}  // namespace fake

using namespace fake;
#define CHECK(call)                                        \
    if (cudaError_t error = (call); error != cudaSuccess) { \
        return error;                                      \
    }

// ---- devices
API unsigned fake_contexts() { return g_contexts; }
API int fake_physical(int device) { return visible().at(device); }
API cudaError_t fake_not_covered(const char* what) {
    tl_not_covered = what;
    return failed(cudaErrorNotSupported);
}
API cudaError_t cudaGetDeviceCount(int* count) {
    load_kernels();
    *count = device_count();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
    *device = tl_device;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
    tl_device = device;
    return bind();
}
API cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13020;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
    const cudaError_t error = tl_error;
    tl_error = cudaSuccess;
    return error;
}
API cudaError_t cudaPeekAtLastError() { return tl_error; }
API const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define NAME(name) \
    case name: return #name;
        NAME(cudaSuccess)
        NAME(cudaErrorInvalidValue)
        NAME(cudaErrorMemoryAllocation)
        NAME(cudaErrorInitializationError)
        NAME(cudaErrorInvalidDevice)
        NAME(cudaErrorNoDevice)
        NAME(cudaErrorNotReady)
        NAME(cudaErrorInvalidResourceHandle)
        NAME(cudaErrorMapBufferObjectFailed)
        NAME(cudaErrorDeviceUninitialized)
        NAME(cudaErrorIllegalState)
        NAME(cudaErrorNotSupported)
        NAME(cudaErrorStreamCaptureUnsupported)
        NAME(cudaErrorStreamCaptureInvalidated)
        NAME(cudaErrorStreamCaptureMerge)
        NAME(cudaErrorStreamCaptureUnmatched)
        NAME(cudaErrorStreamCaptureUnjoined)
        NAME(cudaErrorStreamCaptureIsolation)
        NAME(cudaErrorStreamCaptureWrongThread)
        NAME(cudaErrorCapturedEvent)
#undef NAME
        default: return "cudaErrorUnknown";
    }
}
API const char* cudaGetErrorString(cudaError_t error) {
    static thread_local std::string text;
    text = cudaGetErrorName(error);
    if (error == cudaErrorNotSupported) text = "the fake device does not cover " + tl_not_covered;
    return text.c_str();
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Fake H200");
    p->major = 9;
    p->totalGlobalMem = device_bytes();
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerMultiprocessor = p->regsPerBlock = 65536;
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
    p->uuid = uuid_of(device);
    p->pciBusID = fake_physical(device) + 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        default: *value = 1;
    }
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

// ---- memory
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    CHECK(bind());
    std::lock_guard lock(g_memory_mutex);
    *total = device_bytes();
    *free = *total - g_used[tl_device];
    return cudaSuccess;
}
API cudaError_t cudaMalloc(void** out, size_t size) { return allocate(out, size, cudaMemoryTypeDevice); }
API cudaError_t cudaFree(void* memory) { return release(memory); }
API cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) { return allocate(out, size, cudaMemoryTypeHost); }
API cudaError_t cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
API cudaError_t cudaFreeHost(void* memory) { return release(memory); }
API cudaError_t cudaHostRegister(void* memory, size_t size, unsigned) {
    CHECK(bind());
    std::lock_guard lock(g_memory_mutex);
    if (!blocks().insert({(char*)memory, {size, cudaMemoryTypeHost, tl_device, false}}).second)
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* memory) {
    CHECK(bind());
    std::lock_guard lock(g_memory_mutex);
    return blocks().erase((char*)memory) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    out->device = -2;
    Block block;
    if (!find(address, &block)) return cudaSuccess;
    out->type = block.type;
    out->device = block.device;
    out->devicePointer = out->hostPointer = (void*)address;
    return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, size, stream);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
    return copy(to, from, size, stream);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    CHECK(unsafe_in_capture());
    CHECK(copy(to, from, size, nullptr));
    return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
    CHECK(bind());
    stream_of(stream)->put([=] { memset(to, value, size); });
    return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t size) {
    CHECK(unsafe_in_capture());
    CHECK(cudaMemsetAsync(to, value, size, nullptr));
    return cudaStreamSynchronize(nullptr);
}

// ---- kernels
API void** __cudaRegisterFatBinary(void*) {
    static std::atomic<size_t> count{16};
    return (void**)(count++ * 16);
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    std::lock_guard lock(g_names_mutex);
    names()[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
static thread_local std::vector<Configuration> tl_configurations;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    tl_configurations.push_back({grid, block, shared, stream});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    const Configuration last = tl_configurations.back();
    tl_configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *(void**)stream = last.stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
    return launch((const void*)kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernel(
    const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
    return launch(function, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* with, const void* function, void** arguments) {
    return launch(function, arguments, with->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = 90;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
    *count = 2;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* count, const void*, int, size_t, unsigned) {
    *count = 2;
    return cudaSuccess;
}
static CUresult missing() { return CUDA_ERROR_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void*)missing;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
