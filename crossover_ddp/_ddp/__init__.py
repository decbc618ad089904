"""DDP as a hook sees it: checks, a bucket's model, and the end of its process group.

`refit` gives a model other buckets between two steps.

`torch_private` holds the private names of torch. Not here: any exchange of gradients (`_engine`).
"""
