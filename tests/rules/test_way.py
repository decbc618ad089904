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
# At most so many modules. Whoever shortens a way lowers its number.
WAYS = {"split": 6, "crossover": 12, "decoupled": 9, "int8": 9}
WAYS |= {"averaged": 8, "muon": 10, "owned": 12, "kfac": 14}


def modules_of(rank: int, world_size: int, way: str) -> set[str]:
    """Return the files of the package whose functions are called in some steps, on any thread begun before them."""
    found, is_open = set[str](), threading.Event()

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and is_open.is_set():
            found.add(file.removeprefix(f"{PACKAGE}/").removesuffix(".py"))

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        training = Training(way, rank).run(SETTLED)
        is_open.set()
        training.run(SEEN)
        is_open.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    training.close()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_settled_step_enters_no_more_modules_than_today(way: str) -> None:
    found = sorted(set.union(*run_ranks(modules_of, 2, args=(way,))))
    assert 0 < len(found) <= WAYS[way], f"{len(found)}: {found}"
