"""Other people's loops with virtual ranks have one hash on any number of ranks, also when resumed."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.harness import spawn_script

from .test_loops import ENVIRONMENT, LOOPS, TIMEOUT_S

WORKER = Path(__file__).with_name("loops_virtual.py")


def hashes(
    loop: str, ranks: int, directory: Path, first: int = 0, epochs: int = 2
) -> tuple[list[str], str]:
    """Train some epochs. Return a hash of the losses of each, and one of the weights."""
    directory.mkdir(exist_ok=True)
    arguments = [loop, str(directory), str(first), str(epochs)]
    with spawn_script(
        WORKER, ranks, args=arguments, environment=ENVIRONMENT, cwd=directory, forked=True
    ) as spawned:
        printed = "".join(spawned.wait(TIMEOUT_S))
    (losses,), (weights,) = (
        re.findall(f"^{name} (.+)$", printed, re.M) for name in ("losses", "weights")
    )
    return losses.split(), weights


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return hashes("by_hand", 2, tmp_path_factory.mktemp("by_hand"))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("loop", ["lightning", "manual", "fabric", "accelerate"])
def test_a_loop_resumed_on_other_ranks_has_the_hash_of_one_by_hand(
    loop: str, sizes: tuple[int, int], by_hand: tuple[list[str], str], tmp_path: Path
) -> None:
    packages = LOOPS["lightning" if loop == "manual" else loop]
    if any(importlib.util.find_spec(package) is None for package in packages):
        pytest.skip(f"needs {packages}: pip install '.[loops]'")
    losses, weights = by_hand
    assert len({*losses}) == 2
    assert hashes(loop, sizes[0], tmp_path, epochs=1)[0] == losses[:1]
    assert hashes(loop, sizes[1], tmp_path, first=1) == (losses[1:], weights)
