"""When decoupled training takes its turn: once there is something to compute with it."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, decoupled_hook
from crossover_ddp._exchange.transfer import Deferred
from tests.harness.turn import RecordingTurn
from tests.unit.decoupled.decoupled_training import inputs, network, sgd

STEPS = 6
DEFERRED = 3  # of them at the end
pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_sibling_the_turn_is_drawn_when_the_device_has_the_first_gradients(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL a Future is complete long before its kernels are."""
    log: list[str] = []
    wait_on_host = Deferred.wait_on_host

    def noted(self: Deferred) -> None:
        log.append("arrived")
        wait_on_host(self)

    monkeypatch.setattr(Deferred, "wait_on_host", noted)
    model = DistributedDataParallel(network(), bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    optimizer = sgd(model)
    turn: Any = RecordingTurn(log=log, shared=shared)
    state = DecoupledState(optimizer, mutex=turn, defer="always")
    model.register_comm_hook(state, decoupled_hook)
    for step in range(STEPS):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.close()
    found = [call for call in log if call != "request"]
    expected = ["arrived", "acquire", "release"] if shared else ["acquire", "release"]
    assert found[-DEFERRED * len(expected) :] == expected * DEFERRED


def test_a_native_gather_can_be_waited_for_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from crossover_ddp._exchange.exchange import Exchange
    from crossover_ddp._exchange.staging import Side
    from tests.unit.exchange.fake_bucket import FakeBucket

    waited: list[str] = []
    monkeypatch.setattr(Side, "mark", lambda self: lambda: waited.append("device"))
    engine = Exchange(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    monkeypatch.setattr(engine.routes, "way", lambda device: engine.routes.native)
    _, deferred = engine.defer(FakeBucket(torch.ones(4), index=0, last=True))  # type: ignore[arg-type]
    assert deferred is not None
    deferred.wait()
    assert waited == []
    deferred.wait_on_host()
    assert waited == ["device"]
    engine.close()
