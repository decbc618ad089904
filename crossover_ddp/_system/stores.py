"""Torch's key-value stores."""

import torch.distributed as dist


def innermost(store: dist.Store) -> dist.Store:
    """Return the store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
