"""Known defects of decoupled training, of owners and of Muon: the report on it, and what strangers' programs found."""

import contextlib
import copy
import functools
import itertools
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
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_leaves

from crossover_ddp import DecoupledState, ExchangeError, UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_parameters
from tests.harness import in_ranks, inside
from tests.harness import training as harness
from tests.harness.groups import impatient_group
from tests.harness.networks import Branches, mlp
from tests.harness.oracles import error_of
from tests.harness.training import CountsPerGroup, decoupled
from tests.harness.turn import RecordingTurn
from tests.unit.decoupled.decoupled_training import (
    Acting,
    Training,
    assert_same,
    both,
    inputs,
    network,
)

pytestmark = pytest.mark.usefixtures("process_group")
refused = functools.partial(pytest.raises, UnsupportedConfigurationError)
OWNERS: list[dict[str, Any]] = [{}, {"owners": "layers"}]


def act(**how: Any) -> Any:
    return mock.patch.object(Acting, "act", mock.Mock(**how))


def owned(**options: Any) -> Training:
    return Training(decoupled=True, owners="layers", **options)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": module.parameters()}
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]


class Pinn(nn.Module):
    """A network whose loss has its derivative by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.net))(x)  # type: ignore[no-any-return]


class Decaying(torch.optim.SGD):
    """Adds the decay of weights to gradients in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=0.1)
        return super().step(closure)


def quantised() -> nn.Module:
    net = network()
    net.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    return net


WALKS: dict[str, dict[str, Any]] = {
    "a group without gradients is counted": {
        "net": Branches,
        "make": lambda model: CountsPerGroup(groups_of(model), lr=0.1),
        "ddp": {"find_unused_parameters": True},
    },
    "an optimizer may reuse the memory of gradients": {
        "make": lambda m: Decaying(m.parameters(), lr=0.1)
    },
    "a frozen integer parameter may be in the optimizer": {
        "net": quantised,
        "make": lambda model: Decaying(model.parameters(), lr=0.1),
    },
    "forward may take derivatives by torch.func": {"net": Pinn},
}


@pytest.mark.defect("decoupled-1", "strangers-6", "strangers-27", "strangers-37")
@pytest.mark.parametrize("options", OWNERS, ids=str)
@pytest.mark.parametrize("walk", WALKS)
def test_the_walk_is_that_of_plain_ddp(walk: str, options: dict[str, Any]) -> None:
    ours, plain = (each.run(8) for each in both(**WALKS[walk], **options))
    assert_same(plain, ours)
    for group, expected in zip(
        *(each.optimizer.param_groups for each in (ours, plain)), strict=True
    ):
        assert {**group, "params": ()} == {**expected, "params": ()}


def test_what_was_put_around_step_before_is_called_once_a_step_and_refused_for_owners() -> None:
    """A scheduler's step, say, or an average's update."""

    def wrapped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inner, group = optimizer.step, optimizer.param_groups[0]
        optimizer.step = lambda: (inner(), group.update(lr=0.9 * group["lr"]))  # type: ignore[method-assign, assignment]
        return optimizer

    ours, plain = both(make=wrapped)
    assert_same(plain.run(8), ours.run(8))
    with refused(match="own step"):
        owned(make=wrapped)


def test_an_update_that_failed_in_forward_is_an_error_for_a_script_that_goes_on() -> None:
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
def test_a_copy_of_the_optimizer_is_of_one_moment(copied: Callable[[Any], Any]) -> None:
    ours, plain = (each.run(6) for each in both())
    assert ours.is_pending
    copies = [copied(each.optimizer) for each in (ours, plain)]
    found = [tree_leaves([each.param_groups, [*each.state.values()]]) for each in copies]
    values, expected = ([each for each in of_one if isinstance(each, Tensor)] for of_one in found)
    assert len(values) == 12, "parameters and momenta"
    assert all(map(torch.equal, values, expected))


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


