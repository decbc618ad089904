"""average(), averaged(), state_dict() and checkpoint() of replicas that are averaged."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of, heard
from tests.multiprocess.averaged_training import averaged, in_bfloat16, spread


@pytest.mark.defect("strangers-23")
@pytest.mark.parametrize("elastic", [False, True])
@in_ranks(2, environment={"CROSSOVER_DISABLE": "1"})
def test_a_disabled_state_takes_all_calls(rank: int, elastic: bool) -> None:
    state = ElasticState(2) if elastic else LocalSGDState(2)
    training = averaged(state).run(3)
    before = training.values
    state.average()
    with state.averaged():
        training.model.state_dict()
    assert torch.equal(training.values, before)
    assert spread(training.values) == 0
    state.close()


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_state_dicts_warn_once_of_one_replica_and_of_exchanges_in_flight(rank: int) -> None:
    """The second one would lose an outer step of DiLoCo when the job resumes."""
    outer = functools.partial(torch.optim.SGD, lr=0.7)
    training = averaged(LocalSGDState(2, delay=1, outer_optimizer=outer)).run(2)
    of_one_replica = []
    with heard() as warnings:

        def save() -> None:
            training.model.state_dict()
            of_one_replica.append(sum("enter state.averaged()" in each for each in warnings))

        with training.state.averaged():
            save()
            training.state.state_dict()
        assert not warnings
        save()
        training.run(1)
        save()
        training.run(1).state.state_dict()
        assert "does not hold the exchanges in flight after step 4" in warnings[-1]
        training.state.average()
        save()
    training.close()
    assert of_one_replica == [0, 1, 1, 1]
    assert len(warnings) == 2


@pytest.mark.parametrize("kind", ["local", "elastic", "async"])
@in_ranks(2)
def test_means_and_checkpoints_may_be_asked_for_in_inference_mode(rank: int, kind: str) -> None:
    """As in an evaluation. Other threads write to the memory in which parameters travel."""

    def state() -> Any:
        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
        if kind == "local":
            return LocalSGDState(2, delay=1, outer_optimizer=outer)
        return ElasticState(2, "async" if kind == "async" else "sync")

    trainings = [averaged(state()).run(3) for _ in range(2)]
    saved = []
    for training, mode in zip(trainings, (torch.inference_mode(), torch.no_grad()), strict=True):
        with mode:
            if kind == "local":
                with training.state.averaged():
                    saved.append(training.values.clone())
            training.state.average()
            saved.append(training.values.clone())
            training.state.checkpoint(training.optimizers)
        training.run(2)
        saved.append(training.values.clone())
        training.close()
    half = len(saved) // 2
    if kind != "async":  # whose means depend on when ranks meet
        assert all(map(torch.equal, saved[:half], saved[half:]))
    assert all(bool(each.isfinite().all()) for each in saved)


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_a_mean_that_one_rank_asks_for_is_an_error(rank: int) -> None:
    group = impatient_group(2)
    training = averaged(LocalSGDState(2, process_group=group), process_group=group)

    def train() -> None:
        training.run(3)
        with training.state.averaged() if rank == 0 else contextlib.nullcontext():
            pass
        training.run(3)

    assert error_of(train) != "no error"
    training.close()


@pytest.mark.parametrize("call", ["average", "averaged", "checkpoint"])
@in_ranks(2)
def test_a_mean_inside_of_averaged_is_refused(rank: int, call: str) -> None:
    """On one rank alone as well. The block then ends as usual."""
    state = LocalSGDState(4, delay=3, outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7))
    training = averaged(state).run(5)
    assert state.stats()["in_flight"]
    before = training.values
    message = "no error"

    def take_mean() -> None:
        if call == "average":
            state.average()
        elif call == "checkpoint":
            state.checkpoint(training.optimizer)
        else:
            with state.averaged():
                pass

    with state.averaged():
        mean = training.values
        if rank == 0:
            message = error_of(take_mean)
        assert torch.equal(training.values, mean)
    assert rank or f"{call}() was called inside of state.averaged()" in message
    assert torch.equal(training.values, before)
    assert error_of(take_mean) == "no error"
    training.close()


@in_ranks(2)
def test_an_optimizers_state_that_is_not_finite_is_refused_before_anything_is_written(
    rank: int,
) -> None:
    training = averaged(LocalSGDState(4)).run(2)
    state = training.optimizer.state[training.model.module.weight]
    own = torch.full((4, 4), float(rank))
    own[0, 0] = float("inf") if rank else 0.0
    state["momentum_buffer"] = own.clone()
    before = training.values
    message = error_of(lambda: training.state.checkpoint(training.optimizer))
    assert "expected finite state of the optimizers on all ranks" in message
    assert ("this rank's are among them" in message) == (rank == 1)
    assert torch.equal(state["momentum_buffer"], own)
    assert torch.equal(training.values, before)
    training.close()


class Resumed(NamedTuple):
    """A job that is saved and resumed."""

    state: Callable[[Any], Any]  # made of the outer optimizer
    network: Callable[[], nn.Module | None]
    steps: int  # before the checkpoint


OUTER = [functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), torch.optim.Adam]
RESUMED = {
    "bfloat16": Resumed(lambda _: ElasticState(1, "sync", 0.05), in_bfloat16, 3),
    # All other fragments have made an outer step.
    "first_fragment_has_left": Resumed(
        lambda outer: LocalSGDState(8, 0, 4, outer_optimizer=outer), lambda: None, 7
    ),
    # The layer has a single parameter.
    "a_fragment_is_empty": Resumed(
        lambda outer: LocalSGDState(2, 0, 2, outer_optimizer=outer), nn.PReLU, 5
    ),
}


@pytest.mark.parametrize("case", RESUMED)
@in_ranks(2)
def test_a_resumed_job_has_the_bits_of_the_one_that_was_saved(rank: int, case: str) -> None:
    make, network, steps = RESUMED[case]
    for outer in OUTER:
        training = averaged(make(outer), network()).run(steps)
        resumed = averaged(make(outer), network())
        saved = copy.deepcopy(training.state.checkpoint(training.optimizer))
        resumed.state.restore(saved, resumed.optimizer)
        resumed.steps = steps
        assert torch.equal(training.run(9).values, resumed.run(9).values)
        training.close()
        resumed.close()


@in_ranks(2)
def test_training_inside_of_averaged_is_refused(rank: int) -> None:
    training = averaged(LocalSGDState(2)).run(3)
    with (
        training.state.averaged(),
        pytest.raises(
            UnsupportedConfigurationError, match=r"no backward\(\) of the DDP model inside"
        ),
    ):
        training.step()
    training.drop()
    training.run(2).close()
