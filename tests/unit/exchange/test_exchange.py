"""The engine with one rank: order of calls, threads, failures. What more ranks add is in multiprocess/."""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._system.worker import Worker
from crossover_ddp._timeline.record import Timeline
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.harness import single_process_group
from tests.harness.turn import RecordingTurn
from tests.unit.exchange.fake_bucket import FakeBucket, names_of_threads


@pytest.fixture
def engine(process_group: dist.ProcessGroup) -> Iterator[Exchange]:
    engine = Exchange(process_group)
    yield engine
    engine.close()


def test_alone_a_bucket_is_done_at_once_and_needs_no_thread(engine: Exchange) -> None:
    tensor = torch.arange(5.0)
    future = engine.submit(FakeBucket(tensor))
    assert future.done()
    assert future.value().data_ptr() == tensor.data_ptr()
    assert torch.equal(tensor, torch.arange(5.0))
    assert not any(name.startswith("crossover") for name in names_of_threads())


def test_the_turn_goes_in_the_hook_and_comes_back_on_a_thread_that_may_block(engine: Exchange) -> None:
    gate = threading.Event()
    turn = RecordingTurn(gate=gate)
    first = engine.submit(FakeBucket(torch.ones(2), last=False), turn=turn)
    assert first.done()
    assert turn.order == []
    last = engine.submit(FakeBucket(torch.ones(3), index=1), turn=turn)
    assert turn.order[0] == "release"
    assert not last.done()
    gate.set()
    last.wait()
    assert turn.order == ["release", "request", "acquire"]
    assert turn.threads[0] == threading.current_thread()
    assert {thread.name for thread in turn.threads[1:]} == {"crossover-gather"}


def test_the_owner_changes_its_part_in_between(engine: Exchange) -> None:
    future = engine.submit(FakeBucket(torch.ones(3)), owner_step=lambda part: part.mul_(7))
    assert future.wait().tolist() == [7, 7, 7]


def test_only_the_last_followed_future_waits_for_the_turn(engine: Exchange) -> None:
    gate = threading.Event()
    turn = RecordingTurn(gate=gate)
    theirs = [torch.futures.Future[torch.Tensor]() for _ in range(2)]
    first = engine.follow(theirs[0], FakeBucket(torch.zeros(1), last=False), turn=turn)
    last = engine.follow(theirs[1], FakeBucket(torch.zeros(1), index=1), turn=turn)
    assert first is theirs[0]
    assert turn.order == ["release"]
    theirs[1].set_result(torch.tensor([2.0]))
    gate.set()
    assert not last.done()  # the step's first Future is missing
    theirs[0].set_result(torch.tensor([1.0]))
    assert last.wait().tolist() == [2]
    assert turn.order == ["release", "acquire"]


def test_a_followed_failure_arrives_with_its_cause(engine: Exchange) -> None:
    theirs: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    followed = engine.follow(theirs, FakeBucket(torch.zeros(1)), turn=RecordingTurn())
    theirs.set_exception(RuntimeError("their link broke"))  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match=r"wrapped hook of bucket 0 failed: their link broke"):
        followed.wait()


def test_a_failure_is_final_and_names_rank_bucket_and_cause(engine: Exchange) -> None:
    def fail(part: torch.Tensor) -> None:
        raise ZeroDivisionError("no inverse")

    turn = RecordingTurn()
    future = engine.submit(FakeBucket(torch.zeros(1), index=4), turn=turn, owner_step=fail)
    with pytest.raises(ExchangeError, match=r"rank 0 of 1: .* of bucket 4 failed: no inverse") as caught:
        future.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert turn.order == ["release"]  # the sibling may go on; nobody takes the turn for a failed step
    later = engine.submit(FakeBucket(torch.zeros(1), index=5))
    with pytest.raises(ExchangeError, match=r"of bucket 4 failed: no inverse"):
        later.wait()


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


def test_engine_and_threads_go_with_the_group() -> None:
    with single_process_group() as group:
        engine = Exchange.of(group)
        engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()
        alive = weakref.ref(engine)
        del engine, group
    gc.collect()
    assert alive() is None
    assert "crossover-gather" not in names_of_threads()


def test_destroying_the_group_ends_the_threads_of_an_engine_in_use() -> None:
    with single_process_group() as group:
        engine = Exchange(group)
        engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()
    assert engine.world_size == 1
    assert group is not None
    assert "crossover-gather" not in names_of_threads()


def test_a_fork_neither_hangs_nor_harms_the_parent(engine: Exchange) -> None:
    engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ExchangeError, match="fork of its owner"):
                engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()
            engine.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait().tolist() == [1]


EXIT_SCRIPT = """
import sys, threading, torch, torch.distributed as dist
from crossover_ddp._exchange.exchange import Exchange
from tests.harness.turn import RecordingTurn
from tests.unit.exchange.fake_bucket import FakeBucket
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
engine = Exchange.of(dist.group.WORLD)
future = engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn(gate=threading.Event()))
sys.exit(3)
"""


def test_a_process_may_exit_while_a_thread_is_blocked() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", EXIT_SCRIPT],
        cwd=Path(__file__).resolve().parents[3],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


def test_spans_tell_compute_exchange_and_wait(process_group: dist.ProcessGroup, tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")
    engine = Exchange(process_group, timeline=timeline)
    for _ in range(2):
        engine.submit(FakeBucket(torch.ones(1)), turn=RecordingTurn()).wait()
    engine.close()
    timeline.close()
    spans = [json.loads(line) for line in timeline.path.read_text().splitlines()[1:]]
    assert sorted(span["kind"] for span in spans) == ["compute", "exchange", "exchange", "wait", "wait"]
    assert all(span["begin_s"] <= span["end_s"] for span in spans)


def test_waiting_for_a_deferred_bucket_is_told(process_group: dist.ProcessGroup, tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, rank=0, device="d")
    engine = Exchange(process_group, timeline=timeline)
    _, deferred = engine.defer(FakeBucket(torch.ones(1), index=3))
    assert deferred is not None
    deferred.wait()
    engine.close()
    timeline.close()
    spans = [json.loads(line) for line in timeline.path.read_text().splitlines()[1:]]
    assert [(span["kind"], span["bucket"]) for span in spans] == [("stall", 3)]


def test_a_worker_holds_nothing_between_jobs() -> None:
    class Thing:
        def run(self) -> None:
            done.set()

    done = threading.Event()
    worker = Worker("some-worker")
    thing = Thing()
    alive = weakref.ref(thing)
    worker.put(thing.run)
    assert done.wait(10)
    del thing
    worker.stop()
    assert worker.join(10)
    assert alive() is None
    with pytest.raises(RuntimeError, match="was closed"):
        worker.put(done.set)
