"""Services of the machine: shared memory, environment variables, devices, child processes.

Code that exchanges data or knows about gradients does not belong here.
"""
