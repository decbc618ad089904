"""Hooks on FSDP2's hop between nodes: they train like native hybrid sharding."""
