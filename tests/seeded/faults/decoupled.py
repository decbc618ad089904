"""Faults of decoupled."""

from typing import Final

from tests.seeded.fault import Fault

DECOUPLED: Final[tuple[Fault, ...]] = ()