# Before the last bucket gradients would be clipped by the norm of those in it.
@pytest.mark.parametrize(
    "reader", ["thread before the last bucket", "thread meanwhile", "signal's handler"]
)
def test_gradients_that_somebody_reads_before_or_while_they_are_clipped_are_clipped(
    reader: str,
) -> None:
    training, plain = (Training(decoupled=True).run() for _ in range(2))
    is_early = reader == "thread before the last bucket"

    def look() -> None:
        if is_early:
            list(training.optimizer.param_groups[0]["params"])
        else:
            training.model.module.state_dict()

    saver = threading.Thread(target=look)

    def read() -> None:
        if reader == "signal's handler":
            look()
        elif saver.ident is None:
            saver.start()
            saver.join(60 if is_early else 0.3)  # it may have to wait for the end of clipping

    # The last of what `clip` does, and what takes time.
    where, name = (torch, "clamp") if reader == "thread meanwhile" else (dist, "all_reduce")
    original = getattr(where, name)

    def read_behind(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        read()
        return result

    with inside.before_last_bucket(read) if is_early else contextlib.nullcontext():
        training.backward()
    plain.backward()
    with contextlib.nullcontext() if is_early else mock.patch.object(where, name, read_behind):
        norm = training.state.clip_grad_norm_(0.01)
    assert torch.equal(norm, plain.state.clip_grad_norm_(0.01))
    if saver.ident is not None:
        saver.join(60)
    training.update()
    plain.update()
    assert training.is_pending or not is_early
    assert_same(training, plain)


@pytest.mark.defect("decoupled-4", "decoupled-17")
def test_a_scheduler_that_steps_while_threads_save_reaches_all_groups_and_no_update_is_made_twice() -> (
    None
):
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


@pytest.mark.defect("decoupled-3")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", OWNERS, ids=str)
def test_a_forward_that_nobody_steps_on_takes_no_further_turn(
    options: dict[str, Any], grad: bool
) -> None:
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
    found, failing = [], contextlib.suppress(RuntimeError)
    for training in both(
        net=lambda: mlp(6, 6, seed=0), make=lambda m: torch.optim.SGD(m.parameters())
    ):
        training.run()
        for moment in ("before", "after"):
            loss = training.model(inputs(rank)).sum() * (1 + rank)
            if moment == "before":
                with failing:
                    training.model(torch.ones(2, 5))
            time.sleep(0.2 * rank)
            loss.backward()
            if moment == "after":
                with failing:
                    training.model(torch.ones(2, 5))
            found.append([p.grad.tolist() for p in training.model.module.parameters()])
            training.drop()
        training.close()
    assert found[:2] == found[2:]


@pytest.mark.defect("decoupled-12")
@pytest.mark.quiet
@pytest.mark.parametrize(("defer", "cap_mb"), [("always", 1e-4), ("auto", 25)])
@in_ranks(2)
def test_a_bucket_refused_on_one_rank_is_an_error_on_the_others(
    rank: int, defer: str, cap_mb: float
) -> None:
    """Rank 1 goes on behind it, as a script that leaves a bad batch out."""
    ddp = {"process_group": impatient_group(2), "bucket_cap_mb": cap_mb}
    training = Training(decoupled=True, ddp=ddp, defer=defer).run(12)
    if rank:
        with inside.refuse_bucket("last"), pytest.raises(KeyError, match="ours"):
            training.step()
        training.drop()
    told = error_of(lambda: training.run(8))
    assert re.search(r"rank \d.* bucket \d", told) or (rank and told == "no error"), told


@pytest.mark.defect("decoupled-6")
@in_ranks(2)
def test_the_greatest_gradient_is_nan_if_any_is(rank: int) -> None:
    # Each rank owns a row.
    training = Training(
        decoupled=True, net=lambda: nn.Linear(6, 2, bias=False), ddp={"bucket_cap_mb": 25}
    )
    (training.model(torch.ones(1, 6)) * torch.tensor([1.0, float("nan")])).sum().backward()
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        training.state.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True)


@pytest.mark.defect("decoupled-16")
@in_ranks(2)
def test_buffers_between_steps_do_not_hang_on_whether_a_step_is_deferred(rank: int) -> None:
    """Code that goes through the model after a step finds the running mean of plain DDP: this rank's own."""
    found: list[list[torch.Tensor]] = []
    for is_ours in (False, True):
        net = nn.Sequential(network(), nn.BatchNorm1d(6))
        training = Training(
            decoupled=is_ours, net=lambda net=net: net, **({"defer": "auto"} if is_ours else {})
        )
        means = []
        for step in range(24):
            training.steps = 2 * step + rank
            training.step()
            means.append(net.state_dict()["1.running_mean"].clone())
        found.append(means)
    assert all(map(torch.equal, *found))


