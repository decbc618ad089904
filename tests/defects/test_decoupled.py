"""Known defects of decoupled training: the section "Seams" of the report on it, and what strangers' programs found."""

import contextlib
import copy
import functools
import itertools
import logging
import pickle
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import timm.optim
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import DecoupledState, UnsupportedConfigurationError
from tests.harness import Job, in_ranks, inside, run_jobs
from tests.harness import training as harness
from tests.harness.groups import impatient_group
from tests.harness.networks import Branches, mlp
from tests.harness.oracles import error_of
from tests.harness.training import CountsPerGroup, decoupled
from tests.harness.turn import RecordingTurn
from tests.unit.decoupled.decoupled_training import Training, assert_same, both, inputs, network

pytestmark = pytest.mark.usefixtures("process_group")
OWNERS: list[dict[str, Any]] = [{}, {"owners": "layers"}]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": module.parameters()} for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.defect("decoupled-1")
@pytest.mark.parametrize("options", OWNERS, ids=str)
def test_a_group_without_gradients_is_counted_as_by_plain_ddp(options: dict[str, Any]) -> None:
    ddp = {"find_unused_parameters": True}
    ours, plain = both(
        make=lambda model: CountsPerGroup(groups_of(model), lr=0.1), net=Branches, ddp=ddp, **options
    )
    assert_same(plain.run(8), ours.run(8))
    assert [group["k"] for group in ours.optimizer.param_groups] == [8, 8, 8]


@pytest.mark.parametrize("options", OWNERS, ids=str)
def test_what_was_put_around_step_before_is_called_once_a_step(options: dict[str, Any]) -> None:
    """A scheduler's step, say, or an average's update."""
    calls = Counter[int]()

    def wrapped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inner: Callable[[], Any] = optimizer.step

        def step() -> Any:
            inner()
            calls[id(optimizer)] += 1
            optimizer.param_groups[0]["lr"] *= 0.9

        optimizer.step = step  # type: ignore[method-assign, assignment]
        return optimizer

    if options:
        with pytest.raises(UnsupportedConfigurationError, match="own step"):
            Training(decoupled=True, make=wrapped, **options)
        return
    ours, plain = both(make=wrapped)
    assert_same(plain.run(8), ours.run(8))
    assert [*calls.values()] == [8, 8]


class FailsOnce(torch.optim.SGD):
    """Runs out of memory in the update of some parameters, as often as asked."""

    fails = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails and any(group["params"] for group in self.param_groups):
            type(self).fails -= 1
            raise torch.OutOfMemoryError("out of memory")
        return super().step(closure)


def test_an_update_that_failed_in_forward_is_an_error_for_a_script_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(decoupled=True, make=lambda model: FailsOnce(model.parameters(), lr=0.1)).run()
    training.step()
    assert training.is_pending
    monkeypatch.setattr(FailsOnce, "fails", 1)
    with pytest.raises(torch.OutOfMemoryError):
        training.model(inputs(0))
    for use in (lambda: training.model(inputs(0)), training.model.state_dict, training.state.flush):
        with pytest.raises(UnsupportedConfigurationError, match="unknown part"):
            use()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_the_optimizer_is_of_one_moment(copied: Callable[[Any], Any]) -> None:
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ours, plain = both(make=lambda model: make(model.parameters()))
    for each in (plain.run(), ours.run()):
        each.step()
    assert ours.is_pending
    found = [copied(each.optimizer) for each in (ours, plain)]
    for group, other in zip(*(each.param_groups for each in found), strict=True):
        for one, two in zip(group["params"], other["params"], strict=True):
            assert torch.equal(one, two)
    momenta = [[each["momentum_buffer"] for each in copy.state.values()] for copy in found]
    assert all(map(torch.equal, *momenta))


