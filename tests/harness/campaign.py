"""Whether the long form of tests was asked for, as `make campaign` does."""

import os
import random
from typing import Final

import pytest

IN_CAMPAIGN: Final = bool(os.environ.get("CROSSOVER_CAMPAIGN"))
only_in_campaign: Final = pytest.mark.skipif(
    not IN_CAMPAIGN,
    reason="takes longer than it tells: only with CROSSOVER_CAMPAIGN=1, as make campaign has it",
)
# Of tests with random faults: the same tree gives the same result twice, but in the campaign.
SEED: Final = random.SystemRandom().randrange(10**6) if IN_CAMPAIGN else 1
