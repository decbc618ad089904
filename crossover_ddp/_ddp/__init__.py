"""DDP as a hook sees it: checks, a bucket's model, and the end of its process group.

`refit` gives a model other buckets between two steps. Code that exchanges gradients is in `_engine`.
"""
