"""Local SGD, delayed averaging and DiLoCo in real ranks, against copies in one process.

Averaging does not depend on the optimizer. So each setting runs with one optimizer on two ranks and
with another one on four. Only the campaign runs it with all three.

Means and checkpoints: tests/multiprocess/test_averaging_checkpoints.py.
"""

import functools
import itertools
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, local_sgd_hook
from crossover_ddp.codecs import Int4
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.harness import Job, in_ranks, run_jobs, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of
from tests.harness.training import Training
from tests.multiprocess.averaged_training import averaged
from tests.multiprocess.averaging_oracle import (
    MAKERS,
    NESTEROV,
    OVERFLOWS,
    DelayedWalk,
    Trainer,
    copies_of,
    new_scaler,
)
from tests.multiprocess.identity_codec import Identity
from tests.multiprocess.test_checkpoint import listed

STEPS = 13
CODED: dict[str, Any] = {"codec": Identity()}
# Arguments of the state, and the outer optimizer's rate and momentum.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[float, float] | None]] = {
    "local": ({"sync_every": 4}, None),
    "post_local": ({"sync_every": 3, "warmup_steps": 4}, None),
    "delayed": ({"sync_every": 4, "delay": 3}, None),
    "streamed": ({"sync_every": 4, "delay": 1, "fragments": 4}, None),
    "many_fragments": ({"sync_every": 3, "delay": 2, "fragments": 5, "warmup_steps": 2}, None),
    "diloco": ({"sync_every": 4}, (0.7, 0.9)),
    "diloco_of_rate_1": ({"sync_every": 4}, (1.0, 0.0)),  # which is local SGD
    "in_every_step": ({"sync_every": 1, "delay": 1}, None),
    # Increments, of which one may leave in the step in which the last one arrives.
    "every_step": ({"sync_every": 1, "delay": 1, **CODED}, None),
    "back_to_back": ({"sync_every": 2, "delay": 2, "warmup_steps": 3, **CODED}, None),
    "coded_at_once": ({"sync_every": 3, **CODED}, None),
    "coded_diloco": ({"sync_every": 4, "delay": 3, "fragments": 2, **CODED}, (0.7, 0.9)),
    "streaming_diloco": (
        {"sync_every": 4, "delay": 2, "fragments": 3, "warmup_steps": 1},
        (0.7, 0.9),
    ),
}


class Cell(NamedTuple):
    """A setting, an optimizer, and whether a GradScaler skips steps on one rank alone."""

    name: str
    optimizer: str
    scaled: bool = False


def cells(world_size: int) -> list[Cell]:
    """Return the cases for a number of ranks. A single rank trains as without a hook."""
    if world_size == 1:
        return [Cell("local", "momentum"), Cell("many_fragments", "adamw")]
    if IN_CAMPAIGN:
        found = [Cell(*each) for each in itertools.product(SETTINGS, MAKERS)]
    else:
        optimizers, shift = list(MAKERS), 2 if world_size == 2 else 1
        found = [
            Cell(name, optimizers[(place + shift) % len(optimizers)])
            for place, name in enumerate(SETTINGS)
        ]
    if world_size == 2:
        found += [
            Cell(name, "momentum", True)
            for name in ("local", "post_local", "delayed", "streamed", "back_to_back")
        ]
    return found


def skips_of(cell: Cell) -> Collection[tuple[int, int]]:
    """Return (rank, step) of skipped steps. In warm-up one rank's overflow makes all ranks skip."""
    warm = SETTINGS[cell.name][0].get("warmup_steps", 0)
    if not cell.scaled:
        return ()
    in_warmup = {(rank, step) for _, step in OVERFLOWS if step < warm for rank in (0, 1)}
    return OVERFLOWS | in_warmup


