"""Services of the machine: shared memory, environment variables, devices, child processes.

Code that knows about process groups or gradients does not belong here.
"""
