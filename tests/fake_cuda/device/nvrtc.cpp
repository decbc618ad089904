// The compiler of kernels: there is no device to compile for. All its other names fail.
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int) {
    return "the fake device does not cover NVRTC";
}
