"""``python -m crossover_ddp.cli``: the command where its entry point is not on PATH."""

import sys

from crossover_ddp.cli import main

sys.exit(main())
