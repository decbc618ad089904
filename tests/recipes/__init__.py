"""Tests of the recipes. These are scripts that import each other by plain names, from their directory."""

import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
if str(RECIPES) not in sys.path:
    sys.path.insert(0, str(RECIPES))
