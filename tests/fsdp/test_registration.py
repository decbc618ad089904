"""The models, states and process groups that `register_comm_hook` refuses, and turns of FSDP2 jobs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.fsdp import fully_shard

import crossover_ddp as ddp
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.fsdp import register_comm_hook
from crossover_ddp.gpu_mutex import GPUMutex
from tests.fsdp import small
from tests.fsdp.small import Training
from tests.harness import Job, in_ranks, run_jobs
from tests.harness.groups import join_over, new_group
from tests.harness.oracles import error_of
from tests.harness.turn import RecordingTurn
from tests.harness.waiting import eventually

STEPS = 4
ONE_RANK = pytest.mark.usefixtures("process_group")


def raised(act: Callable[[], object]) -> str:
    """Return the message of the error with which the package refuses something."""
    with pytest.raises(UnsupportedConfigurationError) as caught:
        act()
    return str(caught.value)


@ONE_RANK
def test_an_ordinary_module_is_refused() -> None:
    mesh = small.mesh_of((1, 1))
    pair: Any = small.split(mesh["between"].get_group())
    for module in (small.Network(), None):
        expected = f"got model={type(module).__name__}; call fully_shard"
        with pytest.raises(TypeError, match=expected):
            register_comm_hook(module, *pair)  # type: ignore[arg-type]
    # Only blocks were sharded, so that no module is the outermost one.
    network = small.Network()
    fully_shard(network.blocks[0], mesh=mesh["inside"])
    with pytest.raises(TypeError, match="got model=Network"):
        register_comm_hook(network, *pair)  # type: ignore[arg-type]


@ONE_RANK
def test_a_second_hook_is_refused_and_the_first_one_stays() -> None:
    mesh = small.mesh_of((1, 1))
    calls: list[int] = []

    def counting(group: dist.ProcessGroup, bucket: Any) -> Any:
        calls.append(bucket.index())
        return ddp.reduce_scatter_all_gather_hook(group, bucket)

    model = small.model_on(mesh, lambda group: (group, counting))
    with pytest.raises(RuntimeError, match=r"already; register one hook, once for each model"):
        register_comm_hook(model, *small.int8(mesh["between"].get_group()))
    Training(model).run(0)
    assert sorted(calls) == [0, 1, 2, 3, 4], "four groups and the end of the step"


@ONE_RANK
def test_a_model_whose_parameters_are_not_sharded_is_refused() -> None:
    mesh = small.mesh_of((1, 1))
    model: Any = fully_shard(nn.Tanh(), mesh=mesh["inside"])
    pair: Any = small.split(mesh["between"].get_group())
    assert "got one without any" in raised(lambda: register_comm_hook(model, *pair))


@ONE_RANK
def test_a_mesh_of_two_dimensions_is_refused() -> None:
    mesh = small.mesh_of((1, 1))
    model = small.sharded(small.Network(), mesh)
    pair: Any = small.split(mesh["between"].get_group())
    message = raised(lambda: register_comm_hook(model, *pair))
    assert "got one of ('between', 'inside')" in message
    assert "pass fully_shard(..., mesh=mesh['inside'])" in message


# Functions that make a state with which a hook needs DDP, for a module and its optimizers.
REFUSED: dict[str, Callable[..., Any]] = {
    "AutoState": lambda module, sgd, _: ddp.AutoState(sgd),
    "DecoupledState": lambda module, sgd, _: ddp.DecoupledState(sgd),
    "DecoupledKFACState": lambda module, sgd, _: ddp.DecoupledKFACState(
        sgd, ddp.KFACState(module, sgd)
    ),
    "ElasticState": lambda *_: ddp.ElasticState(sync_every=2),
    "KFACState": lambda module, sgd, _: ddp.KFACState(module, sgd),
    "MuonState": lambda module, sgd, muon: ddp.MuonState(muon),
    "OwnerState": lambda module, sgd, _: ddp.OwnerState(sgd),
}


@pytest.mark.parametrize("name", REFUSED)
@ONE_RANK
def test_a_state_that_needs_ddp_is_refused(name: str) -> None:
    module = nn.Linear(3, 3, bias=False)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    state = REFUSED[name](module, sgd, torch.optim.Muon(module.parameters(), lr=0.1))
    model = small.sharded(small.Network(), small.mesh_of((1, 1))["inside"])
    message = raised(lambda: register_comm_hook(model, state, ddp.decoupled_hook))
    assert f"got {name}: its hook needs DDP's own buckets" in message
    assert "expected a state of CrossoverState, CompressedState, LocalSGDState" in message


@in_ranks(4)
def test_a_wrapped_hook_that_averages_over_other_ranks_is_refused(rank: int) -> None:
    """With no state of their own, torch's hooks average over the default group."""
    mesh = small.mesh_of()
    group = mesh["between"].get_group()
    model = small.sharded(small.Network(), mesh["inside"])
    hook = ddp.crossover_wrapper(allreduce_hook)
    for inner in (None, mesh["inside"].get_group(), PowerSGDState(None, 2)):
        state = ddp.CrossoverState(group, hook_state=inner)
        message = error_of(lambda s=state: register_comm_hook(model, s, hook))
        assert "it would average different shards; pass hook_state=group" in message
    register_comm_hook(model, ddp.CrossoverState(group, hook_state=group), hook)


