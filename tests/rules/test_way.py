"""How long the way of a step is: the package's modules that one settled step of each hook enters."""

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import crossover_ddp
from tests.harness import run_ranks
from tests.harness.training import Training

PACKAGE = str(Path(crossover_ddp.__file__).parent)
SETTLED, SEEN = 9, 3  # none of the steps that are seen compares replicas
# At most so many modules. Whoever shortens a way lowers its number; the design wants 8 for averaging.
WAYS = {
    "split": 6,
    "crossover": 12,
    "decoupled": 9,
    "int8": 9,
    "averaged": 9,
    "muon": 10,
    "owned": 12,
    "kfac": 14,
}


class Modules:
    """The files of the package whose functions are called while it is open, on any thread begun after it was made."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.open = False
        sys.setprofile(self.note)
        threading.setprofile(self.note)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if self.open and event == "call" and file.startswith(PACKAGE):
            self.found.add(file.removeprefix(f"{PACKAGE}/").removesuffix(".py"))

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def modules_of(rank: int, world_size: int, way: str) -> set[str]:
    seen = Modules()
    try:
        training = Training(way, rank).run(SETTLED)
        seen.open = True
        training.run(SEEN)
    finally:
        seen.open = False
        seen.close()
    training.close()
    return seen.found


@pytest.mark.parametrize("way", WAYS)
def test_a_settled_step_enters_no_more_modules_than_today(way: str) -> None:
    found = sorted(set.union(*run_ranks(modules_of, 2, args=(way,))))
    assert 0 < len(found) <= WAYS[way], f"{len(found)}: {found}"
