"""The patterns of English that this project avoids stay rare, see `tests.rules.words`."""

from collections import Counter
from pathlib import Path

import pytest

from tests.rules.words import PATTERNS, places

ROOT = Path(__file__).resolve().parents[2]
# At most this many places of each pattern, in the order of `PATTERNS`. The numbers may only fall.
ALLOWED = {"crossover_ddp": (0, 12, 17, 0, 3, 0, 0, 8)}


@pytest.mark.parametrize("directory", ALLOWED)
def test_patterns_that_are_avoided_do_not_return(directory: str) -> None:
    found = [place for path in (ROOT / directory).rglob("*.py") for place in places(path)]
    counts = Counter(name for name, *_ in found)
    for name, allowed in zip(PATTERNS, ALLOWED[directory], strict=True):
        where = [
            f"{passage.path}:{passage.line}: {text}"
            for each, passage, text in found
            if each == name
        ]
        assert counts[name] <= allowed, where
