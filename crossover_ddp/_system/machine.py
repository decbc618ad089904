"""A name for this machine that all its containers share, and its C compiler."""

import os
import shlex
import socket
from pathlib import Path
from typing import Final

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


def machine() -> str:
    """Return the machine's boot id, which all its containers share.

    Without a boot id, return the host name.
    """
    try:
        return Path(_BOOT_ID).read_text().strip()
    except OSError:
        return socket.gethostname()


def c_compiler() -> list[str]:
    """Return the command of the C compiler, which the variable ``CC`` may name."""
    return shlex.split(os.environ.get("CC") or "cc")
