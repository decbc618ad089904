"""The group that a hook exchanges over is the model's, or an error says which one is not, and what to change."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, Training


@pytest.mark.torch_version
@pytest.mark.parametrize("way", WAYS)
@in_ranks(2)
def test_a_group_exchanged_for_one_of_other_ranks_is_refused(rank: int, way: str) -> None:
    """As elastic shrinking does; the other rank is not waited for."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    training = Training(way, rank).run(4)
    training.model._update_process_group(alone)
    told = error_of(training.step)
    assert f"of ranks [0, 1], got a model whose group is now of ranks [{rank}]" in told
    assert "wrap the module in DistributedDataParallel again" in told


@pytest.mark.parametrize("way", ["split", "decoupled", "averaged"])
@in_ranks(2)
def test_a_group_exchanged_for_one_of_the_same_ranks_trains_on(rank: int, way: str) -> None:
    found = []
    for exchanges in (False, True):
        training = Training(way, rank).run(4)
        if exchanges:
            training.model._update_process_group(dist.new_group([0, 1]))
        training.run(4).close()
        found.append(training.weights())
    assert all(map(lambda a, b: a.equal(b), *found))


@in_ranks(2)
def test_the_error_of_a_destroyed_group_says_whose_group_it_was(rank: int) -> None:
    group = dist.new_group([0, 1])
    training = Training(registered_on(group), rank).run(3)
    dist.barrier()
    dist.destroy_process_group(group)
    told = error_of(training.step)
    assert told.startswith(
        "the process group that the hook was registered with was destroyed; wrap the module"
    )


def registered_on(group: dist.ProcessGroup) -> Any:
    return lambda model, optimizers, mutex: (group, WAYS["split"](model, optimizers, mutex)[1])


@pytest.mark.quiet
@pytest.mark.parametrize("way", ["split", "int8", "decoupled"])
@in_ranks(2)
def test_a_rank_that_makes_fewer_steps_is_suspected_in_words(rank: int, way: str) -> None:
    group = impatient_group(3)
    made = WAYS[way]

    def on_group(model: Any, optimizers: Any, mutex: Any) -> Any:
        state, hook = made(model, optimizers, mutex)
        if state is None:
            return group, hook
        state.process_group = group
        return state, hook

    training = Training(on_group, rank, process_group=group).run(5)
    if rank == 0:
        time.sleep(5)
        return
    told = error_of(lambda: training.run(4))
    assert "makes fewer steps than this one: give all ranks as many batches" in told
