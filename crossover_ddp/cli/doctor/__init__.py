"""``crossover-ddp doctor``: what to expect of this machine, and what to set."""