def test_on_update_tells_of_no_frozen_parameter() -> None:
    def frozen() -> nn.Module:
        module = network()
        next(module.parameters()).requires_grad_(False)
        return module

    training = Training(
        decoupled=True, net=frozen, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    told = list[Tensor]()
    training.state.on_update(told.extend)
    training.run()
    training.state.flush()
    assert told
    assert all(each.requires_grad for each in told)


class Saving(dict[str, Any]):
    """A parameter group: when ``step()`` looks at it, a thread saves the model."""

    saver: threading.Thread | None = None

    def items(self) -> Any:
        if self.saver is not None and self.saver.ident is None:
            self.saver.start()
            self.saver.join(timeout=0.3)  # it may have to wait for the end of step()
        return super().items()


@pytest.mark.defect("decoupled-2", "decoupled-13", "decoupled-17")
def test_a_thread_that_saves_during_step_loses_no_step() -> None:
    training, plain = both()
    training.run()
    training.backward()
    group = Saving(training.optimizer.param_groups[0])
    training.optimizer.param_groups[0] = group
    group.saver = threading.Thread(target=training.model.module.state_dict)
    training.optimizer.step()
    assert group.saver.ident is not None, "nobody looked at the group"
    group.saver.join()
    assert_same(training, plain.run(6))


def test_a_thread_that_looks_before_the_last_bucket_is_sent_takes_no_bucket_away() -> None:
    """Gradients would be clipped by the norm of those in the last bucket."""
    training, other = (Training(decoupled=True).run() for _ in range(2))

    def look() -> None:
        looker = threading.Thread(target=lambda: [*training.optimizer.param_groups[0]["params"]])
        looker.start()
        looker.join(60)

    with inside.before_last_bucket(look):
        training.backward()
    other.backward()
    assert torch.equal(*(each.state.clip_grad_norm_(0.01) for each in (training, other)))
    for each in (training, other):
        each.update()
    assert training.is_pending
    assert_same(training, other)


@pytest.mark.parametrize(("reader", "where"), [("thread", torch), ("signal's handler", dist)])
def test_gradients_that_somebody_reads_while_they_are_clipped_are_clipped(reader: str, where: Any) -> None:
    training, plain = (Training(decoupled=True).run() for _ in range(2))
    saver = threading.Thread(target=training.model.module.state_dict)
    name = "clamp" if where is torch else "all_reduce"  # the last of what `clip` does, and what takes time
    original = getattr(where, name)

    def read_meanwhile(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if reader != "thread":
            training.model.module.state_dict()
        elif saver.ident is None:
            saver.start()
            saver.join(timeout=0.3)  # it may have to wait for the end of clipping
        return result

    training.backward()
    plain.backward()
    with mock.patch.object(where, name, read_meanwhile):
        norm = training.state.clip_grad_norm_(0.01)
    assert torch.equal(norm, plain.state.clip_grad_norm_(0.01))
    if reader == "thread":
        saver.join(60)
    training.update()
    plain.update()
    assert_same(training, plain)


class Stopping(torch.optim.SGD):
    armed, inside, go = False, threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        if Stopping.armed:
            Stopping.armed = False
            self.inside.set()
            self.go.wait(60)
        return super().step(closure)


@pytest.mark.defect("decoupled-4", "decoupled-17")
def test_a_scheduler_that_steps_while_a_thread_saves_reaches_all_groups() -> None:
    training = Training(decoupled=True, make=lambda model: Stopping(groups_of(model), lr=0.1))
    optimizer: Any = training.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    training.run()
    training.step()
    Stopping.armed = True
    saver = threading.Thread(target=training.model.module.state_dict)
    saver.start()
    try:
        assert optimizer.inside.wait(60)
        scheduler.step()
    finally:
        optimizer.go.set()
        saver.join()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05, 0.05]


@pytest.mark.defect("decoupled-3")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", OWNERS, ids=str)
def test_a_forward_that_nobody_steps_on_takes_no_further_turn(options: dict[str, Any], grad: bool) -> None:
    turns = RecordingTurn()
    training = Training(decoupled=True, mutex=turns, **{**options, "defer": "auto"})
    for _ in range(24):  # deferred and not deferred, in turns
        training.step()
        with torch.set_grad_enabled(grad):
            training.model(inputs(0))
    log = turns.taken_and_given
    runs = {(name, len(list(run))) for name, run in itertools.groupby(log[log.index("acquire") :])}
    assert runs == {("acquire", 1), ("release", 1)}


@pytest.mark.defect("decoupled-5")
@in_ranks(2)
def test_gradients_read_after_a_forward_that_failed_are_the_mean(rank: int) -> None:
    """Rank 0 reads while rank 1 still computes; a forward has failed before or after backward."""
    found = []
    for training in both(net=lambda: mlp(6, 6, seed=0), make=lambda m: torch.optim.SGD(m.parameters())):
        training.run()
        norms = []
        for moment in ("before", "after"):
            loss = training.model(inputs(rank)).sum() * (1 + rank)
            failing = contextlib.suppress(RuntimeError)
            if moment == "before":
                with failing:
                    training.model(torch.ones(2, 5))
            time.sleep(0.2 * rank)
            loss.backward()
            if moment == "after":
                with failing:
                    training.model(torch.ones(2, 5))
            norms.append(
                float(torch.stack([p.grad.norm() for p in training.model.module.parameters()]).norm())
            )
            training.drop()
        found.append(norms)
        training.close()
    assert found[0] == found[1]


def refused_on_rank_1(rank: int, world_size: int, defer: str, cap_mb: float) -> str:
    """Go on behind a bucket that rank 1 refuses, as a script that leaves a bad batch out; return the next error."""
    ddp = {"process_group": impatient_group(4), "bucket_cap_mb": cap_mb}
    training = Training(decoupled=True, ddp=ddp, defer=defer).run(12)
    if rank:
        with inside.refuse_bucket("last"), pytest.raises(KeyError, match="ours"):
            training.step()
        training.drop()
    return error_of(lambda: training.run(8))


@pytest.mark.defect("decoupled-12")
@pytest.mark.quiet
def test_a_bucket_refused_on_one_rank_alone_is_an_error_on_the_others() -> None:
    cases = [("always", 1e-4), ("auto", 25)]
    jobs = [Job(refused_on_rank_1, 2, case, name=str(case)) for case in cases]  # all of them do is wait
    named = re.compile(r"rank \d.* bucket \d")
    for other, own in run_jobs(jobs):
        assert named.search(other), other
        assert own == "no error" or named.search(own), own


@pytest.mark.defect("decoupled-6")
@in_ranks(2)
def test_the_greatest_gradient_is_nan_if_any_is(rank: int) -> None:
    # Each rank owns a row.
    training = Training(decoupled=True, net=lambda: nn.Linear(6, 2, bias=False), ddp={"bucket_cap_mb": 25})
    (training.model(torch.ones(1, 6)) * torch.tensor([1.0, float("nan")])).sum().backward()
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        training.state.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True)


