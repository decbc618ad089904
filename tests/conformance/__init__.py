"""Every hook against plain DDP in every situation that DDP knows.

A new hook adds a row to ``hooks.HOOKS``, a new situation a function to ``cases``; nothing else changes.
"""
