"""K-FAC between ranks with uneven inputs, in ways that the conformance table has not."""

import pytest
from torch.distributed.algorithms.join import Join

from tests.harness import run_ranks
from tests.multiprocess.kfac_training import Training


def train_unevenly(rank: int, world_size: int, decoupled: bool) -> list[float]:
    """Rank 1 has inputs for fewer steps; return the losses, and the sum of all parameters."""
    training = Training(rank, decoupled=decoupled, inv_update_steps=2)
    found = [training.step() for _ in range(3)]
    with Join([training.model]):
        for _ in range(4 if rank == 0 else 2):
            found.append(training.step())
    assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
    assert training.kfac.steps == 7
    return [*found, float(training.parameters().sum())]


@pytest.mark.parametrize("decoupled", [False, True])
def test_join_with_uneven_inputs_ends_with_the_same_model(decoupled: bool) -> None:
    first, second = run_ranks(train_unevenly, 2, args=(decoupled,))
    assert (len(first), len(second)) == (8, 6)
    assert all(0 < value < float("inf") for value in first[:-1])
    assert first[-1] == second[-1]
