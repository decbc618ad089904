"""Models, hooks and loops that virtual ranks refuse by name, and training that continues."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from crossover_ddp import UnsupportedConfigurationError, VirtualRanks
from tests.harness import in_ranks, run_ranks, single_process_group
from tests.harness.oracles import error_of

from .jobs import LENGTH, Job, Running, hash_of_job, optimizers_of


@pytest.fixture
def alone() -> Iterator[None]:
    with single_process_group():
        yield


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def model_of(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or linear(), **options)


def train(
    model: DistributedDataParallel, ranks: VirtualRanks, inputs: torch.Tensor | None = None
) -> None:
    """Run the micro-batches of a step."""
    for _ in ranks.own:
        with ranks.micro_batch():
            model(torch.ones(2, 4) if inputs is None else inputs).sum().backward()


# --- models ---


def frozen_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))


def complex_module() -> nn.Module:
    module = linear()
    module.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return module


def with_sync_batch_norm() -> DistributedDataParallel:
    model = model_of()
    model.module.append(nn.SyncBatchNorm(4))  # DDP itself refuses it on a CPU, if it sees it
    return model


def with_batch_norm(**options: Any) -> DistributedDataParallel:
    return model_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_sync_batch_norm, "SyncBatchNorm in '2': .* use BatchNorm"),
        (
            lambda: with_batch_norm(broadcast_buffers=False),
            "broadcast_buffers=False and running statistics in '1': .* broadcast_buffers=True",
        ),
        (lambda: model_of(find_unused_parameters=True), "find_unused_parameters=True: .* uses p"),
        (lambda: model_of(static_graph=True), "static_graph=True: .* leave static_graph out"),
        (lambda: model_of(complex_module()), "complex parameter 'phase': use pairs of real"),
    ],
)
def test_models_are_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=words):
        VirtualRanks(make(), 2)


@pytest.mark.usefixtures("alone")
def test_similar_models_are_accepted() -> None:
    for model in (with_batch_norm(), model_of(frozen_batch_norm(), broadcast_buffers=False)):
        model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
        ranks = VirtualRanks(model, 2)
        train(model, ranks)
        assert ranks.step == 1


@pytest.mark.usefixtures("alone")
def test_a_second_object_for_a_model_is_refused_and_the_first_one_trains() -> None:
    model = model_of()
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    ranks = VirtualRanks(model, 2)
    with pytest.raises(UnsupportedConfigurationError, match="has virtual ranks already; use the"):
        VirtualRanks(model, 2)
    train(model, ranks)
    assert ranks.step == 1


@pytest.mark.usefixtures("alone")
def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(TypeError, match="got model=Sequential; wrap the model first"):
        VirtualRanks(linear(), 2)  # type: ignore[arg-type]


@in_ranks(3)
def test_fewer_virtual_ranks_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected count >= 3, .* got count=2"):
        VirtualRanks(model_of(), 2)


# --- hooks ---

State = Callable[[DistributedDataParallel], tuple[Any, Any]]
RESIDUALS = "the residuals of its codec belong to real ranks"
REAL_RANKS = "its results depend on the number of ranks"


def auto(model: DistributedDataParallel) -> tuple[Any, Any]:
    return ddp.AutoState(optimizers_of("sgd", model)), ddp.auto_hook


STATES: dict[str, tuple[State, str]] = {
    "compressed": (
        lambda model: (ddp.CompressedState(ddp.Int8()), ddp.compressed_hook),
        f"got CompressedState: {RESIDUALS}",
    ),
    "decoupled-codec": (
        lambda model: (
            ddp.DecoupledState(optimizers_of("sgd", model), codec=ddp.Int8()),
            ddp.decoupled_hook,
        ),
        f"got DecoupledState: {RESIDUALS}",
    ),
    "owners-codec": (
        lambda model: (
            ddp.OwnerState(optimizers_of("sgd", model), codec=ddp.Int8()),
            ddp.owner_hook,
        ),
        f"got OwnerState: {RESIDUALS}",
    ),
    "kfac": (
        lambda model: (ddp.KFACState(model, optimizers_of("sgd", model)), ddp.kfac_hook),
        f"got KFACState: {REAL_RANKS}",
    ),
    "local-sgd": (
        lambda model: (ddp.LocalSGDState(2), ddp.local_sgd_hook),
        f"got LocalSGDState: {REAL_RANKS}",
    ),
    "elastic": (
        lambda model: (ddp.ElasticState(sync_every=2, mode="sync"), ddp.elastic_hook),
        f"got ElasticState: {REAL_RANKS}",
    ),
    "auto": (auto, "got AutoState: it changes buckets and hooks, by the clock"),
    "wrapped": (
        lambda model: (ddp.CrossoverState(), ddp.crossover_wrapper(allreduce_hook)),
        "got CrossoverState: another library's hook adds in an order",
    ),
}


def refusal_of_hook(rank: int, world_size: int, name: str) -> tuple[str, int]:
    """Return the error of the first step, and the number of steps that were counted."""
    model = model_of()
    state, hook = STATES[name][0](model)
    model.register_comm_hook(state, hook)
    ranks = VirtualRanks(model, 4)
    message = error_of(lambda: train(model, ranks))
    state.close()
    return message, ranks.step


@pytest.mark.parametrize("name", STATES)
def test_hooks_are_refused_by_name(name: str) -> None:
    words = STATES[name][1]
    for message, steps in run_ranks(refusal_of_hook, 2, args=(name,)):
        assert message.startswith("expected a hook that works with VirtualRanks, got ")
        assert words in message
        assert message.endswith("owner_hook or muon_hook, without codec=")
        assert not steps


def refusal_of_uneven_counts(rank: int, world_size: int, hook: str, count: int) -> str:
    """Return the error of a job's first step."""
    running = Running(Job("gpt", "muon", count, hook))
    message = error_of(lambda: running.run(1))
    running.close()
    return message


