"""Seeds of virtual ranks, and generators that continue afterwards as before."""

import itertools
import random
import sys

import numpy as np
import pytest
import torch

from crossover_ddp._virtual.seeds import mixed, seeded


def draw() -> tuple[float, ...]:
    """Draw from all generators."""
    return float(torch.rand(())), random.random(), float(np.random.random())


def test_all_generators_depend_on_the_seed() -> None:
    drawn = []
    for seed in (1, 2, 1):
        with seeded(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert all(one != two for one, two in zip(drawn[0], drawn[1], strict=True))


@pytest.mark.parametrize("raises", [False, True])
def test_all_generators_continue_as_before(raises: bool) -> None:
    with seeded(3):
        undisturbed = [draw() for _ in range(3)]
    with seeded(3):
        first = draw()
        try:
            with seeded(4):
                inner = draw()
                if raises:
                    raise KeyError("ours")
        except KeyError:
            pass
        assert [first, draw(), draw()] == undisturbed
        with seeded(4):
            assert draw() == inner


def test_a_seed_may_have_63_bits() -> None:
    with seeded(2**63 - 1):
        most = draw()
    with seeded(2**62 - 1):
        assert draw() != most


def test_numpy_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.random.get_state()[1].tolist()
    monkeypatch.delitem(sys.modules, "numpy")
    with seeded(1):
        pass
    assert "numpy" not in sys.modules
    assert np.random.get_state()[1].tolist() == before


def test_a_hash_depends_on_each_part_and_its_place() -> None:
    numbers = (0, 1, 2, 12, 2**40)
    parts = [
        (seed, kind, step, v)
        for seed, step, v in itertools.product(numbers, repeat=3)
        for kind in ("batch", "micro-batch", "samples")
    ]
    found = {mixed(*each) for each in parts}
    assert len(found) == len(parts)
    assert all(0 <= each < 2**63 for each in found)
    assert mixed(1, 23) != mixed(12, 3) != mixed(1, 2, 3)


def test_a_hash_is_the_same_in_each_process_and_release() -> None:
    """Another hash would change the random numbers of a job that is resumed."""
    assert mixed(3, "micro-batch", 7, 5) == 8496284929728776233
