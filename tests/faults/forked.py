"""What every forked rank of a campaign does, whatever its work is."""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def work_and_exit(errors: Path, work: Callable[[], object]) -> NoReturn:
    """Do ``work`` in a process group of one's own, with standard error in a file, and end the process."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        faulthandler.register(signal.SIGUSR1)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
