"""Checkpoints of two ranks: contents and refusals. tests/conformance resumes jobs from them."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import crossover_ddp as ddp
from crossover_ddp._engine import states
from crossover_ddp._owners import owned_state
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.harness.networks import mlp
from tests.harness.oracles import error_of, heard
from tests.harness.training import WIDTH, Training

PATIENCE_S = 3.0


# A function that makes a state for a model and its optimizers, and the state's hook.
KINDS: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "owners": (
        lambda _, optimizers: ddp.OwnerState(optimizers[0]),
        ddp.owner_hook,
    ),
    "replicas": (lambda *_: ddp.LocalSGDState(4), ddp.local_sgd_hook),
    "codec": (
        lambda model, _: ddp.CompressedState(ddp.Int8(), process_group=model.process_group),
        ddp.compressed_hook,
    ),
}


def training_of(kind: str, rank: int, group: dist.ProcessGroup | None = None) -> Training:
    make, hook = KINDS[kind]
    return Training(
        lambda model, optimizers, _: (make(model, optimizers), hook),
        rank,
        module=mlp(WIDTH, WIDTH, WIDTH, seed=1),
        optimizers=lambda model: [torch.optim.Adam(model.parameters(), lr=0.01)],
        process_group=group,
    )


def listed(value: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, value)


@pytest.mark.parametrize("kind", ["owners", "replicas", "codec"])
@in_ranks(2)
def test_a_checkpoint_is_the_same_on_all_ranks_and_for_plain_ddp(
    rank: int, kind: str
) -> dict[str, Any]:
    training = training_of(kind, rank).run(3)
    (optimizer,) = training.optimizers
    with heard() as messages:
        saved = copy.deepcopy(training.state.checkpoint(optimizer))
        training.model.state_dict()
    assert not messages, "a warning that the state dict is that of one replica"
    assert saved.keys() == {"model", "optimizer", "hook"}
    # A training loop that saves without checkpoint() saves the same now.
    assert listed(training.model.module.state_dict()) == listed(saved["model"])
    assert listed(optimizer.state_dict()) == listed(saved["optimizer"])
    assert len(saved["optimizer"]["state"]) == len([*training.model.parameters()])
    assert int(saved["optimizer"]["state"][0]["step"]) == 3
    # Plain DDP can load it.
    plain = mlp(WIDTH, WIDTH, WIDTH, seed=2)
    plain.load_state_dict(saved["model"])
    torch.optim.Adam(plain.parameters()).load_state_dict(saved["optimizer"])
    one = training.run(1).state.checkpoint(optimizer, to=1)
    assert one.keys() == (saved.keys() if rank == 1 else set())
    return saved


@in_ranks(2)
def test_one_rank_alone_is_warned_and_refused_in_bounded_time(rank: int) -> None:
    training = training_of("codec", rank, impatient_group(PATIENCE_S)).run(2)
    text = ""
    with mock.patch.object(states, "_PATIENCE_S", 0.5), heard() as messages:
        if rank == 0:
            text = error_of(lambda: training.state.checkpoint(training.optimizers))
        dist.barrier()
    assert rank or "checkpoint()" in text
    warning = "call it on all ranks, not inside of `if rank == 0:`"
    assert (warning in " ".join(messages)) == (rank == 0)


@in_ranks(2)
def test_ranks_that_call_with_other_arguments_are_refused(rank: int) -> None:
    training = training_of("owners", rank).run(2)
    message = r"expected the same to on all ranks, got to by rank \{0: 0, 1: 1\}"
    with pytest.raises(UnsupportedConfigurationError, match=message):
        training.state.checkpoint(to=rank)
    training.state.checkpoint()  # the group can still be used
    with pytest.raises(ValueError, match="expected 0 <= to < 2, got to=2"):
        training.state.checkpoint(to=2)


def collectives_to_consolidate(layers: int, rank: int) -> tuple[int, Training]:
    module = mlp(*[WIDTH] * (layers + 1), seed=1)
    way = KINDS["owners"][0]
    training = Training(
        lambda model, optimizers, _: (way(model, optimizers), ddp.decoupled_hook),
        rank,
        module=module,
        optimizers=lambda model: [torch.optim.Adam(model.parameters(), lr=0.01)],
    ).run(2)
    noted = []
    names = [name for name in vars(dist) if name.startswith(("all_", "broadcast", "gather"))]
    with contextlib.ExitStack() as stack:
        for name in names:
            noted.append(
                stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            )
        training.state.consolidate()
    return sum(each.call_count for each in noted), training


@in_ranks(2)
def test_owners_state_travels_in_few_collectives_whatever_the_number_of_parameters(
    rank: int,
) -> None:
    few, _ = collectives_to_consolidate(2, rank)
    many, training = collectives_to_consolidate(10, rank)
    assert few == many == 1
    saved = listed(copy.deepcopy(training.optimizer.state_dict()))
    # In exchanges of one state each the result is the same.
    with mock.patch.object(owned_state, "_EXCHANGED_BYTES", 1):
        more, again = collectives_to_consolidate(10, rank)
    assert more > many
    assert listed(again.optimizer.state_dict()) == saved
