"""Services of the machine: shared memory, environment variables, devices, child processes.

`torch_private` holds the private names of torch. Code that exchanges data or knows about gradients
does not belong here.
"""
