"""``crossover-ddp advise``: what would pay for a job, from a short run of it."""
