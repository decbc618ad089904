"""Threads, signal handlers and schedulers that act in the middle of a decoupled step."""

import copy
import functools
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from crossover_ddp import UnsupportedConfigurationError
from tests.unit.decoupled.decoupled_training import (
    Acting,
    Training,
    act,
    assert_same,
    both,
    groups_of,
    inputs,
)

pytestmark = pytest.mark.usefixtures("process_group")
refused = functools.partial(pytest.raises, UnsupportedConfigurationError)


def test_after_an_update_that_failed_in_forward_every_use_raises() -> None:
    training = Training(decoupled=True, make=Acting.of).run(6)
    assert training.is_pending
    with (
        act(side_effect=torch.OutOfMemoryError("out of memory")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        training.model(inputs(0))
    for use in (lambda: training.model(inputs(0)), training.model.state_dict, training.state.flush):
        with refused(match="unknown part"):
            use()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_the_optimizer_has_parameters_and_momentum_of_one_step(
    copied: Callable[[Any], Any],
) -> None:
    ours, plain = (each.run(6) for each in both())
    assert ours.is_pending
    copies = [copied(each.optimizer) for each in (ours, plain)]
    found = [tree_leaves([each.param_groups, [*each.state.values()]]) for each in copies]
    values, expected = ([each for each in of_one if isinstance(each, Tensor)] for of_one in found)
    assert len(values) == 12, "parameters and momenta"
    assert all(map(torch.equal, values, expected))


class Saving(dict[str, Any]):
    """A parameter group that has a thread save the model when ``step()`` reads it."""

    saver: threading.Thread | None = None

    def items(self) -> Any:
        if self.saver is not None and self.saver.ident is None:
            self.saver.start()
            self.saver.join(timeout=0.3)  # it may have to wait for the end of step()
        return super().items()


@pytest.mark.defect("decoupled-2", "decoupled-13", "decoupled-17")
def test_no_step_is_lost_when_a_thread_saves_during_step() -> None:
    training, plain = both()
    training.run()
    training.backward()
    group = Saving(training.optimizer.param_groups[0])
    training.optimizer.param_groups[0] = group
    group.saver = threading.Thread(target=training.model.module.state_dict)
    training.optimizer.step()
    assert group.saver.ident is not None, "step() did not read the group"
    group.saver.join()
    assert_same(training, plain.run(6))


@pytest.mark.parametrize("reader", ["another thread", "a signal's handler"])
def test_gradients_that_are_read_during_clipping_are_clipped(reader: str) -> None:
    training, flushed = (Training(decoupled=True).run() for _ in range(2))
    read: list[torch.Tensor] = []

    def look() -> None:
        read.extend([p.grad.clone() for p in training.held if p.grad is not None])

    clamp = torch.clamp  # called between the norm and the first multiplication

    def read_behind(*args: Any, **options: Any) -> Any:
        result = clamp(*args, **options)
        if reader == "another thread":
            saver = threading.Thread(target=look)
            saver.start()
            saver.join(60)
        else:
            look()
        return result

    for each in (training, flushed):
        each.backward()
    flushed.state.flush()
    with mock.patch.object(torch, "clamp", read_behind):
        norm = training.state.clip_grad_norm_(0.01)
    assert torch.equal(norm, flushed.state.clip_grad_norm_(0.01))
    assert len(read) == len(training.held)
    for each in (training, flushed):
        each.update()
    assert_same(training, flushed)


@pytest.mark.defect("decoupled-4", "decoupled-17")
def test_a_scheduler_step_while_threads_save_reaches_all_groups_and_updates_apply_once() -> None:
    runs = both(make=lambda model: Acting(groups_of(model), lr=0.1))
    schedulers = [torch.optim.lr_scheduler.StepLR(each.optimizer, 1, 0.5) for each in runs]
    training, plain = (each.run(6) for each in runs)
    begun, go = threading.Event(), threading.Event()
    savers = [threading.Thread(target=training.model.module.state_dict) for _ in range(2)]
    with act(side_effect=lambda: begun.set() or go.wait(60)):
        for saver in savers:
            saver.start()
        assert begun.wait(60)
        savers[1].join(0.3)  # one of them has to wait
        schedulers[0].step()
        go.set()
        for saver in savers:
            saver.join(60)
    schedulers[1].step()
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.05, 0.05, 0.05]
    assert_same(training, plain)


@pytest.mark.defect("strangers-28")
def test_a_signal_handler_may_save_in_the_middle_of_an_update() -> None:
    training, plain = both(make=Acting.of)
    former, saved = signal.getsignal(signal.SIGUSR1), list[Any]()

    def save(*_: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        saved.append(training.model.module.state_dict())

    with act(side_effect=lambda: signal.raise_signal(signal.SIGUSR1)):
        for _ in range(6):
            signal.signal(signal.SIGUSR1, save)
            training.step()
    signal.signal(signal.SIGUSR1, former)
    assert len(saved) == 5, "the last one is pending"
    assert_same(training, plain.run(6))
