"""Finds a name for this machine that all its containers share."""

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
