"""What all containers of one machine have in common."""

import socket
from pathlib import Path
from typing import Final

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


def machine() -> str:
    """Return what all containers of one machine have in common until it boots again, or else the host's name."""
    try:
        return Path(_BOOT_ID).read_text().strip()
    except OSError:
        return socket.gethostname()
