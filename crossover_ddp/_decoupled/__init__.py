"""Deferred updates: buckets between backward, ``step()`` and the next forward, and guarded reads.

The journeys, and the states that users create, are in `crossover_ddp.decoupled_hooks` and
`crossover_ddp.owner_hooks`. `_owners.optimizer` takes an optimizer's step in parts.
"""
