"""Faults of codecs."""

from typing import Final

from tests.seeded.fault import Fault

CODECS: Final[tuple[Fault, ...]] = ()
