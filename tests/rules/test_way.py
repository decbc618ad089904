"""The number of the package's modules that one step of each hook enters, after the first steps."""

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import crossover_ddp
from tests.harness import run_ranks
from tests.harness.training import Training

PACKAGE = str(Path(crossover_ddp.__file__).parent)
# Steps before the measured ones, and measured steps. None of these compares replicas.
WARM_UP, MEASURED = 9, 3
# The largest number of modules allowed for each hook. A change that needs fewer lowers the number.
WAYS = {"split": 6, "crossover": 12, "decoupled": 10, "int8": 10}
WAYS |= {"averaged": 8, "muon": 9, "owned": 12, "kfac": 9}


def modules_of(rank: int, world_size: int, way: str) -> set[str]:
    """Return the package's modules whose functions the measured steps call, on all threads."""
    found = set[str]()
    is_measuring = threading.Event()

    def record(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and is_measuring.is_set():
            found.add(file.removeprefix(f"{PACKAGE}/").removesuffix(".py"))

    # Before the threads start: `threading.setprofile` holds for later ones only.
    sys.setprofile(record)
    threading.setprofile(record)
    try:
        training = Training(way, rank).run(WARM_UP)
        is_measuring.set()
        training.run(MEASURED)
        is_measuring.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    training.close()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_step_enters_no_more_modules_than_allowed(way: str) -> None:
    found = sorted(set.union(*run_ranks(modules_of, 2, args=(way,))))
    assert 0 < len(found) <= WAYS[way], f"{len(found)}: {found}"
