"""Faults of kfac."""

from typing import Final

from tests.seeded.fault import Fault

KFAC: Final[tuple[Fault, ...]] = ()
