"""What the rest asks of Python, the kernel and the driver: threads, processes, shared memory, devices, environment."""
