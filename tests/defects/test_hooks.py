"""Known defects of hooks in general: training without an exchange, on the wrong ranks, or with another hook's state."""

import contextlib
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, KFACState, crossover_hook, crossover_wrapper, kfac_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import CrossoverError, ExchangeError, UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.harness.networks import mlp
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, WIDTH, Training, Way, decoupled, optimizers_of


@pytest.mark.defect("strangers-17")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("way", "whole"), [("split", True), ("decoupled", False)])
def test_the_python_reducer_is_refused_in_compiled_autograd(way: str, whole: bool) -> None:
    compiled = pytest.importorskip("torch._dynamo.compiled_autograd")
    refused = pytest.raises(UnsupportedConfigurationError, match="python_reducer")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=whole):
        training = Training(way, module=mlp(WIDTH, WIDTH, seed=0))
        if whole:
            with refused:
                torch.compile(training.backward, backend="eager")()
        else:
            with refused, compiled._enable(torch.compile(backend="eager")):
                training.backward()
    with contextlib.suppress(CrossoverError):
        training.close()
    torch._dynamo.reset()


@pytest.mark.defect("strangers-18")
@pytest.mark.parametrize("way", ["decoupled", "elastic", "split", "kfac"])
@in_ranks(2)
def test_replicate_is_refused_where_forward_matters_and_else_trains_as_ddp(
    rank: int, way: str
) -> None:
    ours, plain = (Training(way, rank, wrap=wrap) for wrap in (replicate, DistributedDataParallel))
    told = error_of(lambda: ours.run(4))
    if way in ("decoupled", "elastic"):
        assert "got replicate()" in told
    else:
        assert told == "no error"
        assert all(map(torch.equal, ours.model.parameters(), plain.run(4).model.parameters()))


@pytest.mark.defect("strangers-18")
@in_ranks(4)
def test_hooks_go_with_tensor_parallelism(rank: int) -> None:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), []
    group = mesh["data"].get_group()
    for made in (
        (group, allreduce_hook),
        (group, reduce_scatter_all_gather_hook),
        (CrossoverState(group), crossover_hook),
        (CompressedState(None, process_group=group), compressed_hook),
    ):
        network = mlp(WIDTH, 8, WIDTH, seed=0, bias=False)
        parallelize_module(
            network, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        Training(
            lambda *_, made=made: made, group.rank(), module=network, device_mesh=mesh["data"]
        ).run(3)
        found.append([parameter.to_local().detach().clone() for parameter in network.parameters()])
    assert all(all(map(torch.equal, each, found[0])) for each in found)


@pytest.mark.defect("strangers-8")
@pytest.mark.parametrize("way", ["split", "int8", "muon"])
@in_ranks(2)
def test_each_model_is_compared_with_the_hooks_group(rank: int, way: str) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    first, second = Training(way, rank), Training(way, rank, process_group=alone)
    message = error_of(lambda: (first.run(3), second.run(3)))
    assert message.startswith("expected the process group that DDP was given")


@pytest.mark.defect("codecs-S2", "strangers-9")
@pytest.mark.parametrize(
    ("way", "world_size"), [("int8", 2), ("averaged", 1), ("decoupled", 1), ("kfac", 1)]
)
@in_ranks()
def test_a_state_serves_one_model(rank: int, way: str) -> None:
    hooks: list[Any] = []
    first = Training(way, rank, around=lambda hook: hooks.append(hook) or hook)
    second = Training(lambda *_: (first.state, hooks[0]), rank)
    first.step()
    assert re.search("(state|KFACState) for each model|one model for each", error_of(second.step))


SAME_STATE = {"wrapped": "crossover", "owned": "decoupled"}
# Each hook with no state, and with those of the two ways behind it in the list.
OTHERS = [
    (way, given)
    for place, way in enumerate(WAYS)
    for given in ("none", *([*WAYS, *WAYS][place + 1 : place + 3]))
    if SAME_STATE.get(way, way) != SAME_STATE.get(given, given)
    and (way, given) != ("split", "none")
]


@pytest.mark.defect("strangers-30")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("way", "given"), OTHERS)
def test_another_hooks_state_is_refused(way: str, given: str) -> None:
    def mixed_up(model: DistributedDataParallel, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
        hook = WAYS[way](model, optimizers_of(way, model), mutex)[1]
        return None if given == "none" else WAYS[given](model, optimizers_of(given, model), mutex)[
            0
        ], hook

    training = Training(mixed_up)
    for _ in range(2):
        with pytest.raises(UnsupportedConfigurationError, match=r"got (state|process_group)="):
            training.backward()


@pytest.mark.defect("strangers-30")
@pytest.mark.usefixtures("process_group")
def test_a_wrapped_hook_takes_no_codec() -> None:
    training = Training(
        lambda *_: (CrossoverState(codec=Int8()), crossover_wrapper(allreduce_hook))
    )
    with pytest.raises(
        UnsupportedConfigurationError, match="expected codec=None for crossover_wrapper, got"
    ):
        training.backward()


@pytest.mark.defect("strangers-23")
@pytest.mark.parametrize(
    ("way", "variable"),
    [
        *((way, "CROSSOVER_DISABLE") for way in ("int8", "muon", "averaged")),
        ("crossover", "CROSSOVER_GROUP"),
    ],
)
@in_ranks(2)
def test_ranks_of_other_environments_are_told(rank: int, way: str, variable: str) -> None:
    with mock.patch.dict(os.environ, {} if rank else {variable: "1"}):
        message = error_of(Training(way, rank).run)
    assert message.startswith(f"expected the same {variable} on all ranks, got")


# What rank 0 alone calls in mid-training; states have the model's own group.
CHANGED: dict[str, Way] = {
    "load_state_dict": lambda model, optimizers, _: (
        KFACState(model, optimizers[0], process_group=model.process_group, codec=Int8()),
        kfac_hook,
    ),
    "drain": decoupled(codec=Int8(), defer="auto"),
}


@pytest.mark.parametrize("call", CHANGED)
@in_ranks(2)
def test_who_loads_or_drains_alone_in_mid_training_is_told(rank: int, call: str) -> None:
    """All ranks get an error in bounded time, and the one that did so hears what is to be called on all."""
    training = Training(CHANGED[call], rank, process_group=impatient_group(1.5)).run(5)
    given = [training.state.state_dict()] if call == "load_state_dict" else []
    if rank == 0:
        getattr(training.state, call)(*given)
    with pytest.raises(ExchangeError, match="restart the job" if rank else rf"{call}\(\)"):
        training.run(5)
    dist.barrier()
