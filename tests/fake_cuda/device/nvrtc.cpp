// The compiler of kernels. There is no device to compile for: all its other functions fail.
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int) {
    return "the fake device does not cover NVRTC";
}
