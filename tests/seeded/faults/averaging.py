"""Faults of averaging."""

from typing import Final

from tests.seeded.fault import Fault

AVERAGING: Final[tuple[Fault, ...]] = ()