@pytest.mark.parametrize("hook", ["owners", "muon"])
@pytest.mark.parametrize("count", [3, 6])
def test_owners_refuse_uneven_counts(hook: str, count: int) -> None:
    """Six virtual ranks on two ranks are three on each, which no node of the tree has."""
    words = f"{count} virtual ranks on 2 ranks leave several partial sums on a rank, which owners"
    for message in run_ranks(refusal_of_uneven_counts, 2, args=(hook, count)):
        assert words in message


EXPECTED_HOOK = "expected a hook of this package to get the gradients of a step's last micro-batch"


def late_hook(rank: int, world_size: int, hook: str) -> tuple[str, str]:
    """Begin without a hook or with torch's own. Return the error, and the hash of training later."""
    torch.set_num_threads(1)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    running = Running(Job("gpt", steps=3), hook=None if hook == "none" else allreduce_hook)
    message = error_of(lambda: train(running.model, running.ranks, tokens))
    assert running.ranks.step == 0
    if hook == "none":
        running.model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
        return message, running.run().hash()
    return message, ""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("hook", ["none", "torch"])
def test_steps_without_a_hook_of_the_package_are_refused_and_repeated(hook: str, size: int) -> None:
    words = "no hook" if hook == "none" else "torch's allreduce_hook"
    for message, found in run_ranks(late_hook, size, args=(hook,)):
        assert message.startswith(f"{EXPECTED_HOOK}, got {words}")
        if found:
            assert found == run_ranks(hash_of_job, 1, args=(Job("gpt", steps=3),))[0]


def refusal_of_job(rank: int, world_size: int, job: Job) -> str:
    running = Running(job)
    message = error_of(lambda: running.run())
    running.close()
    return message


@pytest.mark.parametrize("hook", ["crossover", "decoupled", "owners"])
def test_disabled_hooks_are_refused(hook: str) -> None:
    job = Job("mlp", hook=hook)
    for message in run_ranks(
        refusal_of_job, 2, args=(job,), environment={"CROSSOVER_DISABLE": "1"}
    ):
        assert message.startswith(EXPECTED_HOOK)
        assert "CROSSOVER_DISABLE=1" in message


@in_ranks(2)
def test_join_is_refused() -> None:
    model = model_of()
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    ranks = VirtualRanks(model, 4)
    with Join([model]):
        message = error_of(lambda: train(model, ranks))
    assert "got a model inside of Join: all virtual ranks take part in each step" in message
    assert not ranks.step


# --- loops ---


@pytest.fixture
def ranks_of_two(alone: None) -> tuple[DistributedDataParallel, VirtualRanks]:
    model = model_of()
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    return model, VirtualRanks(model, 2)


Made = tuple[DistributedDataParallel, VirtualRanks]


def test_a_second_backward_is_refused(ranks_of_two: Made) -> None:
    model, ranks = ranks_of_two
    with ranks.micro_batch():
        model(torch.ones(2, 4)).sum().backward()
    with (
        pytest.raises(UnsupportedConfigurationError, match=r"one backward\(\) in each micro-batch"),
        ranks.micro_batch(),
    ):
        model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    train(model, ranks)
    assert ranks.is_step_end


def test_backward_outside_of_micro_batches_is_refused(ranks_of_two: Made) -> None:
    model, ranks = ranks_of_two
    message = error_of(lambda: model(torch.ones(2, 4)).sum().backward())
    assert "inside `for batch in ranks.micro_batches(...)`" in message
    train(model, ranks)
    assert ranks.step == 1


