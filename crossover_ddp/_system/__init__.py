"""Services of the machine: shared memory, environment variables, devices, the CUDA driver."""
