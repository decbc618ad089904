"""A hook exchanges over its model's process group, or an error names the group and a remedy."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from crossover_ddp import CrossoverState, crossover_hook
from crossover_ddp.codecs import CompressedState, compressed_hook
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.harness.networks import mlp
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, WIDTH, Training


@pytest.mark.torch_version
@pytest.mark.parametrize("way", WAYS)
@in_ranks(2)
def test_a_group_replaced_by_one_of_other_ranks_is_refused(rank: int, way: str) -> None:
    """Elastic shrinking replaces it. No rank waits for another one."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    training = Training(way, rank).run(4)
    training.model._update_process_group(alone)
    error = error_of(training.step)
    assert f"of ranks [0, 1], got a model whose group is now of ranks [{rank}]" in error
    assert "wrap the module in DistributedDataParallel again" in error


@pytest.mark.parametrize("way", ["split", "decoupled", "averaged"])
@in_ranks(2)
def test_a_group_replaced_by_one_of_the_same_ranks_changes_nothing(rank: int, way: str) -> None:
    found = []
    for replaces in (False, True):
        training = Training(way, rank).run(4)
        if replaces:
            training.model._update_process_group(dist.new_group([0, 1]))
        training.run(4).close()
        found.append(training.weights())
    assert all(map(lambda a, b: a.equal(b), *found))


@in_ranks(2)
def test_the_error_of_a_destroyed_group_names_the_users_group(rank: int) -> None:
    group = dist.new_group([0, 1])
    training = Training(registered_on(group), rank).run(3)
    dist.barrier()
    dist.destroy_process_group(group)
    assert error_of(training.step).startswith(
        "the process group that the hook was registered with was destroyed; wrap the module"
    )


def registered_on(group: dist.ProcessGroup) -> Any:
    """Return a way that registers the split with a group."""
    return lambda model, optimizers, mutex: (group, WAYS["split"](model, optimizers, mutex)[1])


@pytest.mark.quiet
@pytest.mark.parametrize("way", ["split", "int8", "decoupled"])
@in_ranks(2)
def test_the_error_of_a_timeout_suggests_that_a_rank_makes_fewer_steps(rank: int, way: str) -> None:
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
    error = error_of(lambda: training.run(4))
    assert "makes fewer steps than this one: give all ranks as many batches" in error


@pytest.mark.defect("strangers-8")
@pytest.mark.parametrize("way", ["split", "int8", "muon"])
@in_ranks(2)
def test_the_group_of_each_model_is_compared_with_the_hooks_group(rank: int, way: str) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    first = Training(way, rank)
    second = Training(way, rank, process_group=alone)
    error = error_of(lambda: (first.run(3), second.run(3)))
    assert error.startswith("expected the process group that DDP was given")


@pytest.mark.defect("strangers-18")
@in_ranks(4)
def test_hooks_train_beside_tensor_parallelism(rank: int) -> None:
    """On a mesh of two by two ranks the results are those of torch's own hook."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group = mesh["data"].get_group()
    found = []
    for state_and_hook in (
        (group, allreduce_hook),
        (group, reduce_scatter_all_gather_hook),
        (CrossoverState(group), crossover_hook),
        (CompressedState(None, process_group=group), compressed_hook),
    ):
        network = mlp(WIDTH, 8, WIDTH, seed=0, bias=False)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(network, mesh["tensor"], plan)
        way: Any = lambda *_, made=state_and_hook: made  # noqa: E731
        Training(way, group.rank(), module=network, device_mesh=mesh["data"]).run(3)
        found.append([parameter.to_local().detach().clone() for parameter in network.parameters()])
    assert all(all(map(torch.equal, each, found[0])) for each in found)
