"""Checkpoints of two ranks: what is told to whom, and what is refused; that jobs resume is in tests/conformance."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import (
    CompressedState,
    DecoupledState,
    Int8,
    KFACState,
    LocalSGDState,
    compressed_hook,
    decoupled_hook,
    kfac_hook,
    local_sgd_hook,
)
from crossover_ddp._engine import checkpoint
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.harness.groups import impatient_group
from tests.harness.networks import mlp

WIDTH = 8
PATIENCE_S = 3.0


class Training:
    """A small model, Adam, and one of the hooks."""

    def __init__(self, kind: str, group: dist.ProcessGroup | None = None) -> None:
        self.model = DistributedDataParallel(mlp(WIDTH, WIDTH, WIDTH, seed=1), process_group=group)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        made: dict[str, Any] = {
            "owners": lambda: (
                DecoupledState(self.optimizer, process_group=group, owners="layers"),
                decoupled_hook,
            ),
            "replicas": lambda: (LocalSGDState(4, process_group=group), local_sgd_hook),
            "codec": lambda: (CompressedState(Int8(), process_group=group), compressed_hook),
            "kfac coded": lambda: (self.kfac(codec=Int8()), kfac_hook),
            "kfac decoupled": lambda: (DecoupledState(self.optimizer, kfac=self.kfac()), decoupled_hook),
        }
        self.state, hook = made[kind]()
        self.model.register_comm_hook(self.state, hook)

    def kfac(self, **options: Any) -> KFACState:
        return KFACState(self.model, self.optimizer, factor_update_steps=2, inv_update_steps=4, **options)

    def train(self, rank: int, steps: int, begin: int = 0) -> None:
        for step in range(begin, begin + steps):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def same_on_all_ranks(value: Any) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(equal(each, everyone[0]) for each in everyone)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def saved_by_anybody(rank: int, world_size: int, kind: str) -> None:
    training = Training(kind)
    training.train(rank, 3)
    saved = copy.deepcopy(training.state.checkpoint(training.optimizer))
    assert saved.keys() == {"model", "optimizer", "hook"}
    assert same_on_all_ranks(saved), "one rank's checkpoint is the job's"
    # What a loop of somebody else's saves now is the same.
    assert equal(training.model.module.state_dict(), saved["model"])
    assert equal(training.optimizer.state_dict(), saved["optimizer"])
    assert len(saved["optimizer"]["state"]) == len([*training.model.parameters()])
    assert int(saved["optimizer"]["state"][0]["step"]) == 3
    # And plain DDP loads it.
    plain = mlp(WIDTH, WIDTH, WIDTH, seed=2)
    plain.load_state_dict(saved["model"])
    torch.optim.Adam(plain.parameters()).load_state_dict(saved["optimizer"])
    training.train(rank, 1)
    one = training.state.checkpoint(training.optimizer, to=1)
    assert one.keys() == (saved.keys() if rank == 1 else set())


@pytest.mark.parametrize("kind", ["owners", "replicas", "codec"])
def test_a_checkpoint_is_the_same_on_all_ranks_and_so_is_what_others_save_after_it(kind: str) -> None:
    run_ranks(saved_by_anybody, 2, args=(kind,))


def resumed(rank: int, world_size: int, kind: str) -> None:
    whole, later = Training(kind), Training(kind)
    whole.train(rank, 4)
    whole.state.drain()  # or a codec's residuals are not in K-FAC's checkpoint, with a warning
    whole.train(rank, 1, begin=4)
    saved = copy.deepcopy(whole.state.checkpoint(whole.optimizer))
    later.state.restore(saved, later.optimizer)
    for each in (whole, later):
        each.train(rank, 6, begin=5)
        getattr(each.state, "flush", bool)()
    assert equal([*whole.model.parameters()], [*later.model.parameters()])
    strange = {**saved, "optimizer": [], "hook": {"strange": 1}}
    with pytest.raises(ValueError, match=r"expected .*state.*, got keys \['strange'\]"):
        later.state.restore(strange, ())


@pytest.mark.parametrize("kind", ["kfac coded", "kfac decoupled"])
def test_kfac_resumes_with_a_codec_and_in_decoupled_training(kind: str) -> None:
    run_ranks(resumed, 2, args=(kind,))


def on_one_rank(rank: int, world_size: int) -> tuple[str, str]:
    group = impatient_group(PATIENCE_S)
    checkpoint._PATIENCE_S = 0.5
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    checkpoint.logger.addHandler(handler)
    training = Training("codec", group)
    training.train(rank, 2)
    heard = ""
    if rank == 0:
        try:
            training.state.checkpoint(training.optimizer)
        except ExchangeError as error:
            heard = str(error)
    dist.barrier()
    checkpoint.logger.removeHandler(handler)
    return heard, " ".join(told)


def test_one_rank_alone_is_warned_and_refused_in_bounded_time() -> None:
    (heard, told), other = run_ranks(on_one_rank, 2)
    assert "checkpoint()" in heard
    assert "call it on all ranks, not inside of `if rank == 0:`" in told
    assert other == ("", "")


def with_other_arguments(rank: int, world_size: int) -> str:
    training = Training("owners")
    training.train(rank, 2)
    with pytest.raises(UnsupportedConfigurationError) as refusal:
        training.state.checkpoint(to=rank)
    training.state.checkpoint()  # the group goes on
    with pytest.raises(ValueError, match="expected 0 <= to < 2, got to=2"):
        training.state.checkpoint(to=2)
    return str(refusal.value)


def test_ranks_that_call_with_other_arguments_are_refused() -> None:
    for text in run_ranks(with_other_arguments, 2):
        assert "expected the same to on all ranks, got to by rank {0: 0, 1: 1}" in text


def a_replica_alone(rank: int, world_size: int) -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("crossover_ddp").addHandler(handler)
    training = Training("replicas")
    training.train(rank, 1)
    training.state.checkpoint(training.optimizer)
    training.model.state_dict()
    assert not told
    training.train(rank, 1)
    training.model.state_dict()
    logging.getLogger("crossover_ddp").removeHandler(handler)
    return told


def test_one_replica_is_saved_with_a_warning_and_after_a_checkpoint_without() -> None:
    for told in run_ranks(a_replica_alone, 2):
        assert len(told) == 1
        assert "call state.checkpoint() on all ranks" in told[0]
