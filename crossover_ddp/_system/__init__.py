"""Services of Python, the kernel and the CUDA driver: threads, shared memory, devices."""