@pytest.mark.defect("decoupled-7", "strangers-31")
def test_groups_added_before_the_first_backward_are_updated_or_refused_by_name() -> None:
    training = Training(
        decoupled=True, owners="layers", make=lambda m: torch.optim.SGD(m.module[0].parameters(), lr=0.1)
    )
    training.optimizer.add_param_group({"params": training.model.module[2:].parameters()})
    with pytest.raises(UnsupportedConfigurationError, match=r"add_param_group\(\) make a new state"):
        training.step()


class Noisy(torch.optim.SGD):
    """Draws noise for each parameter, as SGLD does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.add_(torch.randn_like(parameter))
        return super().step(closure)


@pytest.mark.defect("decoupled-8", "decoupled-17", "strangers-31")
@pytest.mark.parametrize(
    "make",
    [
        lambda model: timm.optim.create_optimizer_v2(list(model.parameters()), opt="kron", lr=0.01),
        lambda model: Noisy(model.parameters(), lr=0.1),
    ],
    ids=["kron", "sgld"],
)
def test_an_optimizer_that_draws_for_each_parameter_is_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    refused = pytest.raises(UnsupportedConfigurationError, match="randomness")
    with refused, torch.compiler.set_stance("force_eager"):
        Training(decoupled=True, make=make)


@pytest.mark.defect("decoupled-16")
@in_ranks(2)
def test_buffers_between_steps_do_not_hang_on_whether_a_step_is_deferred(rank: int) -> None:
    """Who goes through the model after a step finds rank 0's running mean on rank 1, too."""
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    training, found = Training(decoupled=True, net=lambda: net, defer="auto"), []
    for step in range(24):
        training.steps = 2 * step + rank
        training.step()
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, net.state_dict()["1.running_mean"])
        found.append(torch.equal(*everyone))
    assert all(found[3:])


@pytest.mark.defect("decoupled-15")
def test_the_norm_has_the_widest_type_of_all_gradients() -> None:
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1).bfloat16()])
    net.forward = lambda x: net[1](net[0](x).bfloat16())  # type: ignore[method-assign]
    training = Training(decoupled=True, net=lambda: net)
    training.backward()
    norm = training.state.clip_grad_norm_(1.0)
    training.state.flush()
    assert norm.dtype == clip_grad_norm_(training.held, 1.0).dtype == torch.float32


@pytest.mark.defect("strangers-7")
@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_clipping_does_not_hang_on_whether_a_step_is_deferred(norm_type: float) -> None:
    runs = [Training(decoupled=True, net=lambda: mlp(6, 40, 40, 6, seed=3, tanh_last=True)) for _ in range(2)]
    for step in range(12):
        norms = []
        for run in runs:
            run.backward()
            if run is runs[0]:
                run.state.flush()
            norms.append(run.state.clip_grad_norm_(0.01, norm_type))
            run.update()
        assert torch.equal(*norms), step
    assert_same(*runs)


