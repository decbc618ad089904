"""Only the process that ranks are forked from imports this module, as its last one.

A full garbage collection visits every object that is not frozen. For the objects that torch makes
on import this takes 0.2 s in each rank after each test, and copies every page that it touches.
"""

import atexit
import gc
import os

_server = os.getpid()


def _end_at_once() -> None:
    """Exit without tearing the interpreter down: triton would warn then, below pytest's report."""
    if os.getpid() == _server:
        os._exit(0)


atexit.register(_end_at_once)
gc.collect()
gc.freeze()
