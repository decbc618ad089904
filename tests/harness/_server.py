"""Imported last by the process that ranks are forked from, and by nothing else.

A full collection looks at every object that is not frozen: of what torch has made on import alone that is 0.2 s in
each rank after each test, and a copy of every page it touches.
"""

import atexit
import gc
import os

_server = os.getpid()


def _end_at_once() -> None:
    """Leave out the interpreter's end, at which triton complains of itself below pytest's last line."""
    if os.getpid() == _server:
        os._exit(0)


atexit.register(_end_at_once)
gc.collect()
gc.freeze()