@in_ranks(4)
def test_a_process_group_of_other_ranks_is_refused(rank: int) -> None:
    mesh = small.mesh_of()
    model = small.sharded(small.Network(), mesh["inside"])
    wrong = {"the job": None, "the node": mesh["inside"].get_group()}
    for group in wrong.values():
        state = ddp.CompressedState(ddp.Int8(), process_group=group)
        message = error_of(lambda s=state: register_comm_hook(model, s, ddp.compressed_hook))
        assert "shares only this rank with the shards' mesh" in message
        assert "pass process_group=mesh['between'].get_group()" in message
    # A refusal leaves no trace.
    register_comm_hook(model, *small.split(mesh["between"].get_group()))
    Training(model).run(0)
    assert small.same_on_all_nodes(model, mesh)


@in_ranks(4)
def test_a_module_inside_of_another_one_is_refused_by_every_backward(rank: int) -> None:
    mesh = small.mesh_of()
    for make in (small.split, small.int8):
        model = small.sharded(small.Network(), mesh["inside"])
        register_comm_hook(model.blocks[0], *make(mesh["between"].get_group()))
        for _ in range(2):
            message = raised(small.loss_of(model, 0).backward)
            assert "expected the outermost module of FSDP2, got FSDPBlock" in message
            if not hasattr(model, "reset_iter_state"):
                break  # torch 2.11 and 2.12 cannot continue after an error in backward
            model.reset_iter_state()
    # The groups still work.
    found = Training(small.model_on(mesh, small.int8)).run(0)
    assert small.same_on_all_nodes(found.model, mesh)


def network_of(rank: int, difference: str) -> nn.Module:
    """Return a network that differs between nodes."""
    is_second = rank >= 2
    if difference == "width":
        return small.Network(width=small.WIDTH + is_second)
    if difference == "blocks":
        return small.Network(blocks=2 + is_second)
    network = small.Network()
    if difference == "padding":  # shards of three and four rows are equally large
        network.head = nn.Linear(small.WIDTH, 3 + is_second)
    return network


@in_ranks(4)
def test_modules_that_are_sharded_after_the_registration_are_refused(rank: int) -> None:
    mesh = small.mesh_of()
    model = small.sharded(small.Network(), mesh["inside"])
    register_comm_hook(model, *small.split(mesh["between"].get_group()))
    torch.manual_seed(1)
    model.blocks.append(fully_shard(small.Block(small.WIDTH), mesh=mesh["inside"]))
    message = error_of(lambda: small.loss_of(model, 0).backward())
    assert "got more: nothing averages their gradients over the nodes" in message


@in_ranks(4)
def test_parts_that_are_called_one_by_one_make_one_step(rank: int) -> None:
    """Then FSDP2 has several outermost modules, and each of them ends a backward pass."""
    mesh = small.mesh_of()
    found = []
    for make in (None, small.crossover):
        model = small.model_on(mesh, make)
        model.forward = lambda values: None  # is not called
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            values = small.batch(rank, step)
            for block in model.blocks:
                values = block(values)
            values.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if make is not None:
            assert vars(model)["_crossover_ddp_hop"]._state.stats()["steps"] == STEPS
        found.append(small.whole(model))
    assert found[0] == found[1]


@in_ranks(4)
def test_a_backward_that_has_raised_needs_a_reset(rank: int) -> None:
    """FSDP2 itself would never end a backward pass again, and leave gradients out."""
    mesh = small.mesh_of()
    model = small.model_on(mesh, small.split)
    Training(model).run(0)
    handle = model.blocks[0].register_full_backward_pre_hook(fails)
    values = model(small.batch(rank, 1))
    with pytest.raises(ZeroDivisionError):
        values.square().mean().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"call model\.reset_iter_state\(\) after the error"):
        small.loss_of(model, 2)


