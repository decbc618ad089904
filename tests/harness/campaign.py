"""Whether the long form of tests was asked for, as `make campaign` does."""

import os
from typing import Final

IN_CAMPAIGN: Final = bool(os.environ.get("CROSSOVER_CAMPAIGN"))
