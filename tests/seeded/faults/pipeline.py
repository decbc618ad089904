"""Faults of pipeline."""

from typing import Final

from tests.seeded.fault import Fault

PIPELINE: Final[tuple[Fault, ...]] = ()
