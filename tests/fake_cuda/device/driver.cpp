// The functions of the driver (libcuda) that torch and this package call. Nearly all need a context
// on their thread.
#include "runtime.h"

#include <cuda.h>
#undef cuDeviceGetUuid

#include <cstring>

using namespace fake;
constexpr long POLL_US = 30;
#define NEEDS_CONTEXT \
    if (!thread_has_context()) return CUDA_ERROR_INVALID_CONTEXT;

API CUresult cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API CUresult cuDriverGetVersion(int* version) {
    *version = 13020;
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = error == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : error == CUDA_ERROR_NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
            : error == CUDA_ERROR_INVALID_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
            : error == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_NOT_SUPPORTED   ? "CUDA_ERROR_NOT_SUPPORTED"
                                                  : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }
API CUresult cuDeviceGetCount(int* count) {
    *count = device_count();
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int number) {
    if (number < 0 || number >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    *device = number;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MPS_ENABLED ? 0 : 1;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    const cudaUUID_t found = uuid_of(device);
    memcpy(uuid, &found, sizeof *uuid);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    *flags = 0;
    *active = device_has_context(device);
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = thread_has_context() ? (CUcontext)(size_t)(8 + current_device()) : nullptr;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* device) {
    NEEDS_CONTEXT
    *device = current_device();
    return CUDA_SUCCESS;
}
API CUresult cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) {
    NEEDS_CONTEXT
    return cudaHostRegister(memory, size, flags) ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_SUCCESS;
}
API CUresult cuMemHostUnregister(void* memory) {
    NEEDS_CONTEXT
    return cudaHostUnregister(memory) ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS;
}
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* on_device, void* memory, unsigned) {
    NEEDS_CONTEXT
    *on_device = (CUdeviceptr)memory;
    return CUDA_SUCCESS;
}
API CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr word, cuuint64_t value, unsigned) {
    NEEDS_CONTEXT
    stream_of(stream)->put([=] { __atomic_store_n((uint64_t*)word, value, __ATOMIC_SEQ_CST); });
    return CUDA_SUCCESS;
}
API CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr word, cuuint64_t value, unsigned flags) {
    NEEDS_CONTEXT
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
    stream_of(stream)->put([=] {
        while ((int64_t)(__atomic_load_n((uint64_t*)word, __ATOMIC_SEQ_CST) - value) < 0) fake_sleep_us(POLL_US);
    });
    return CUDA_SUCCESS;
}
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    set_capture_mode((cudaStreamCaptureMode*)mode);
    return CUDA_SUCCESS;
}
