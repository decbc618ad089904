"""Services of the machine: shared memory, environment variables, devices, child processes.

Not here: anything that knows of process groups or gradients.
"""
