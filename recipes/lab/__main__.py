"""``python recipes/lab``: the command line of the emulated cluster."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put this directory first. The package `lab` is found in the one above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from lab.command import main

    sys.exit(main())