@pytest.mark.defect("strangers-11")
@pytest.mark.parametrize("way", ["flush", "on_update"])
@pytest.mark.parametrize("options", [*OWNERS, {"defer": "auto"}], ids=str)
def test_a_moving_average_over_a_list_of_parameters_is_that_of_plain_ddp(
    way: str, options: dict[str, Any]
) -> None:
    ours, plain = runs = both(**options)
    averages = [{parameter: parameter.detach().clone() for parameter in run.held} for run in runs]
    calls = Counter[Tensor]()

    def update(new: Sequence[Any], average: dict[Any, Tensor] = averages[0]) -> None:
        torch._foreach_lerp_([average[p] for p in new], [p.detach() for p in new], 0.5)
        calls.update(new)

    if way == "on_update":
        ours.state.on_update(update)
    for _ in range(6):
        plain.step()
        update(plain.held, averages[1])
        ours.step()
        if way == "flush":
            ours.state.flush()
            update(ours.held)
    if way == "on_update" and options != {"defer": "auto"}:
        assert ours.state.stats()["deferred"]
    ours.state.flush()
    assert all(map(torch.equal, *(each.values() for each in averages)))
    assert {*calls.values()} == {6}


def test_who_listens_is_told_of_steps_alone_and_until_the_handle_is_removed() -> None:
    training, heard = Training(decoupled=True), Counter[Tensor]()
    handle = training.state.on_update(heard.update)
    with training.model.no_sync():
        training.backward()
    training.backward()
    training.optimizer.zero_grad()
    training.backward()
    assert not heard
    for _ in range(2):  # the second one unheard
        training.optimizer.step()
        training.state.flush()
        assert heard == Counter(training.held)
        handle.remove()
        training.drop()
        training.backward()


def test_who_listens_hears_of_a_parameter_once_in_a_step_of_several_optimizers() -> None:
    """All are in one bucket; in each second step one of the optimizers has no gradients."""

    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        one, other, head = model.module.branches[0], model.module.branches[1], model.module.head
        return [torch.optim.SGD([*one.parameters(), *head.parameters()]), torch.optim.SGD(other.parameters())]

    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 25}
    training = harness.Training(decoupled(owners="layers"), module=Branches(), optimizers=two, **ddp)
    heard = Counter[Tensor]()
    training.state.on_update(heard.update)
    training.run(8).state.flush()
    assert [heard[parameter] for parameter in training.held] == [8] * 6


COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP(torch.compile(net))": lambda net: wrapped(torch.compile(net, backend="eager")),
    "net.compile()": lambda net: (net.compile(backend="eager"), wrapped(net))[1],
    "blocks": lambda net: (net[0].compile(backend="eager"), wrapped(net))[1],
    "torch.compile(ddp)": lambda net: torch.compile(wrapped(net, compiled=True), backend="eager"),
}


def wrapped(net: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(net, **DecoupledState.ddp_options(net, **options))


@pytest.mark.defect("strangers-26")
@pytest.mark.parametrize("way", COMPILED)
def test_options_for_ddp_let_a_small_model_be_compiled(way: str, request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    request.addfinalizer(torch._dynamo.reset)
    COMPILED[way](network())(inputs(0)).sum().backward()


class Pinn(nn.Module):
    """A network whose loss has its derivative by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.net))(x)  # type: ignore[no-any-return]


@pytest.mark.defect("strangers-27")
def test_derivatives_by_torch_func_in_forward_train_as_with_plain_ddp() -> None:
    ours, plain = both(net=Pinn)
    assert_same(plain.run(6), ours.run(6))


class Interrupted(torch.optim.SGD):
    """Gets a signal in the middle of a step, where one is handled."""

    def step(self, closure: Any = None) -> Any:
        if callable(signal.getsignal(signal.SIGUSR1)):
            signal.raise_signal(signal.SIGUSR1)
        return super().step(closure)


@pytest.mark.defect("strangers-28")
def test_a_checkpoint_from_a_signal_handler_inside_an_update_is_one() -> None:
    training, plain = both(make=lambda m: Interrupted(m.parameters(), lr=0.1))
    former = signal.getsignal(signal.SIGUSR1)
    saved: list[Any] = []

    def save(*_: Any) -> None:
        signal.signal(signal.SIGUSR1, former)
        saved.append(training.model.module.state_dict())

    for _ in range(6):
        signal.signal(signal.SIGUSR1, save)
        training.step()
    signal.signal(signal.SIGUSR1, former)
    assert len(saved) == 6
    assert_same(training, plain.run(6))


@pytest.mark.defect("strangers-31")
def test_checkpoints_now_and_then_are_no_moving_average(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(decoupled=True)
    with caplog.at_level(logging.WARNING):
        for step in range(64):
            training.step()
            if step % 16 == 15:
                training.model.module.state_dict()
    assert not caplog.records
