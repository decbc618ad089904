"""Faults of turns."""

from typing import Final

from tests.seeded.fault import Fault

TURNS: Final[tuple[Fault, ...]] = ()
