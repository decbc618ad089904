"""A hook that is set up wrongly, or on one rank only, is an error that names the mistake."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, KFACState, crossover_wrapper, kfac_hook
from crossover_ddp.codecs import Int8
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, Training, Way, decoupled, optimizers_of


@pytest.mark.defect("strangers-18")
@pytest.mark.parametrize("way", ["decoupled", "elastic", "split", "kfac"])
@in_ranks(2)
def test_replicate_is_refused_by_hooks_that_act_in_forward_and_else_trains_as_ddp(
    rank: int, way: str
) -> None:
    ours = Training(way, rank, wrap=replicate)
    plain = Training(way, rank, wrap=DistributedDataParallel)
    error = error_of(lambda: ours.run(4))
    if way in ("decoupled", "elastic"):
        assert "got replicate()" in error
    else:
        assert error == "no error"
        assert all(map(torch.equal, ours.model.parameters(), plain.run(4).model.parameters()))


@pytest.mark.defect("codecs-S2", "strangers-9")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "split"])
def test_a_state_serves_one_model_only(way: str) -> None:
    hooks: list[Any] = []
    first = Training(way, around=lambda hook: hooks.append(hook) or hook)
    second = Training(lambda *_: (first.state, hooks[0]))
    first.step()
    kind = type(first.state).__name__
    for _ in range(2):
        assert f"expected one model for each {kind}, got a bucket of another" in error_of(
            second.step
        )
    first.run(2)


SAME_STATE = {"wrapped": "crossover", "owned": "decoupled"}
# Each hook with no state, and with the states of the two next ways in the list.
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
        _, hook = WAYS[way](model, optimizers_of(way, model), mutex)
        if given == "none":
            return None, hook
        state, _ = WAYS[given](model, optimizers_of(given, model), mutex)
        return state, hook

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
def test_ranks_with_different_environments_are_an_error(rank: int, way: str, variable: str) -> None:
    with mock.patch.dict(os.environ, {} if rank else {variable: "1"}):
        message = error_of(Training(way, rank).run)
    assert message.startswith(f"expected the same {variable} on all ranks, got")


# The methods that rank 0 alone calls during training, each with a state that has the model's group.
CALLS: dict[str, Way] = {
    "load_state_dict": lambda model, optimizers, _: (
        KFACState(model, optimizers[0], process_group=model.process_group, codec=Int8()),
        kfac_hook,
    ),
    "drain": decoupled(codec=Int8(), defer="auto"),
}


@pytest.mark.parametrize("call", CALLS)
@in_ranks(2)
def test_a_rank_that_loads_or_drains_alone_is_an_error_on_all_ranks(rank: int, call: str) -> None:
    """The error comes in bounded time. On the rank that called the method it names the method."""
    training = Training(CALLS[call], rank, process_group=impatient_group(1.5)).run(5)
    given = [training.state.state_dict()] if call == "load_state_dict" else []
    if rank == 0:
        getattr(training.state, call)(*given)
    with pytest.raises(ExchangeError, match="restart the job" if rank else rf"{call}\(\)"):
        training.run(5)
    dist.barrier()
