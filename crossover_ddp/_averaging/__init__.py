"""Replicas that train on their own gradients and average parameters at intervals, or elastically.

The hooks and their states are in `crossover_ddp.averaging_hooks`. The exchange of gradients in
warm-up steps is in `crossover_ddp.comm_hooks`.
"""
