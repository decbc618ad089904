"""Decoupled training: reduce-scatter in backward, all-gather and update in the next forward."""
