"""Coded increments between real ranks: what is kept, what is common, and what ends exactly.

Without rounding they are compared to the last bit in tests/multiprocess/test_averaging.py.
"""

import copy
import functools
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.averaging_hooks import LocalSGDState
from crossover_ddp.codecs import Half, Int4, Int8, PerPair, SIDCo
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.multiprocess.averaged_training import averaged, spread
from tests.multiprocess.averaging_oracle import NESTEROV, Trainer
from tests.multiprocess.identity_codec import Identity
from tests.multiprocess.test_checkpoint import listed

FEATURES = 40
LR = 0.1


def gradient(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(FEATURES, FEATURES, generator=generator)


def known_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss whose gradient does not depend on the parameters."""
    return (model(torch.eye(FEATURES)).t() * gradient(rank, step)).sum()


def sum_of_outputs(model: nn.Module, *_: int) -> torch.Tensor:
    return model(torch.ones(1, 256)).sum()


def sum_of_halves(model: nn.Module, *_: int) -> torch.Tensor:
    return model(torch.ones(1, FEATURES, dtype=torch.bfloat16)).sum()


def layer() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES, bias=False)


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks."""
    values = values.clone()
    dist.all_reduce(values)
    return values


@pytest.mark.parametrize("codec", [Int4(), (Int8(), Half()), SIDCo(0.05)], ids=repr)
@pytest.mark.parametrize("levels", ["", "0,0,1,1"])
@in_ranks(4)
def test_what_messages_leave_out_is_kept_for_the_next_ones(
    rank: int, levels: str, codec: Any
) -> None:
    """The common parameters and all residuals add up to plain training."""
    with mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": levels} if levels else {}):
        state = LocalSGDState(1, delay=1, codec=codec)
        training = averaged(state, layer(), lr=LR, loss=known_loss)
        start = training.values
        training.run(20)
        with state.averaged():
            [increments] = state._replica._increments.values()  # type: ignore[attr-defined]
            [(_, residual)] = increments.codec._link.residuals()
            common = increments.common.clone()
            evaluated = training.values
            keeps_values = hasattr(increments.codec._link, "_flat")
    left_out = total(residual) / 4
    wanted = start - LR * sum(total(gradient(rank, step)) for step in range(20)).flatten() / 4
    torch.testing.assert_close(common + left_out, wanted, rtol=0, atol=1e-5)
    assert float(left_out.abs().max()) > 1e-4
    # An exact mean has all that messages have left out.
    torch.testing.assert_close(evaluated, wanted, rtol=0, atol=1e-5)
    assert spread(common) == 0, "ranks differ in what is common"
    assert not keeps_values, "the values of the last exchange are kept in memory"
    training.run(3)
    state.average()
    assert spread(training.values) == 0
    wanted = wanted - LR * sum(total(gradient(rank, step)) for step in range(20, 23)).flatten() / 4
    torch.testing.assert_close(training.values, wanted, rtol=0, atol=1e-5)
    training.close()


@in_ranks(2)
def test_progress_outlives_any_number_of_averages(rank: int) -> None:
    """With an outer learning rate of 1 too, where owners keep what they leave out of z."""
    for outer in (None, functools.partial(torch.optim.SGD, lr=1.0)):
        state = LocalSGDState(1, delay=1, codec=Int4(), outer_optimizer=outer)
        training = averaged(state, layer(), lr=LR, loss=known_loss)
        start = training.values
        for _ in range(12):
            training.run(2)
            state.average()
        wanted = start - LR * sum(total(gradient(rank, step)) for step in range(24)).flatten() / 2
        torch.testing.assert_close(training.values, wanted, rtol=0, atol=1e-5)
        training.close()


@in_ranks(2)
def test_a_restored_state_can_be_saved_before_it_trains(rank: int) -> None:
    def made() -> Trainer:
        state = LocalSGDState(2, outer_optimizer=NESTEROV, codec=Int4())
        return Trainer(rank, state, "adamw")

    first, second = made().run(6), made()
    saved = copy.deepcopy(first.state.checkpoint(first.optimizer))
    second.state.restore(saved, second.optimizer)
    again = second.state.checkpoint(second.optimizer)
    assert listed(again["hook"]) == listed(saved["hook"])
    first.close()
    second.close()


class Nameless:
    """A user's codec without ``__repr__``."""

    multiple = 1
    nbytes = Identity.nbytes
    encode = Identity.encode
    add_decoded = Identity.add_decoded


@in_ranks(2)
def test_codecs_need_no_name_but_a_table_for_all_ranks(rank: int) -> None:
    averaged(LocalSGDState(2, codec=Nameless()), layer(), loss=known_loss).run(3).close()
    table = PerPair(((Int8(),) * 3,) * 3)
    training = averaged(LocalSGDState(1, 1, codec=(table, Int8())), layer(), loss=known_loss)
    with pytest.raises(UnsupportedConfigurationError, match="a row for each of 2 ranks, got 3"):
        training.run(2)


@in_ranks(4)
def test_a_timeline_changes_neither_bits_nor_bytes_between_nodes(rank: int, tmp_path: Path) -> None:
    ends = []
    for traced in ({}, {"CROSSOVER_TIMELINE": str(tmp_path / "timeline")}):
        with mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": "0,0,1,1", **traced}):
            state = LocalSGDState(1, delay=1, codec=Int4(), process_group=dist.new_group())
            training = averaged(
                state, layer(), loss=known_loss, process_group=state.process_group
            ).run(4)
            ends.append((training.values, state.stats()["codec"]["sent_bytes"]))
            # The rate counts the bytes between nodes. Small messages have more padding.
            assert state.stats()["rate"] == pytest.approx(0.17, abs=0.02)
            training.close()
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("outer", [None, NESTEROV])
@in_ranks(2)
def test_a_mean_for_a_while_changes_nothing_and_a_checkpoint_resumes_its_bits(
    rank: int, outer: Any
) -> None:
    def make() -> Trainer:
        state = LocalSGDState(2, delay=2, codec=Int4(), outer_optimizer=outer)
        return Trainer(rank, state, "adamw")

    plain, looked_at = make().run(7), make().run(3)
    with looked_at.state.averaged():
        looked_at.model.module.state_dict()
    looked_at.run(4)
    assert torch.equal(plain.values, looked_at.values)
    saved = copy.deepcopy(plain.state.checkpoint(plain.optimizer))
    assert spread(plain.values) == 0
    resumed = make()
    resumed.state.restore(saved, resumed.optimizer)
    resumed.steps = plain.steps
    assert torch.equal(plain.run(6).values, resumed.run(6).values)
    for each in (plain, looked_at, resumed):
        each.close()


@in_ranks(2)
def test_statistics_are_those_of_the_codec(rank: int) -> None:
    state = LocalSGDState(1, delay=1, codec=Int4())
    training = averaged(state, nn.Linear(256, 256, bias=False), loss=sum_of_outputs).run(4)
    state.average()
    stats = state.stats()
    assert stats["codec"]["name"] == repr(Int4())
    assert stats["rate"] == stats["codec"]["rate"] == pytest.approx(0.133, abs=0.003)
    # Two halves of an exchange with one other rank, after each of four steps.
    assert stats["codec"]["sent_bytes"] == pytest.approx(4 * 0.133 * 4 * 256 * 256, rel=0.02)
    assert stats["common_bytes"] == 4 * 256 * 256
    training.close()


@in_ranks(2)
def test_ranks_with_other_codecs_are_refused(rank: int) -> None:
    training = averaged(
        LocalSGDState(2, codec=Int4() if rank else Int8()), layer(), loss=known_loss
    )
    with pytest.raises(UnsupportedConfigurationError, match="codec"):
        training.step()


@in_ranks(2)
def test_increments_that_are_not_finite_are_an_error_on_all_ranks(rank: int) -> None:
    training = averaged(LocalSGDState(1, delay=1, codec=Int4()), layer(), loss=known_loss)
    training.run(3)
    if rank:
        training.held[0].data[3, 5] = math.inf
    guilty = "this rank's are among them" if rank else "see the other ranks"
    with pytest.raises(UnsupportedConfigurationError, match=f"expected finite.*{guilty}"):
        training.run(3)


@in_ranks(2)
def test_small_dtypes_are_refused_but_wide_buffers_travel_exactly(rank: int) -> None:
    # Before the first local step, so that the warm-up is not lost.
    narrow = averaged(
        LocalSGDState(2, warmup_steps=9, codec=Int4()), layer().bfloat16(), loss=sum_of_halves
    )
    with pytest.raises(UnsupportedConfigurationError, match="expected parameters of float32"):
        narrow.step()
    network = layer()
    network.register_buffer("seen", torch.zeros(3, 3, dtype=torch.float64))
    training = averaged(
        LocalSGDState(1, delay=1, codec=Int4()), network, loss=known_loss, broadcast_buffers=False
    )
    network.seen.fill_(1 / (3 + rank))
    training.run(3)
    training.state.average()
    wanted = torch.full((3, 3), (1 / 3 + 1 / 4) / 2, dtype=torch.float64)
    torch.testing.assert_close(network.seen, wanted, rtol=1e-15, atol=0)
    training.close()
