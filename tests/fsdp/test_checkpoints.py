"""Checkpoints of FSDP2 with a hook between nodes: the state's own, and those of torch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import crossover_ddp as ddp
from crossover_ddp.fsdp import register_comm_hook
from tests.fsdp import small
from tests.fsdp.small import Training
from tests.harness import in_ranks

STEPS = 3


def compressed(mesh: Any) -> tuple[Training, ddp.CompressedState]:
    """Return a training whose gradients are coded, and its state."""
    torch.manual_seed(0)
    model = small.sharded(small.Network(), mesh["inside"])
    state = ddp.CompressedState(ddp.Int8(), process_group=mesh["between"].get_group())
    register_comm_hook(model, state, ddp.compressed_hook)
    return Training(model), state


def whole_residuals(state: ddp.CompressedState) -> dict[str, list[float]]:
    """Return the whole residuals, by the names of parameters. **Collective** within a node."""
    residuals = state.state_dict()["residuals"]
    return {name: each.full_tensor().flatten().tolist() for name, each in residuals.items()}


@in_ranks(4)
def test_a_checkpoint_with_residuals_resumes_to_the_bit(rank: int) -> None:
    mesh = small.mesh_of()
    training, state = compressed(mesh)
    training.run(*range(STEPS))
    saved = copy.deepcopy(state.checkpoint(training.optimizer))
    names = [name for name, _ in training.model.named_parameters()]
    assert sorted(saved["hook"]["residuals"]) == sorted(names)
    residuals = whole_residuals(state)
    assert any(any(each) for each in residuals.values())
    later = range(STEPS, 2 * STEPS)
    training.losses.clear()
    expected = training.run(*later).found()
    resumed, its_state = compressed(mesh)
    its_state.restore(saved, resumed.optimizer)
    assert whole_residuals(its_state) == residuals
    assert resumed.run(*later).found() == expected
    assert small.same_on_all_nodes(resumed.model, mesh)


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@in_ranks(4)
def test_residuals_are_saved_and_loaded_on_another_number_of_ranks(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """From two ranks in a node to one, two and four."""
    mesh = small.mesh_of()
    training, state = compressed(mesh)
    training.run(*range(STEPS))
    saved = state.checkpoint(training.optimizer)
    residuals, weights = whole_residuals(state), small.whole(training.model)
    dcp.save({"model": saved["model"], "hook": saved["hook"]["residuals"]}, checkpoint_id=tmp_path)
    # The same job in other nodes.
    if shape != (2, 2):
        mesh = small.mesh_of(shape)
    resumed, its_state = compressed(mesh)
    assert not any(any(each) for each in whole_residuals(its_state).values())
    loaded = {"model": resumed.model.state_dict(), "hook": its_state.state_dict()["residuals"]}
    dcp.load(loaded, checkpoint_id=tmp_path)
    resumed.model.load_state_dict(loaded["model"])
    its_state.load_state_dict({"residuals": loaded["hook"], "loss_scale": 1.0})
    assert whole_residuals(its_state) == residuals
    assert small.whole(resumed.model) == weights
    # The next step adds the residuals to the gradients, and travels exactly.
    torch.manual_seed(0)
    plain: Any = small.sharded(small.Network(), mesh)
    its_own = {"model": plain.state_dict()}
    dcp.load(its_own, checkpoint_id=tmp_path)
    plain.load_state_dict(its_own["model"])
    for model in (plain, resumed.model):
        small.loss_of(model, STEPS).backward()
    for (name, parameter), expected in zip(
        resumed.model.named_parameters(), plain.parameters(), strict=True
    ):
        with_residual = expected.grad.full_tensor().flatten() + torch.tensor(residuals[name])
        torch.testing.assert_close(parameter.grad.full_tensor().flatten(), with_residual)
    assert not any(any(each) for each in whole_residuals(its_state).values())


@in_ranks(4)
def test_native_hybrid_sharding_loads_a_checkpoint_of_a_hooked_model_and_back(
    rank: int, tmp_path: Path
) -> None:
    mesh = small.mesh_of()
    expected = Training(small.model_on(mesh)).run(*range(3 * STEPS)).found()
    trainings = [Training(small.model_on(mesh, make)) for make in (small.split, None, small.split)]
    losses: list[float] = []
    for number, training in enumerate(trainings):
        if number:
            # On an optimizer without state this call counts a step, so it comes before a load only.
            model, optimizer = get_state_dict(training.model, training.optimizer)
            before = tmp_path / str(number - 1)
            both = {"model": model, "optimizer": optimizer}
            dcp.load(both, checkpoint_id=before)
            set_state_dict(
                training.model,
                training.optimizer,
                model_state_dict=both["model"],
                optim_state_dict=both["optimizer"],
            )
        training.run(*range(number * STEPS, (number + 1) * STEPS))
        model, optimizer = get_state_dict(training.model, training.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / str(number))
        dist.barrier()
        losses += training.losses
    assert (losses, small.whole(trainings[-1].model)) == expected


@in_ranks(4)
def test_drain_leaves_no_residual(rank: int) -> None:
    training, state = compressed(small.mesh_of())
    training.run(*range(STEPS))
    assert state.stats()["residual_bytes"] > 0
    state.drain()
    training.step(STEPS)
    assert not any(any(each) for each in whole_residuals(state).values())
