"""Whole models over two levels: what codecs keep and send, checkpoints for fewer ranks, and deaths."""

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._tuning import link_probe
from crossover_ddp.codecs import CompressedState, Half, Int8, PerPair, SIDCo
from tests.harness import in_ranks, run_ranks
from tests.harness.oracles import error_of
from tests.harness.training import Training
from tests.multiprocess.compressed_training import Coded, compressed, gradient, gradient_after

TABLES = ("0,0,1,1", "0,1,0,1")


def levels(table: str) -> Any:
    return mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": table})


def mean_gradient(step: int) -> torch.Tensor:
    return torch.stack([gradient(rank, step) for rank in range(4)]).mean(0)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("codec", [Int8(), SIDCo(0.05), (Half(), Int8())], ids=repr)
@in_ranks(4)
def test_residuals_of_nodes_arrive_with_an_exact_step_and_over_checkpoints(
    rank: int, codec: Any, table: str
) -> None:
    """With one codec nodes exchange in one hop, with two of them in two."""
    with levels(table):
        state = CompressedState(codec)
        training = compressed(rank, state)
        arrived = wanted = torch.zeros(40, 40)
        for step in range(9):
            if step == 5:
                state.checkpoint(())
            if step == 8:
                assert any(bool(each.any()) for each in state.state_dict()["residuals"].values())
                state.drain()
            arrived = arrived + gradient_after(training, step)
            wanted = wanted + mean_gradient(step)
    torch.testing.assert_close(arrived, wanted, rtol=0, atol=1e-4)
    assert state.state_dict()["residuals"] == {}


def saved_residuals(rank: int, world_size: int) -> tuple[Any, torch.Tensor]:
    """Train with two nodes of two ranks, and return a checkpoint and the mean that has arrived."""
    with levels("0,0,1,1"):
        state = CompressedState(SIDCo(0.05))
        training = compressed(rank, state)
        arrived = sum(gradient_after(training, step) for step in range(4))
        state.checkpoint(())
    return state.state_dict(), arrived  # type: ignore[return-value]


def resumed_gradient(rank: int, world_size: int, saved: Any) -> torch.Tensor:
    state = CompressedState(SIDCo(0.05))
    state.load_state_dict(saved)
    return gradient_after(compressed(rank, state), 4)


def test_a_checkpoint_of_two_levels_is_resumed_by_two_ranks() -> None:
    saved, arrived = run_ranks(saved_residuals, 4)[0]
    last = run_ranks(resumed_gradient, 2, args=(saved,))[0]
    wanted = sum(mean_gradient(step) for step in range(4))
    wanted = wanted + (gradient(0, 4) + gradient(1, 4)) / 2
    torch.testing.assert_close(arrived + last, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["compressed", "crossover", "decoupled", "kfac"])
@in_ranks(4)
def test_ranks_agree_and_a_node_sends_less_than_half_of_the_exact_bytes(
    rank: int, way: str
) -> None:
    settings = {"damping": 0.03} if way == "kfac" else {}
    with levels("0,0,1,1"):
        training = Coded(way, rank, Int8(), **settings).run(9)
        rate = training.stats_of_codec()["rate"]
        digests: list[Any] = [None] * 4
        dist.all_gather_object(digests, training.digest())
    assert len({*digests}) == 1
    # Biases, and what pads small tiles, weigh more here than in larger models.
    assert rate < 0.5


@in_ranks(4)
def test_a_plan_measures_both_levels_and_is_the_same_on_all_ranks(rank: int) -> list[Any]:
    """The harness checks that all ranks return the same plan."""
    with levels("0,0,1,1"):
        plan = Coded("compressed", rank).run(4).state.plan_codec((None, Int8()))
        exchanged = link_probe._timed

        def timed(engine: Any, tensor: torch.Tensor, within_node: bool) -> float:
            exchanged(engine, tensor, within_node)
            return tensor.nbytes * (2e-9 if within_node else 8e-9)

        with mock.patch.object(link_probe, "_timed", timed):
            measured = link_probe.measure_link(dist.group.WORLD)  # type: ignore[arg-type]
    assert (measured.beta_s, measured.inside_s) == (pytest.approx(4e-9), pytest.approx(1e-9))
    return [plan]


@in_ranks(4)
def test_a_table_of_codecs_keeps_all_ranks_exchanging(rank: int) -> None:
    """As without levels, to the last bit, with a warning that it will go."""
    with pytest.warns(FutureWarning, match="removed in the next version"):
        codec = (PerPair.by_node([0, 0, 1, 1], far=Int8()), Int8())
    found = []
    for table in ("0,0,1,1", "flat"):
        with levels(table):
            group = dist.new_group(range(4))
            state = CompressedState(codec, process_group=group)
            training = compressed(rank, state, process_group=group)
            found.append(torch.stack([gradient_after(training, step) for step in range(3)]))
    assert torch.equal(found[0][1:], found[1][1:])


@pytest.mark.parametrize("way", ["split", "decoupled"])
@pytest.mark.parametrize("victim", [1, 3])
def test_when_a_rank_dies_all_others_raise(way: str, victim: int) -> None:
    """On the victim's node, and on the other one."""
    told = run_ranks(outlived, 4, args=(way, victim), deaths={victim: signal.SIGKILL}, timeout_s=90)
    assert all("restart the job" in each for rank, each in enumerate(told) if rank != victim)


def outlived(rank: int, world_size: int, way: str, victim: int) -> str:
    with levels("0,0,1,1"):
        training = Training(way, rank).run(6)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

        def step_on() -> None:
            for _ in range(3):
                training.step()

        return error_of(step_on)
