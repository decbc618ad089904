"""Replicas that train on their own gradients: parameters averaged at intervals, or elastically.

Not here: the hooks and their states (`crossover_ddp.averaging_hooks`), and the exchange of
gradients in warm-up steps (`crossover_ddp.comm_hooks`).
"""
