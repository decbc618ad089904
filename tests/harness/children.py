"""Child processes, as the lab has them."""

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "recipes")
)  # pytest has it already, other programs have not

from lab.children import Child, end, wait_any

__all__ = ["Child", "end", "wait_any"]
