"""The engine with one rank: order of calls, threads, failures. What more ranks add is in multiprocess/."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.harness.turn import RecordingTurn
from tests.unit.exchange.fake_bucket import FakeBucket, names_of_threads


@pytest.fixture
def engine(process_group: dist.ProcessGroup) -> Iterator[Exchange]:
    engine = Exchange(process_group)
    yield engine
    engine.close()


def test_the_owner_changes_its_part_in_between(engine: Exchange) -> None:
    future = engine.submit(FakeBucket(torch.ones(3)), owner_step=lambda part: part.mul_(7))
    assert future.wait().tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (FakeBucket(torch.zeros(3).to_sparse()), r"got bucket 0 with layout=torch\.sparse_coo"),
        (FakeBucket(torch.zeros(3, dtype=torch.complex64)), r"got bucket 0 with dtype=torch\.complex64"),
        ((torch.zeros(3), torch.zeros(3)), "tuple"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_and_the_engine_goes_on(
    engine: Exchange, bucket: FakeBucket, message: str
) -> None:
    with pytest.raises(UnsupportedConfigurationError, match=message):
        engine.submit(bucket).wait()
    assert engine.submit(FakeBucket(torch.ones(1))).wait().tolist() == [1]


def test_a_closed_engine_has_no_threads_and_says_so(engine: Exchange) -> None:
    engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()
    assert "crossover-gather" in names_of_threads()
    engine.close()
    engine.close()
    assert "crossover-gather" not in names_of_threads()
    with pytest.raises(ExchangeError, match="was closed"):
        engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()


def test_one_engine_serves_a_group_until_it_is_closed(process_group: dist.ProcessGroup) -> None:
    engine = Exchange.of(process_group)
    assert Exchange.of(process_group) is engine
    engine.close()
    assert Exchange.of(process_group) is not engine
