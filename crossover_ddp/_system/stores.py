"""A helper for torch's key-value stores."""

import torch.distributed as dist


def innermost(store: dist.Store) -> dist.Store:
    """Return the store that remains when every ``PrefixStore`` around ``store`` is removed."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