@pytest.mark.parametrize(
    ("world_size", "cell"),
    [
        pytest.param(size, cell, id=f"{size}-{cell.name}-{cell.optimizer}{'-scaled' * cell.scaled}")
        for size in (1, 2, 4)
        for cell in cells(size)
    ],
)
@in_ranks()
def test_ranks_have_the_parameters_of_copies_in_one_process(
    rank: int, world_size: int, cell: Cell
) -> None:
    """To the last bit, except in warm-up of four ranks: DDP's buckets order the additions."""
    settings, outer = SETTINGS[cell.name]
    skips = skips_of(cell)
    make = outer and functools.partial(
        torch.optim.SGD, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0
    )
    state = LocalSGDState(**settings, outer_optimizer=make)
    is_local = "warmup_steps" not in settings
    # With ``broadcast_buffers`` the state has to keep DDP from broadcasting in local steps.
    trainer = Trainer(rank, state, cell.optimizer, broadcast_buffers=is_local)
    scaler = new_scaler()
    for _ in range(STEPS):
        trainer.scaled_step(scaler) if cell.scaled else trainer.step()
    assert state.stats()["steps"] == STEPS, "a skipped update has stopped the clock"
    assert scaler.get_scale() == new_scaler().get_scale() / 2 ** sum(
        skipping == rank for skipping, _ in skips
    )
    expected: list[Any] = [None]
    if rank == 0:
        exact = {name: value for name, value in settings.items() if name != "codec"}
        walk = DelayedWalk(
            copies_of(world_size, cell.optimizer, skips),
            **exact,
            outer=outer,
            increments="codec" in settings,
        )
        for _ in range(STEPS):
            walk.step()
        expected = [walk.copies.snapshots()]
    dist.broadcast_object_list(expected)
    tolerance = 0.0 if world_size == 2 or is_local else 1e-6
    assert float((trainer.end() - expected[0][rank]).abs().max()) <= tolerance