@pytest.mark.defect("decoupled-15")
def test_the_norm_has_the_widest_type_of_all_gradients() -> None:
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1).bfloat16()])
    net.forward = lambda x: net[1](net[0](x).bfloat16())  # type: ignore[method-assign]
    training = Training(decoupled=True, net=lambda: net)
    training.backward()
    norm = training.state.clip_grad_norm_(1.0)
    training.state.flush()
    assert norm.dtype == clip_grad_norm_(training.held, 1.0).dtype == torch.float32


@pytest.mark.defect("strangers-11")
@pytest.mark.parametrize("options", [*OWNERS, {"defer": "auto"}], ids=str)
def test_a_moving_average_of_a_list_of_parameters_is_plain_ddps(options: dict[str, Any]) -> None:
    """By ``on_update``; behind ``flush`` it is what tensors taken earlier are in tests/unit/decoupled."""
    ours, plain = runs = both(**options)
    averages = [{parameter: parameter.detach().clone() for parameter in run.held} for run in runs]
    calls = Counter[Tensor]()

    def update(new: Sequence[Any], average: dict[Any, Tensor] = averages[0]) -> None:
        torch._foreach_lerp_([average[p] for p in new], [p.detach() for p in new], 0.5)
        calls.update(new)

    ours.state.on_update(update)
    for _ in range(6):
        plain.step()
        update(plain.held, averages[1])
        ours.step()
    assert ours.is_pending or options == {"defer": "auto"}
    ours.state.flush()
    assert all(map(torch.equal, *(each.values() for each in averages)))
    assert {*calls.values()} == {6}


def test_who_listens_is_told_of_steps_alone_and_until_the_handle_is_removed() -> None:
    """And of no frozen parameter."""

    def partly_frozen() -> nn.Module:
        module = network()
        module[0].weight.requires_grad_(False)
        return module

    training, heard = Training(decoupled=True, net=partly_frozen), Counter[Tensor]()
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
        assert heard == Counter(training.held[1:])
        handle.remove()
        training.drop()
        training.backward()


def test_who_listens_hears_of_a_parameter_once_in_a_step_of_several_optimizers() -> None:
    """All are in one bucket; in each second step one of the optimizers has no gradients."""

    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        one, other, head = model.module.branches[0], model.module.branches[1], model.module.head
        return [
            torch.optim.SGD([*one.parameters(), *head.parameters()]),
            torch.optim.SGD(other.parameters()),
        ]

    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 25}
    training = harness.Training(
        decoupled(owners="layers"), module=Branches(), optimizers=two, **ddp
    )
    heard = Counter[Tensor]()
    training.state.on_update(heard.update)
    training.run(8).state.flush()
    assert [heard[parameter] for parameter in training.held] == [8] * 6


@pytest.mark.defect("strangers-28")
def test_a_checkpoint_from_a_signal_handler_inside_an_update_is_one() -> None:
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


@pytest.mark.defect("strangers-1")
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_with_owners_scales_or_is_refused(unscale: bool, view: bool) -> None:
    training = owned(ddp={"gradient_as_bucket_view": view})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(training.loss()).backward()
    with refused(match="GradScaler"):
        if unscale:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.drop()


@pytest.mark.defect("strangers-1")
def test_the_norm_of_gradients_that_only_owners_have_is_no_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = owned()
    for _ in range(4):
        training.backward()
        assert all(each.grad.isnan().all() for each in training.held if each.grad is not None)
        training.optimizer.zero_grad()
    assert "never trains" in caplog.text


@pytest.mark.defect("decoupled-11", "strangers-29")
@pytest.mark.parametrize("muon", [False, True])
@in_ranks(2)
def test_frozen_parameters_are_no_load(rank: int, muon: bool) -> None:
    parameters = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    parameters.append(nn.Parameter(torch.ones(40, 40), requires_grad=False))
    if muon:
        owners = MuonState(torch.optim.Muon(parameters)).owners
    else:
        owners = DecoupledState(torch.optim.AdamW(parameters), owners="layers").owners or ()
    trained_by = [0, 0]
    for parameter, owner in zip(parameters, owners, strict=True):
        trained_by[owner] += parameter.numel() if parameter.requires_grad else 0
    assert trained_by == [128, 128]


