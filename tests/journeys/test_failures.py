"""What fails, and what is refused: who hears of it, when, in which words, and what works afterwards."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from crossover_ddp import (
    DecoupledKFACState,
    KFACState,
    UnsupportedConfigurationError,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp._ddp.module_buffers import ModuleBuffers
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.networks import blow, mlp
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, WIDTH, Training, hooked
from tests.harness.turn import RecordingTurn


@pytest.mark.parametrize("world_size", [1, 2])
@in_ranks()
def test_nobody_waits_for_a_gather_that_was_never_issued(rank: int, world_size: int) -> None:
    """Gathers are issued with a step's last bucket, which an exception in backward keeps away."""
    with inside.force_native():
        training = Training("decoupled", rank).run(6)
        before = training.model.module[2].register_forward_pre_hook(lambda _, inputs: blow(*inputs))
        with pytest.raises(ArithmeticError, match="blown"):
            training.backward()
        before.remove()
        if not rank:  # another one needs nothing, so that it would never answer
            told = error_of(training.state.flush)
            assert told == "no error" or "backward" in told


def kfac_deferred(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
    return DecoupledKFACState(optimizers[0], KFACState(model, optimizers[0])), decoupled_hook


def last_step(rank: int, world_size: int, is_kfac: bool, leaves: bool) -> list[float]:
    """Rank 0 may leave right after its last step; rank 1's last gradient comes two seconds later then."""
    training = Training(kfac_deferred if is_kfac else "decoupled", rank).run(6)
    if rank and leaves:
        training.model.module[0].weight.register_hook(lambda _: time.sleep(2))
    training.step()
    if leaves and not rank:
        dist.destroy_process_group()
        return []
    training.state.flush()
    return [float(p.detach().sum()) for p in training.model.module.parameters()]


@pytest.mark.parametrize("is_kfac", [False, True])
def test_a_rank_may_leave_while_another_still_needs_its_parts(is_kfac: bool) -> None:
    assert (
        run_ranks(last_step, 2, args=(is_kfac, True))[1]
        == run_ranks(last_step, 2, args=(is_kfac, False))[1]
    )


@in_ranks(2)
def test_a_rank_that_is_ahead_keeps_no_gather_from_the_others(rank: int) -> float:
    """Rank 0 ends first: it answers for rank 1's next steps while it has yet to say what is gathered of its last."""
    training = Training(
        "decoupled", rank, module=mlp(WIDTH, 1500, 1500, WIDTH, seed=3), bucket_cap_mb=1
    )
    with Join([training.model]):
        training.run(6 + 3 * rank)
    training.state.flush()
    return float(sum(p.detach().double().sum() for p in training.model.parameters()))


# Averaging hooks send no buckets in most steps; below the wrapper another library's hook has all buckets but the last.
REFUSING = [
    pytest.param(way, which, world_size, id=f"{world_size}-{way}-{which}")
    for way in WAYS
    for which in (0, "last", "engine")
    for world_size in (1, 2)
    if way not in ("averaged", "elastic") and (way, which) != ("wrapped", 0)
    if world_size == 1 or which == "last"  # for whose Future peers wait
]
# Nothing of a refused step is left in these: others keep residuals, factors or momentum of its other buckets, and below
# the wrapper another library's exchange goes on.
AS_IF_IT_HAD_NOT_BEEN = ("split", "crossover", "decoupled", "owned")


@pytest.mark.parametrize(("way", "which", "world_size"), REFUSING)
@in_ranks()
def test_a_refused_bucket_is_a_refused_step(
    rank: int, way: str, which: Any, world_size: int
) -> None:
    turn = RecordingTurn()
    training, whole = (Training(way, rank, mutex=mutex).run(6) for mutex in (turn, RecordingTurn()))
    turn.order.clear()
    trouble = AssertionError("ours")
    refused = (
        inside.break_engine(trouble)
        if which == "engine"
        else inside.refuse_bucket(which, error=trouble)
    )
    # Not even a mistake of our own leaves the hook, which would be DDP's end.
    with refused, pytest.raises(AssertionError, match=r"^ours$"):
        training.backward()
    assert "release" in turn.order or way == "split" or which == "engine", "siblings go on"
    if way in ("decoupled", "owned"):
        for _ in range(2):
            with pytest.raises(
                UnsupportedConfigurationError, match=r"the last backward\(\) or step\(\) raised"
            ):
                training.optimizers[0].step()
    for each in (training, whole):
        each.steps += 1
        each.drop()
    losses, expected = ([each.step() for _ in range(4)] for each in (training, whole))
    training.close()
    whole.close()
    assert losses == expected or way not in AS_IF_IT_HAD_NOT_BEEN
    assert torch.tensor(losses + expected).isfinite().all()


@pytest.mark.parametrize("way", ["crossover", "decoupled"])
@in_ranks(2)
def test_buffers_that_cannot_leave_refuse_their_bucket(rank: int, way: str) -> None:
    """The journey is there by then, and the turn is the job's."""
    turn = RecordingTurn()
    training = Training(way, rank, mutex=turn)
    trouble = mock.patch.object(
        ModuleBuffers, "nbytes", mock.Mock(side_effect=AssertionError("ours"))
    )
    with trouble, pytest.raises(AssertionError, match=r"^ours$"):
        training.backward()
    assert "release" in turn.order
    training.drop()
    training.run(2).close()


# What no hook exchanges, outside of a backward pass, with words of the error.
SPARSE = SimpleNamespace(
    index=lambda: 0,
    is_last=lambda: True,
    buffer=lambda: torch.zeros(3).to_sparse(),
    parameters=lambda: [torch.zeros(3)],
)
CAPTURED = SimpleNamespace(buffer=lambda: SimpleNamespace(is_cuda=True))


@pytest.mark.torch_version
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("way", "bucket", "message"),
    [
        *((way, SPARSE, "expected dense gradients") for way in ("split", "crossover", "int8")),
        *(
            (way, CAPTURED, "graph is captured")
            for way in ("crossover", "wrapped", "decoupled", "kfac")
        ),
    ],
)
def test_a_future_carries_the_error_where_no_backward_runs(
    way: str, bucket: Any, message: str
) -> None:
    """Nobody would look there for what is raised after backward. Of a bucket on a CPU nothing is asked of CUDA."""
    got: list[Any] = []
    training = Training(way, around=lambda hook: got.append(hook) or hook)
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
    with capturing, pytest.raises(UnsupportedConfigurationError, match=message):
        got[0](training.state, bucket).wait()
    training.run(2).close()


@in_ranks(3)
def test_a_group_of_the_same_ranks_is_right_and_another_refused(rank: int) -> None:
    twin, half = dist.new_group([2, 1, 0]), dist.new_group([0, 1])
    model = hooked(nn.Linear(2, 2, bias=False), reduce_scatter_all_gather_hook, twin)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(1.0).all()
    model = hooked(nn.Linear(2, 2), reduce_scatter_all_gather_hook, half)
    inside = r"of ranks \[0, 1, 2\], got a process_group of ranks \[0, 1\]"
    outside = "expected a process group that this process belongs to"
    with pytest.raises(UnsupportedConfigurationError, match=outside if rank == 2 else inside):
        model(torch.ones(1, 2)).sum().backward()
