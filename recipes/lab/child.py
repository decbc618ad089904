"""Turn into a rank: die with the lab, run on one core, then become the command.

``processes.start`` runs it as ``python -I -S child.py <lab's pid> <core or -> command …``.
It imports next to nothing, so that a rank starts fast; and being a program of its own it
needs no code between fork and exec in a lab that may have threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do as the arguments say; return only if that fails."""
    parent, core, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The lab may have died before the line above: then nobody sends that signal.
    if os.getppid() != int(parent):
        sys.exit("the lab ended before this rank began")
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    # Python ignores it, and an ignored signal is inherited; a shell's pipes want it.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
