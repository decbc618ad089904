"""DDP as a hook sees it: checks, a bucket's model, and the end of its process group.

`torch_private` holds the private names of torch. Not here: any exchange of gradients (`_engine`).
"""
