"""Which thread adopts the bucket's device: the engine's own ones do, the training thread keeps what it has."""

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.staging import Side
from tests.harness.turn import RecordingTurn
from tests.unit.exchange.fake_bucket import FakeBucket


def test_the_engines_threads_adopt_the_device_before_they_work(
    process_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = RecordingTurn()
    monkeypatch.setattr(Side, "adopt_thread", lambda side: turn._note("adopt"))
    engine = Exchange(process_group)
    engine.submit(FakeBucket(torch.ones(3)), turn=turn).wait()  # type: ignore[arg-type]
    theirs: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    theirs.set_result(torch.ones(3))
    engine.follow(theirs, FakeBucket(torch.ones(3)), turn=turn).wait()  # type: ignore[arg-type]
    engine.close()
    calls = [(call, thread.name) for call, thread in zip(turn.order, turn.threads, strict=True)]
    on_threads = [call for call, thread in calls if thread.startswith("crossover")]
    assert on_threads == ["adopt", "request", "acquire", "adopt", "acquire"]
    assert all(thread.startswith("crossover") for call, thread in calls if call == "adopt")