@pytest.mark.defect("strangers-6")
@in_ranks(2)
def test_a_lookahead_around_owners_is_refused(rank: int) -> None:
    training = owned()
    wrapper = timm.optim.Lookahead(training.optimizer, k=2)
    with refused(match="lookahead_slow_buff"):
        for step in range(6):
            training.backward(2 * step + rank)
            wrapper.step()
            wrapper.zero_grad()


@pytest.mark.defect("strangers-31")
@in_ranks(2)
def test_a_step_that_one_rank_skips_is_named(rank: int) -> None:
    training = owned(ddp={"process_group": impatient_group(2)})

    def train() -> None:
        for step in range(3):
            training.backward(step)
            training.drop() if rank and step == 1 else training.update()
        training.weights()

    told: list[Any] = [None, None]
    dist.all_gather_object(told, error_of(train))
    assert any("step()" in each for each in told)


@pytest.mark.defect("strangers-28")
@in_ranks(2)
def test_torchs_distributed_checkpoint_resumes_muon(rank: int) -> None:
    """Other owners in tests/recipes/test_loops.py."""
    saving, resumed = harness.Training("muon", rank).run(4), harness.Training("muon", rank)
    saving.state.consolidate()
    saved = copy.deepcopy(get_optimizer_state_dict(saving.model, saving.optimizers[0]))
    set_optimizer_state_dict(resumed.model, resumed.optimizers[0], saved)
    resumed.model.load_state_dict(saving.model.state_dict())
    resumed.steps = saving.steps
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.1
    assert harness.same(resumed.run(2), saving.run(2))


@pytest.mark.defect("strangers-16")
def test_muon_gets_hidden_matrices_only() -> None:
    net = nn.Sequential(nn.Embedding(7, 6), *(nn.Linear(6, outputs) for outputs in (6, 6, 7)))
    matrices, others = muon_parameters(net)
    assert [id(matrix) for matrix in matrices] == [id(net[1].weight), id(net[2].weight)]
    assert {id(p) for p in (*matrices, *others)} == {id(p) for p in net.parameters()}
    net[3].weight = net[0].weight
    assert len(muon_parameters(net)[0]) == 2
    assert len(muon_parameters(net, head=net[2])[0]) == 1


@in_ranks(2)
def test_muons_compare_numbers_and_nothing_that_is_each_ranks_own(rank: int) -> None:
    first, second = harness.Training("muon", rank), harness.Training("muon", rank)
    # On devices of their own they print otherwise, too.
    first.optimizer.param_groups[0].update(
        lr=torch.tensor(0.02, requires_grad=bool(rank)), note=object()
    )
    first.run(2)
    second.optimizer.param_groups[0]["weight_decay"] = 0.1 * rank
    assert error_of(second.step).startswith("expected the same settings on all ranks")


@pytest.mark.defect("decoupled-14")
@pytest.mark.parametrize("acts", [[ArithmeticError("singular side")], [None, KeyboardInterrupt()]])
def test_after_a_failed_step_of_owners_backward_names_the_cause(acts: list[Any]) -> None:
    training = owned(make=Acting.of).run(3)
    training.backward()
    with act(side_effect=acts), pytest.raises(type(acts[-1])):
        training.optimizer.step()
    with refused(match="ended with an exception"):
        training.optimizer.step()
    with refused(match=str(acts[-1]) or "KeyboardInterrupt"):
        training.backward()


@pytest.mark.defect("decoupled-14")
@in_ranks(2, timeout_s=90)
def test_other_ranks_hear_of_an_owner_that_failed_before_the_groups_timeout(rank: int) -> None:
    training = owned(make=Acting.of, ddp={"process_group": impatient_group(50)})
    training.backward()
    began_s = time.monotonic()
    failing = act(side_effect=KeyboardInterrupt if rank else None)
    with failing, contextlib.suppress(KeyboardInterrupt, ExchangeError):
        training.optimizer.step()
        if rank == 0:
            training.weights()
    waited_s = time.monotonic() - began_s
    dist.barrier()
    assert waited_s < 40