# The parameters after each step, of torchft's test_diloco_mocked_updates_0: two fragments, whose
# gradients are 2, with inner and outer learning rates of 1 and 2.
OF_TORCHFT = {
    "first": [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    "second": [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
}


@pytest.mark.parametrize("codec", [None, Identity()])
@in_ranks(2)
def test_diloco_has_the_numbers_of_torchft(rank: int, codec: Any) -> None:
    seen: dict[str, list[float]] = {name: [] for name in OF_TORCHFT}

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(1, 1))
            self.second = nn.Parameter(torch.ones(1, 1))

        def forward(self) -> torch.Tensor:
            for name, parameter in self.named_parameters():
                seen[name].append(float(parameter))
            return 2 * (self.first + self.second).sum()

    state = LocalSGDState(
        6, 0, 2, outer_optimizer=functools.partial(torch.optim.SGD, lr=2.0), codec=codec
    )
    training = averaged(state, Two(), lr=1.0, loss=lambda model, *_: model()).run(16)
    training.close()
    assert seen == OF_TORCHFT


@in_ranks(2)
def test_the_outer_learning_rate_may_follow_a_schedule(rank: int) -> None:
    """A rate of 1 takes the mean; a rate of 0 stays at the parameters of the last outer step."""
    state = LocalSGDState(
        2,
        outer_optimizer=functools.partial(torch.optim.SGD, lr=9.0),
        outer_lr=lambda steps: 1.0 if steps == 2 else 0.0,
    )
    training = averaged(state)
    start = training.values
    ends = []
    for _ in range(3):
        training.run(2)
        training.loss()  # takes the outer step
        ends.append(training.values)
    assert not torch.equal(start, ends[0])
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    training.close()
    other = LocalSGDState(2, outer_optimizer=NESTEROV, outer_lr=lambda steps: 0.7 + rank)
    with pytest.raises(UnsupportedConfigurationError, match="outer_lr"):
        averaged(other).step()


class Odd(nn.Module):
    """Tied and frozen weights, a buffer that is replaced, channels last, half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(36, 36)
        self.down = nn.Linear(144, 36, bias=False)
        self.up = nn.Linear(36, 144, bias=False)
        self.up.weight = nn.Parameter(self.down.weight.detach().t().contiguous())
        self.tied = nn.Linear(144, 36, bias=False)
        self.tied.weight = self.down.weight
        self.last = nn.Linear(36, 7).to(torch.bfloat16)
        self.register_buffer("mean", torch.zeros(7))
        self.frozen.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.stem(images[:, :, :6, :6])).flatten(1)
        features = torch.tanh(self.frozen(torch.tanh(self.down(features))))
        features = torch.tanh(self.tied(torch.tanh(self.up(features))))
        result = self.last(features.to(torch.bfloat16)).float()
        self.mean = 0.5 * self.mean + 0.5 * result.detach().mean(0)
        return result


@pytest.mark.parametrize("elastic", [False, True])
@in_ranks(2)
def test_loops_may_skip_steps_drop_gradients_clip_and_accumulate(
    rank: int, elastic: bool
) -> torch.Tensor:
    """The memory of parameters is replaced in between, as ``load_state_dict(assign=True)`` does."""
    state: Any = ElasticState(3) if elastic else LocalSGDState(3, delay=1, fragments=2)
    trainer = Trainer(rank, state, model=Odd())
    model = trainer.model.module
    frozen = model.frozen.weight.clone()
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.9)
    for step in range(8):
        with trainer.model.no_sync():
            trainer.backward(100 + step)
        trainer.backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if rank == 0 and step == 4:
            model.up.weight.grad = None
        # Rank 1 skips, as a GradScaler does that finds infinities on this rank alone.
        if rank == 0 or step not in (2, 5):
            trainer.optimizer.step()
        schedule.step()
        trainer.drop()
        if step == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            places = {name: p.data_ptr() for name, p in model.named_parameters()}
    state.average()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert torch.equal(frozen, model.frozen.weight)
    assert model.tied.weight is model.down.weight
    assert model.stem.weight.is_contiguous(memory_format=torch.channels_last)
    assert state.stats()["steps"] == 8
    state.close()
    values = [t.float().flatten() for t in model.state_dict().values() if t.is_floating_point()]
    assert torch.cat(values).isfinite().all()
    return torch.cat(values)


def new_state(kind: str, every: int = 2) -> Any:
    if kind == "async":
        return ElasticState(every, "async", 0.2)
    return LocalSGDState(every, 1, 2, outer_optimizer=NESTEROV)


def save(rank: int, world_size: int, kind: str, path: Path) -> None:
    trainer = Trainer(rank, new_state(kind), "sgd").run(7)
    trainer.state.average()
    saved = {"model": trainer.model.module.state_dict(), "state": trainer.state.state_dict()}
    if rank == 0:
        torch.save(saved, path)
    trainer.close()


def resume(rank: int, world_size: int, kind: str, path: Path) -> torch.Tensor:
    # With this interval nothing is exchanged before `average`.
    trainer = Trainer(rank, new_state(kind, every=1000), "sgd")
    saved = torch.load(path, weights_only=True)
    trainer.model.module.load_state_dict(saved["model"])
    trainer.state.load_state_dict(saved["state"])
    trainer.step()  # restores the state, since the hook learns of the model
    assert listed(trainer.state.state_dict()["kept"]) == listed(saved["state"]["kept"])
    trainer.state.average()
    assert trainer.values.isfinite().all()
    return trainer.end()


@pytest.mark.parametrize("kind", ["nesterov", "async"])
def test_a_checkpoint_serves_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """With the same number of ranks the bits are the same: tests/conformance/test_columns.py."""
    args = kind, tmp_path / "two"
    run_ranks(save, 2, args=args)
    first, *others = run_ranks(resume, 4, args=args)
    assert all(torch.equal(each, first) for each in others)


@pytest.mark.defect("codecs-S7", "strangers-12")
@pytest.mark.parametrize("case", ["outer_optimizer", "model", "steps"])
@in_ranks(2)
def test_ranks_with_other_settings_models_or_steps_are_refused(rank: int, case: str) -> None:
    network = None
    state = LocalSGDState(2)
    if case == "outer_optimizer":
        outer = functools.partial(torch.optim.SGD, lr=0.1 if rank else 0.9)
        state = LocalSGDState(2, outer_optimizer=outer)
    elif case == "model":
        network = nn.Sequential(OrderedDict({f"layer{rank}": nn.Linear(4, 4)}))
        torch.set_default_dtype(torch.float16)
    elif case == "steps":
        state.load_state_dict({"steps": 2**24 + rank, "kept": None})
    try:
        message = error_of(lambda: averaged(state, network).run(2))
    finally:
        torch.set_default_dtype(torch.float32)
        state.close()
    assert message.startswith(f"expected the same {case} on all ranks")
    assert case != "steps" or "call load_state_dict on all ranks" in message


# sync_every, delay, fragments, and whether there is an outer optimizer.
COUNTED = [(4, 0, 1, False), (4, 3, 1, False), (8, 1, 8, False), (4, 1, 4, True)]


@in_ranks(2)
def test_bytes_sent_and_peak_memory_are_those_of_the_settings(rank: int) -> None:
    for sync_every, delay, fragments, outer in COUNTED:
        torch.manual_seed(0)
        layers = nn.Linear(36, 2000, bias=False), nn.Tanh(), nn.Linear(2000, 7, bias=False)
        model = nn.Sequential(nn.Flatten(), *layers)
        state = LocalSGDState(
            sync_every, delay, fragments, outer_optimizer=NESTEROV if outer else None
        )
        trainer = Trainer(rank, state, "sgd", model=model).run(17)
        found, whole = state.stats(), sum(p.nbytes for p in model.parameters())
        trainer.close()
        # The exchange that is due after step 17 has not been sent.
        exchanged = found["exchanged_bytes"] / (16 * whole)
        assert exchanged == pytest.approx(1 / sync_every, rel=0.02)
        copies = 1 if delay == 0 else 2
        assert found["peak_bytes"] <= 1.05 * copies * whole / fragments
        assert found["outer_bytes"] <= (1.05 * 2 * whole / 2 if outer else 0)


@pytest.mark.defect("codecs-S13")
@in_ranks(2)
def test_all_ranks_plan_the_same_intervals_with_and_without_local_steps(rank: int) -> list[Any]:
    plans = []
    for state in (LocalSGDState(8, 1, 8), LocalSGDState(1)):
        trainer = Trainer(rank, state).run(1)
        with pytest.raises(
            UnsupportedConfigurationError, match="expected recorded steps on all ranks"
        ):
            state.plan()
        trainer.run(11)
        plans.append(state.plan())
        assert plans[-1].sync_every >= plans[-1].delay > 0 and plans[-1].compute_s > 0
        LocalSGDState(**plans[-1].arguments()).close()
        trainer.run(1).close()
    return plans


@in_ranks(3)
def test_a_model_of_some_ranks_is_averaged_over_those_ranks(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank != 1:
        state = LocalSGDState(2, 1, process_group=group)
        trainer = Trainer(rank, state, process_group=group).run(5)
        trainer.state.average()
        both = [torch.empty_like(trainer.values) for _ in range(2)]
        dist.all_gather(both, trainer.end(), group)
        assert torch.equal(*both)


PATIENCE_S = 4.0
LIMIT_S = 45.0  # on a busy machine
STATES: dict[str, Any] = {
    "blocking": lambda group: LocalSGDState(2, process_group=group),
    "delayed": lambda group: LocalSGDState(3, 2, process_group=group),
    "increments": lambda group: LocalSGDState(1, 1, codec=Int4(), process_group=group),
    "sync": lambda group: ElasticState(2, "sync", process_group=group),
    "async": lambda group: ElasticState(2, "async", process_group=group),
    "wild": lambda group: ElasticState(2, "wild", process_group=group),
}


def patient(rank: int, kind: str, **options: Any) -> Trainer:
    group = impatient_group(PATIENCE_S)
    return Trainer(rank, STATES[kind](group), process_group=group, **options)


def parameters_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector([each.detach() for each in model.parameters()])


def lose_a_peer(rank: int, world_size: int, kind: str, how: str) -> None:
    trainer = patient(rank, kind).run(5)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == 1:
        # A stopped rank cannot continue by itself. Rank 0 kills it at the end.
        signal.raise_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        time.sleep(60)
    begin_s, limit_s = time.monotonic(), PATIENCE_S + LIMIT_S
    with pytest.raises(ExchangeError):
        while time.monotonic() - begin_s < limit_s:
            trainer.step()
            time.sleep(0.02)
    took_s = time.monotonic() - begin_s
    if how == "stopped":
        os.kill(pids[1], signal.SIGKILL)
    for act in (trainer.step, trainer.state.average):  # every later call raises as well
        with pytest.raises(ExchangeError):
            act()
    trainer.state.close()
    assert took_s < limit_s
    if how == "stopped" and kind in ("async", "wild"):
        assert trainer.steps > 5 + 4, "a stopped rank has stopped the others before the timeout"
        assert took_s > PATIENCE_S / 2


def test_the_loss_of_a_peer_is_an_error_in_bounded_time() -> None:
    """The jobs of all kinds run at the same time, since they only wait."""
    losses = [(kind, "killed") for kind in STATES]
    losses += [(kind, "stopped") for kind in ("delayed", "async", "wild")]
    jobs = [
        Job(lose_a_peer, 2, loss, deaths={1: signal.SIGKILL}, name="-".join(loss))
        for loss in losses
    ]
    run_jobs(jobs, timeout_s=90)


@pytest.mark.defect("codecs-S1")
@pytest.mark.parametrize("kind", ["blocking", "delayed", "sync"])
@in_ranks(2)
def test_infinities_on_one_rank_are_an_error_on_all_ranks_and_nothing_is_written(
    rank: int, kind: str
) -> None:
    """The infinity is in a block of its own, of another dtype than the parameters."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 7))
    model.register_buffer("noted", torch.zeros(4, dtype=torch.bfloat16))
    trainer = patient(rank, kind, model=model).run(6)  # no exchange is pending
    if rank == 1:
        model.noted[0] = float("nan" if kind == "blocking" else "inf")
    own = parameters_of(model)
    guilty = "this rank's are among them" if rank else "see the other ranks"
    refused = f"expected finite parameters on all ranks.*{guilty}"
    with pytest.raises(UnsupportedConfigurationError, match=refused):
        for _ in range(8):
            trainer.loss()
            assert torch.equal(parameters_of(model), own)
            trainer.step()
            own = parameters_of(model)
    assert torch.equal(parameters_of(model), own)
    with pytest.raises(UnsupportedConfigurationError, match=refused):
        trainer.loss()
    trainer.close()


def zero_redundancy(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)]


@pytest.mark.torch_version
@pytest.mark.parametrize("way", ["averaged", "elastic", "after warm-up"])
@in_ranks(2)
def test_an_optimizer_that_steps_by_owners_is_refused_before_it_has_stepped(
    rank: int, way: str
) -> None:
    """ZeroRedundancyOptimizer would step each parameter by the samples of its owner alone."""
    warmup_steps = 3 if way == "after warm-up" else 0
    made = LocalSGDState(sync_every=4, warmup_steps=warmup_steps), local_sgd_hook
    training = Training(
        way if way == "elastic" else lambda *_: made, rank, optimizers=zero_redundancy
    )
    training.run(warmup_steps)
    training.backward()
    before = training.values
    message = error_of(training.update)
    assert message.startswith(
        "expected an optimizer that steps all of this rank's parameters, "
        "got ZeroRedundancyOptimizer"
    )
    assert torch.equal(training.values, before)
    training.drop()
    training.close()


@in_ranks(2)
def test_another_models_optimizer_may_step_by_owners(rank: int) -> None:
    averaged = Training("averaged", rank)
    other = Training(None, rank, optimizers=zero_redundancy)
    averaged.backward()
    other.step()
    averaged.update()
    averaged.run(3).close()
