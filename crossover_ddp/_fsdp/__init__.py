"""Hooks on the hop between the nodes of FSDP2: they average its gradients over the nodes.

It uses the engine and the hooks as they are; see `shards` in ``_ddp`` for the model that they see.
"""
