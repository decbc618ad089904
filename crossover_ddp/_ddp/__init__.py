"""DDP as a hook sees it: checks, a bucket's contents, its model, the end of its process group."""
