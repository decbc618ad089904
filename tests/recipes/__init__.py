"""Tests of the recipes. Their directory is in pytest's `pythonpath`, so they can be imported."""

from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