def test_a_micro_batch_without_backward_is_refused(ranks_of_two: Made) -> None:
    model, ranks = ranks_of_two
    with ranks.micro_batch():
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UnsupportedConfigurationError, match=EXPECTED_HOOK), ranks.micro_batch():
        pass
    train(model, ranks)
    assert ranks.step == 1


def test_nested_micro_batches_are_refused(ranks_of_two: Made) -> None:
    model, ranks = ranks_of_two
    with pytest.raises(RuntimeError, match="one inside of another: micro_batches"):
        for _ in ranks.micro_batches([0, 1]):
            with ranks.micro_batch():
                pass
    train(model, ranks)
    assert ranks.step == 1


def test_a_step_without_a_backward_is_refused(ranks_of_two: Made) -> None:
    model, ranks = ranks_of_two
    with ranks.micro_batch():
        model(torch.ones(2, 4)).sum().backward()
    with (
        pytest.raises(ddp.UnsupportedConfigurationError, match="there was no backward"),
        ranks.micro_batch(),
    ):
        model(torch.ones(2, 4))
    assert (ranks.step, ranks.is_step_end) == (0, False)


def test_batches_that_end_within_a_step_are_refused(ranks_of_two: Made) -> None:
    model, ranks = ranks_of_two
    with pytest.raises(ValueError, match=r"expected 2 micro-batches .* got 1 for the last one"):
        for batch in ranks.micro_batches([torch.ones(2, 4)] * 3):
            model(batch).sum().backward()
    assert ranks.step == 1
    for batch in ranks.micro_batches([torch.ones(2, 4)] * 4):
        model(batch).sum().backward()
    assert ranks.step == 3


def test_a_loss_before_the_first_micro_batch_is_refused(ranks_of_two: Made) -> None:
    with pytest.raises(RuntimeError, match="got it before; move it"):
        ranks_of_two[1].report(torch.ones(()))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "name",
    [
        "0.bias",
        "0.weight",
    ],
)
def test_a_parameter_that_is_trained_later_is_refused(name: str) -> None:
    model = model_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=25)
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    parameter = model.module.get_parameter(name)
    parameter.requires_grad_(False)
    ranks = VirtualRanks(model, 2)
    parameter.requires_grad_(True)
    message = error_of(lambda: train(model, ranks))
    assert "one of another parameter; create VirtualRanks when all parameters" in message


# --- checkpoints ---

CHANGED = {
    "count": (4, "count=4 there and 2 here, which changes all samples, random numbers and sums"),
    "seed": (9, "seed=9 there and 0 here, which changes the order of samples"),
    "threads": (77, "threads=77 there and .* which changes sums over a batch .*OMP_NUM_THREADS"),
    "cpu": ("Z80", "cpu='Z80' there and .* which changes sums in most .*ATEN_CPU_CAPABILITY"),
    "device": (
        "Voodoo",
        "device='Voodoo' there and 'cpu' here, which changes the kernels of matrix",
    ),
    "torch": ("0.4", "torch='0.4' there and .* which changes any kernel: install that version"),
}


@pytest.mark.parametrize("key", CHANGED)
def test_states_that_change_bits_are_refused(ranks_of_two: Made, key: str) -> None:
    _, ranks = ranks_of_two
    other, words = CHANGED[key]
    state = ranks.state_dict()
    assert {*CHANGED} == {*state} - {"step"}
    with pytest.raises(ValueError, match=f"expected to resume where the job began, got {words}"):
        ranks.load_state_dict({**state, "step": 5, key: other})
    assert ranks.step == 0
    ranks.load_state_dict({**state, "step": 5})
    assert ranks.step == 5


def test_all_differences_are_named_at_once(ranks_of_two: Made) -> None:
    state = {**ranks_of_two[1].state_dict(), "seed": 3, "torch": "0.4"}
    with pytest.raises(ValueError, match=r"seed=3 there .*; torch='0.4' there"):
        ranks_of_two[1].load_state_dict(state)


def test_states_of_other_objects_are_refused(ranks_of_two: Made) -> None:
    _, ranks = ranks_of_two
    with pytest.raises(ValueError, match=r"VirtualRanks\.state_dict\(\)"):
        ranks.load_state_dict({"step": 5})


def test_threads_of_the_process_are_in_the_state(ranks_of_two: Made) -> None:
    _, ranks = ranks_of_two
    before = torch.get_num_threads()
    state = ranks.state_dict()
    with contextlib.ExitStack() as ended:
        ended.callback(torch.set_num_threads, before)
        torch.set_num_threads(before + 1)
        with pytest.raises(ValueError, match=f"threads={before} there and {before + 1} here"):
            ranks.load_state_dict(state)
