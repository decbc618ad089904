"""Tests of the recipes, which import each other from their own directory: pytest's `pythonpath` has it."""

from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
