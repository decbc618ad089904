"""Deferred updates: buckets between backward, ``step()`` and the next forward, and guarded reads.

Not here: the journeys and the states that users make (`crossover_ddp.decoupled_hooks` and
`crossover_ddp.owner_hooks`), and taking an optimizer's step in parts (`_owners.optimizer`).
"""
