"""Faults of recipes, and of what their tests alone would see."""

from typing import Final

from tests.seeded.fault import Fault

RECIPES: Final[tuple[Fault, ...]] = (
    Fault(
        why="a second list of modules takes the place of the server's, and each rank imports all of them itself",
        path="tests/unit/turns/joined_segments.py",
        old='DEVICE = "dev0"\n',
        new='DEVICE = "dev0"\ncontext.set_forkserver_preload(["torch", "tests.harness._worker"])\n',
        tests=("tests/harness/test_preloaded.py", "tests/unit/turns/test_rank_turns.py"),
    ),
)
