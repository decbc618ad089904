"""Every hook against plain DDP, in every situation of DDP.

A new hook adds a row to ``hooks.HOOKS``. A new situation adds a function to ``cases``. Nothing else
changes.
"""
