"""Faults of owners."""

from typing import Final

from tests.seeded.fault import Fault

OWNERS: Final[tuple[Fault, ...]] = ()
