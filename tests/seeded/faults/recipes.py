"""Faults of recipes."""

from typing import Final

from tests.seeded.fault import Fault

RECIPES: Final[tuple[Fault, ...]] = ()