def fails(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("difference", ["width", "blocks", "padding", "places"])
@in_ranks(4)
def test_ranks_with_different_shards_are_refused(rank: int, difference: str) -> None:
    mesh = small.mesh_of()
    group = mesh["between"].get_group()
    if difference == "places":
        group = dist.new_group([rank, 3 - rank], use_local_synchronization=True)
    model = small.sharded(network_of(rank, difference), mesh["inside"])
    register_comm_hook(model, *small.split(group))
    message = raised(small.loss_of(model, 0).backward)
    assert ("place inside the node" if difference == "places" else "shards") in message
    assert "one on each node" in message


@in_ranks(4)
def test_double_precision_with_a_codec_raises_on_all_ranks_and_another_model_works(
    rank: int,
) -> None:
    mesh = small.mesh_of()
    torch.manual_seed(0)
    model = small.sharded(small.Network().double(), mesh["inside"])
    register_comm_hook(model, *small.int8(mesh["between"].get_group()))
    values = small.batch(rank, 0).double()
    message = raised(lambda: model(values).square().mean().backward())
    assert "float64" in message
    native = Training(small.model_on(mesh)).run(*range(STEPS))
    for make in (small.split, small.int8):
        training = Training(small.model_on(mesh, make)).run(*range(STEPS))
        assert small.same_on_all_nodes(training.model, mesh)
        if make is small.split:
            assert training.found() == native.found()


# --- turns ---


@pytest.mark.parametrize("way", ["crossover", "int8", "wrapped", "local"])
@in_ranks(4)
def test_the_turn_goes_behind_the_last_group_and_is_taken_before_backward_returns(
    rank: int, way: str
) -> None:
    turn: Any = RecordingTurn()
    mesh = small.mesh_of()
    model = small.model_on(mesh, lambda group: with_turns(way, group, turn))
    training = Training(model)
    model.register_forward_pre_hook(lambda *_: turn.order.append("forward"))
    model.head.register_full_backward_hook(lambda *_: turn.order.append("backward"))
    training.optimizer.register_step_pre_hook(lambda *_: turn.order.append("step"))
    training.run(*range(STEPS))
    calls = [call for call in turn.order if call != "request"]
    if way == "local":  # it gives the turn away only to average, before forward
        first = calls.index("release")
        assert calls[first : first + 3] == ["release", "acquire", "forward"]
        return
    assert calls == ["forward", "backward", "release", "acquire", "step"] * STEPS


def with_turns(way: str, group: dist.ProcessGroup, mutex: Any) -> tuple[Any, Any]:
    if way == "crossover":
        return ddp.CrossoverState(group, mutex=mutex), ddp.crossover_hook
    if way == "wrapped":
        state = ddp.CrossoverState(group, mutex=mutex, hook_state=group)
        return state, ddp.crossover_wrapper(ddp.reduce_scatter_all_gather_hook)
    if way == "local":
        return small.local_sgd(group, 2, mutex=mutex)
    state = ddp.CompressedState(ddp.Int8(), process_group=group, mutex=mutex)
    return state, ddp.compressed_hook


@in_ranks(4)
def test_a_mutex_of_the_whole_job_is_accepted_and_one_of_other_ranks_is_refused(
    rank: int,
) -> None:
    join_over(rank, 4)
    mesh = small.mesh_of()
    group = mesh["between"].get_group()
    mutex = GPUMutex(new_name(), device=f"dev{rank}", process_group=group)
    model = small.model_on(mesh, lambda group: with_turns("crossover", group, mutex))
    message = raised(small.loss_of(model, 0).backward)
    mutex.close()
    assert "expected a mutex of the ranks [0, 1, 2, 3]" in message
    with GPUMutex(new_name(), device=f"dev{rank}") as accepted:
        model = small.model_on(mesh, lambda group: with_turns("crossover", group, accepted))
        Training(model).run(*range(STEPS))
        assert accepted.stats()["turns"] >= STEPS
        assert accepted.stats()["disabled_because"] is None
    accepted.close()


def new_name() -> str:
    """Return a new name for a group of siblings, which all ranks share."""
    names: list[Any] = [new_group()]
    dist.broadcast_object_list(names)
    return str(names[0])


def beside_a_sibling(rank: int, world_size: int, meeting: str) -> dict[str, Any]:
    """Train without turns, then beside a sibling job with turns. Return both results."""
    mesh = small.mesh_of()
    expected = Training(small.model_on(mesh)).run(*range(STEPS)).found()
    store = dist.FileStore(meeting, 2 * world_size)
    mutex = GPUMutex(device=f"dev{rank}")
    assert eventually(lambda: mutex.stats()["siblings"] == 1)
    store.add("joined", 1)
    assert eventually(lambda: store.add("joined", 0) == 2 * world_size)
    model = small.model_on(mesh, lambda group: with_turns("crossover", group, mutex))
    found = Training(model).run(*range(STEPS)).found()
    stats = mutex.stats()
    mutex.close()
    return {
        "equal": found == expected,
        "turns": stats["turns"],
        "number": stats["turn"],
        "disabled": stats["disabled_because"],
    }


def test_jobs_take_turns_and_train_as_without_them(tmp_path: Any) -> None:
    environment = {"CROSSOVER_GROUP": new_group()}
    jobs = [
        Job(beside_a_sibling, 4, (str(tmp_path / "meeting"),), environment=environment, name=name)
        for name in "ab"
    ]
    found = run_jobs(jobs, timeout_s=120)
    for job in found:
        assert all(rank["equal"] for rank in job)
        assert all(rank["disabled"] is None for rank in job)
        assert {rank["turns"] for rank in job} == {STEPS}
    # A turn's number counts the turns of both jobs.
    assert max(rank["number"] for job in found for rank in job) > STEPS
