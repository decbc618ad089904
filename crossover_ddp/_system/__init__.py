"""Services of Python, the kernel and the driver for the other wings: threads, processes, shared memory, devices."""
