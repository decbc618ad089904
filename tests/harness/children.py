"""The recipes' child processes, for tests."""

import sys
from pathlib import Path

# pytest has this directory on its path already (pyproject.toml), other programs have not.
sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes"))

from crossover_ddp._system.children import Child, end, wait_any

__all__ = ["Child", "end", "wait_any"]
