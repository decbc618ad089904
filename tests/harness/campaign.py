"""Whether tests run in their long form, as in `make campaign`."""

import os
import random
from typing import Final

import pytest

IN_CAMPAIGN: Final = bool(os.environ.get("CROSSOVER_CAMPAIGN"))
only_in_campaign: Final = pytest.mark.skipif(
    not IN_CAMPAIGN,
    reason="takes long and rarely finds more: runs with CROSSOVER_CAMPAIGN=1, as in make campaign",
)
# The seed of tests with random faults. It is fixed outside of the campaign, so that two runs of the
# same tree have the same result.
SEED: Final = random.SystemRandom().randrange(10**6) if IN_CAMPAIGN else 1
