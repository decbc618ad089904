"""Runs ``python -m crossover_ddp.cli``, for use where the entry point is not on PATH."""

import sys

from crossover_ddp.cli import main

sys.exit(main())
