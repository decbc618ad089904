"""What training loops and broken ranks do to replicas: skipped steps, checkpoints, wire, deaths and infinities."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.harness import Job, in_ranks, run_jobs, run_ranks
from tests.harness.groups import impatient_group
from tests.multiprocess.averaging_oracle import NESTEROV, Trainer
from tests.multiprocess.test_checkpoint import listed


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
def test_loops_may_skip_drop_clip_and_accumulate(rank: int, elastic: bool) -> torch.Tensor:
    """Skip steps on one rank alone, drop gradients, clip, schedule, accumulate."""
    state: Any = ElasticState(3) if elastic else LocalSGDState(3, delay=1, fragments=2)
    trainer = Trainer(rank, state, model=Odd())
    model = trainer.model.module
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    frozen = model.frozen.weight.clone()
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.9)
    for step in range(8):
        with trainer.model.no_sync():
            trainer.backward(100 + step)
        trainer.backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if rank == 0 and step == 4:
            model.up.weight.grad = None
        if rank == 0 or step not in (2, 5):  # as a GradScaler skips that found infinities on this rank alone
            trainer.optimizer.step()
        schedule.step()
        trainer.drop()
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
    trainer = Trainer(rank, new_state(kind, every=1000), "sgd")  # so that nothing is exchanged between
    saved = torch.load(path, weights_only=True)
    trainer.model.module.load_state_dict(saved["model"])
    trainer.state.load_state_dict(saved["state"])
    trainer.step()  # the model is known now
    assert listed(trainer.state.state_dict()["kept"]) == listed(saved["state"]["kept"])
    trainer.state.average()
    assert trainer.values.isfinite().all()
    return trainer.end()


@pytest.mark.parametrize("kind", ["nesterov", "async"])
def test_a_checkpoint_is_for_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """With as many ranks the bits go on: tests/conformance/test_columns.py."""
    args = kind, tmp_path / "two"
    run_ranks(save, 2, args=args)
    first, *others = run_ranks(resume, 4, args=args)
    assert all(torch.equal(each, first) for each in others)


# Steps between two averages, delay, fragments, and whether there is an outer optimizer.
COUNTED = [(4, 0, 1, False), (4, 3, 1, False), (8, 1, 8, False), (4, 1, 4, True)]


@in_ranks(2)
def test_bytes_on_the_wire_and_in_memory(rank: int) -> None:
    """A model that is all parameters, so that bytes can be counted."""
    for sync_every, delay, fragments, outer in COUNTED:
        torch.manual_seed(0)
        layers = nn.Linear(36, 2000, bias=False), nn.Tanh(), nn.Linear(2000, 7, bias=False)
        model = nn.Sequential(nn.Flatten(), *layers)
        state = LocalSGDState(sync_every, delay, fragments, outer_optimizer=NESTEROV if outer else None)
        trainer = Trainer(rank, state, "sgd", model=model).run(17)
        found, whole = state.stats(), sum(p.nbytes for p in model.parameters())
        trainer.close()
        exchanged = found["exchanged_bytes"] / (16 * whole)  # what is due after the last step has not left
        assert exchanged == pytest.approx(1 / sync_every, rel=0.02)
        copies = 1 if delay == 0 else 2
        assert found["peak_bytes"] <= 1.05 * copies * whole / fragments
        assert found["outer_bytes"] <= (1.05 * 2 * whole / 2 if outer else 0)


@pytest.mark.defect("codecs-S13")
@in_ranks(2)
def test_all_ranks_plan_the_same_intervals_also_without_local_steps(rank: int) -> list[Any]:
    plans = []
    for state in (LocalSGDState(8, 1, 8), LocalSGDState(1)):
        trainer = Trainer(rank, state).run(1)
        with pytest.raises(UnsupportedConfigurationError, match="expected recorded steps on all ranks"):
            state.plan()
        trainer.run(11)
        plans.append(state.plan())
        assert plans[-1].sync_every > plans[-1].delay > 0 and plans[-1].compute_s > 0
        LocalSGDState(**plans[-1].arguments()).close()
        trainer.run(1).close()
    return plans


@in_ranks(3)
def test_a_model_of_some_ranks_is_averaged_over_these(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank != 1:
        trainer = Trainer(rank, LocalSGDState(2, 1, process_group=group), process_group=group).run(5)
        trainer.state.average()
        both = [torch.empty_like(trainer.values) for _ in range(2)]
        dist.all_gather(both, trainer.end(), group)
        assert torch.equal(*both)


PATIENCE_S = 4.0
LIMIT_S = 45.0  # of a busy machine
STATES: dict[str, Any] = {
    "blocking": lambda group: LocalSGDState(2, process_group=group),
    "delayed": lambda group: LocalSGDState(3, 2, process_group=group),
    "sync": lambda group: ElasticState(2, "sync", process_group=group),
    "async": lambda group: ElasticState(2, "async", process_group=group),
    "wild": lambda group: ElasticState(2, "wild", process_group=group),
}


def patient(rank: int, kind: str) -> Trainer:
    group = impatient_group(PATIENCE_S)
    return Trainer(rank, STATES[kind](group), process_group=group)


def lose_a_peer(rank: int, world_size: int, kind: str, how: str) -> None:
    trainer = patient(rank, kind).run(5)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == 1:
        # Whoever is stopped cannot go on by itself; rank 0 kills it when it has seen enough.
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
    for act in (trainer.step, trainer.state.average):  # nobody goes on as if nothing had happened
        with pytest.raises(ExchangeError):
            act()
    trainer.state.close()
    assert took_s < limit_s
    if how == "stopped" and kind in ("async", "wild"):
        assert trainer.steps > 5 + 4, "a stopped rank has stopped the others before the timeout"
        assert took_s > PATIENCE_S / 2


def test_the_loss_of_a_peer_is_an_error_in_bounded_time() -> None:
    """In a job of each kind at the same time: all that they do is wait."""
    losses = [(kind, "killed") for kind in STATES]
    losses += [(kind, "stopped") for kind in ("delayed", "async", "wild")]
    jobs = [Job(lose_a_peer, 2, loss, deaths={1: signal.SIGKILL}, name="-".join(loss)) for loss in losses]
    run_jobs(jobs, timeout_s=90)


@pytest.mark.defect("codecs-S1")
@pytest.mark.parametrize("kind", ["blocking", "delayed", "sync"])
@in_ranks(2)
def test_infinities_on_one_rank_are_an_error_on_all_and_spread_to_none(rank: int, kind: str) -> None:
    trainer = patient(rank, kind).run(4)
    if rank == 1:
        with torch.no_grad():
            list(trainer.model.parameters())[-1][0] = float("nan" if kind == "blocking" else "inf")
    who = "this rank's are among them" if rank else "see the other ranks"
    with pytest.raises(
        UnsupportedConfigurationError, match=f"expected finite parameters on all ranks.*{who}"
    ):
        trainer.run(8)
    assert rank or trainer.values.isfinite().all(), "the healthy rank took the mean over"
    trainer.close()
