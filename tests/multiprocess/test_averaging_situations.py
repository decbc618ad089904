"""What training loops do to replicas: identities, skipped steps, missing gradients, checkpoints, turns, and wire."""

import os
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp import GPUMutex, UnsupportedConfigurationError, reduce_scatter_all_gather_hook
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook
from tests.harness import Job, run_jobs, run_ranks
from tests.multiprocess.averaging_oracle import NESTEROV, PLAIN, Trainer, network

STEPS = 9
INTERVALS = {"blocking": (4,), "delayed": (4, 3), "streamed": (4, 2, 3), "warm": (3, 1, 1, 2)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other)


def walk(rank: int, state: Any, hook: Any = None, *, steps: int = STEPS, accumulate: int = 1) -> torch.Tensor:
    torch.set_num_threads(1)
    trainer = Trainer(rank, state, **({} if hook is None else {"hook": hook}))
    for _ in range(steps):
        trainer.step(accumulate)
    values = trainer.values
    if isinstance(state, LocalSGDState | ElasticState):
        state.close()
    return values


def identities(rank: int, world_size: int) -> dict[str, bool]:
    split = walk(rank, None, reduce_scatter_all_gather_hook)
    plain = walk(rank, None, allreduce_hook)
    every_step = walk(rank, LocalSGDState(1))
    without_outer = {name: walk(rank, LocalSGDState(*given)) for name, given in INTERVALS.items()}
    found = {
        "every step is the split hook": same(every_step, split),
        "warm-up is the split hook": same(walk(rank, LocalSGDState(8, 3, 2, warmup_steps=100)), split),
        "every step is DDP": same(every_step, plain) or world_size > 2,
        "a local step is not DDP": world_size == 1 or not same(without_outer["blocking"], plain),
    }
    for name, given in INTERVALS.items():
        with_outer = walk(rank, LocalSGDState(*given, outer_optimizer=PLAIN))  # type: ignore[arg-type]
        found[f"outer rate 1 is local SGD, {name}"] = same(with_outer, without_outer[name])
        if world_size == 1:
            found[f"one rank is local, {name}"] = same(without_outer[name], plain)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_identities_hold_to_the_last_bit(world_size: int) -> None:
    for found in run_ranks(identities, world_size):
        assert [name for name, holds in found.items() if not holds] == []


# --- what loops do ----------------------------------------------------------------------------------------------------


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


def loop(rank: int, world_size: int, elastic: bool) -> dict[str, Any]:
    """Skip steps on one rank alone, drop gradients, clip, schedule, accumulate."""
    torch.set_num_threads(1)
    state: Any = ElasticState(3, "sync") if elastic else LocalSGDState(3, delay=1, fragments=2)
    trainer = Trainer(rank, state, model=Odd(), **({"hook": elastic_hook} if elastic else {}))
    model = trainer.model.module
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    frozen = model.frozen.weight.clone()
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.9)
    for step in range(8):
        with trainer.model.no_sync():
            trainer.backward()
        trainer.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if rank == 0 and step == 4:
            model.up.weight.grad = None
        if not (
            rank == 1 and step in (2, 5)
        ):  # as a GradScaler does that found infinities on this rank alone
            trainer.optimizer.step()
        schedule.step()
        trainer.optimizer.zero_grad()
    state.average()
    values = [t.float().flatten() for t in model.state_dict().values() if t.is_floating_point()]
    found = {
        "moved": [name for name, p in model.named_parameters() if p.data_ptr() != places[name]],
        "frozen": torch.equal(frozen, model.frozen.weight),
        "tied": model.tied.weight is model.down.weight,
        "finite": bool(torch.cat(values).isfinite().all()),
        "values": torch.cat(values),
        "steps": state.stats()["steps"],
        "channels_last": model.stem.weight.is_contiguous(memory_format=torch.channels_last),
    }
    state.close()
    return found


@pytest.mark.parametrize("elastic", [False, True])
def test_loops_may_skip_drop_clip_and_accumulate(elastic: bool) -> None:
    first, second = run_ranks(loop, 2, args=(elastic,))
    assert torch.equal(first.pop("values"), second.pop("values")), "ranks differ after average()"
    expected = {"moved": [], "frozen": True, "tied": True, "finite": True, "steps": 8, "channels_last": True}
    assert first == second == expected


def statistics_of(rank: int, world_size: int) -> list[torch.Tensor]:
    trainer = Trainer(rank, LocalSGDState(2), "sgd")
    trainer.train(2)
    norm = trainer.model.module[1]
    before = norm.running_mean.clone(), norm.running_var.clone()
    trainer.state.state_dict()  # what is due now is done
    found = [*before, norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()]
    trainer.state.close()
    return found


def test_statistics_are_averaged() -> None:
    one, other = run_ranks(statistics_of, 2)
    for place in (0, 1):
        assert not torch.equal(one[place], other[place])
        assert torch.equal(one[place + 2], one[place] / 2 + other[place] / 2)
        assert torch.equal(one[place + 2], other[place + 2])
    assert one[4] == other[4] == 2


# --- checkpoints ------------------------------------------------------------------------------------------------------


def new_state(kind: str) -> Any:
    if kind == "elastic":
        return ElasticState(2, "sync", 0.2)
    if kind == "async":
        return ElasticState(2, "async", 0.2)
    outer = torch.optim.Adam if kind == "adam" else NESTEROV
    return LocalSGDState(2, 1, 2, outer_optimizer=outer if kind != "plain" else None)


def hook_of(state: Any) -> dict[str, Any]:
    return {"hook": elastic_hook} if isinstance(state, ElasticState) else {}


def save(rank: int, world_size: int, kind: str, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Train, save in the middle, go on; return the values there and at the end."""
    torch.set_num_threads(1)
    state = new_state(kind)
    trainer = Trainer(rank, state, "sgd", **hook_of(state))
    trainer.train(7)
    state.average()
    checkpoint = {"model": trainer.model.module.state_dict(), "state": state.state_dict()}
    if rank == 0:
        torch.save(checkpoint, path)
    middle = trainer.values
    trainer.train(6)
    end = trainer.values
    state.close()
    return middle, end


def resume(rank: int, world_size: int, kind: str, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)
    state = new_state(kind)
    trainer = Trainer(rank, state, "sgd", **hook_of(state))
    checkpoint = torch.load(path, weights_only=True)
    trainer.model.module.load_state_dict(checkpoint["model"])
    state.load_state_dict(checkpoint["state"])
    for _ in range(7):
        next(trainer.batches)
    middle = trainer.values
    trainer.train(6)
    end = trainer.values
    state.close()
    return middle, end


@pytest.mark.parametrize("kind", ["plain", "nesterov", "adam", "elastic"])
def test_a_resumed_job_goes_on_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(save, 2, args=(kind, path))
    for one, other in zip(saved, run_ranks(resume, 2, args=(kind, path)), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("kind", ["nesterov", "async"])
def test_a_checkpoint_is_for_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("two", "four", "two again")]
    (first, _), _ = run_ranks(save, 2, args=(kind, paths[0]))
    for middle, end in run_ranks(resume_and_save, 4, args=(kind, *paths[:2])):
        assert torch.equal(middle, first)
        assert bool(end.isfinite().all())
    of_four = torch.load(paths[1], weights_only=True)
    for _, end in run_ranks(resume_and_save, 2, args=(kind, *paths[1:])):
        assert bool(end.isfinite().all())
    of_two, again = torch.load(paths[0], weights_only=True), torch.load(paths[2], weights_only=True)
    kept = [each["state"]["kept"] for each in (of_two, of_four, again)]
    assert kept[0].keys() == kept[1].keys() == kept[2].keys()
    # Loaded and saved at once nothing changes, whatever the number of ranks.
    (unchanged,) = {
        same_kept(one, other) for one, other in run_ranks(load_and_save, 4, args=(kind, paths[0]))
    }
    assert unchanged


def resume_and_save(
    rank: int, world_size: int, kind: str, path: str, to: str
) -> tuple[torch.Tensor, torch.Tensor]:
    state = new_state(kind)
    trainer = Trainer(rank, state, "sgd", **hook_of(state))
    checkpoint = torch.load(path, weights_only=True)
    trainer.model.module.load_state_dict(checkpoint["model"])
    state.load_state_dict(checkpoint["state"])
    middle = trainer.values
    trainer.train(5)
    state.average()
    saved = {"model": trainer.model.module.state_dict(), "state": state.state_dict()}
    if rank == 0:
        torch.save(saved, to)
    end = trainer.values
    state.close()
    return middle, end


def load_and_save(rank: int, world_size: int, kind: str, path: str) -> tuple[Any, Any]:
    never = 1000  # so that nothing is exchanged between
    state: Any = (
        ElasticState(never, "async", 0.2)
        if kind == "async"
        else LocalSGDState(never, fragments=2, outer_optimizer=NESTEROV)
    )
    trainer = Trainer(rank, state, "sgd", **hook_of(state))
    checkpoint = torch.load(path, weights_only=True)
    state.load_state_dict(checkpoint["state"])
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.backward()  # the model is known now
    kept = state.state_dict()["kept"]
    state.close()
    return checkpoint["state"]["kept"], kept


def same_kept(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_kept(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def one_rank_does_not_load(rank: int, world_size: int) -> str:
    state = LocalSGDState(4, outer_optimizer=NESTEROV)
    trainer = Trainer(rank, state)
    if rank == 0:
        state.load_state_dict({"steps": 400, "kept": None})
    try:
        trainer.step()
    except UnsupportedConfigurationError as error:
        return str(error)
    finally:
        state.close()
    return "went on"


def test_a_fresh_rank_never_wins_a_resume() -> None:
    for message in run_ranks(one_rank_does_not_load, 2):
        assert "got steps by rank {0: 400, 1: 0}" in message
        assert "call load_state_dict on all ranks" in message


# --- turns, wire, memory ----------------------------------------------------------------------------------------------


def train_with_turns(rank: int, world_size: int, group: str, elastic: bool) -> tuple[torch.Tensor, int]:
    torch.set_num_threads(1)
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    state: Any = (
        ElasticState(2, "sync", mutex=mutex) if elastic else LocalSGDState(2, warmup_steps=3, mutex=mutex)
    )
    trainer = Trainer(rank, state, **hook_of(state))
    trainer.train(16)
    with state.paused():
        values = trainer.values
    turns = mutex.stats()["turns"] if mutex is not None else 0
    state.close()
    if mutex is not None:
        mutex.close()
    return values, turns


@pytest.mark.parametrize("elastic", [False, True])
def test_siblings_compute_while_parameters_travel(elastic: bool) -> None:
    group = f"{os.environ['CROSSOVER_GROUP']}-{uuid.uuid4().hex[:8]}"
    alone = run_ranks(train_with_turns, 2, args=("", elastic))
    for job in run_jobs(
        [Job(train_with_turns, 2, (group, elastic), name=name) for name in "ab"], timeout_s=60
    ):
        for (values, turns), (expected, _) in zip(job, alone, strict=True):
            assert torch.equal(values, expected)
            assert turns >= (7 if elastic else 8)


def count(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, int]:
    """A model that is all parameters, so that bytes can be counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 2000, bias=False), nn.Tanh(), nn.Linear(2000, 7, bias=False)
    )
    trainer = Trainer(rank, LocalSGDState(**settings), "sgd", model=model)
    trainer.train(17)
    stats = dict(trainer.state.stats())
    stats["parameters_bytes"] = sum(p.nbytes for p in model.parameters())
    trainer.state.close()
    return stats


@cache
def counted(*settings: tuple[str, Any]) -> dict[str, int]:
    return run_ranks(count, 2, args=(dict(settings),))[0]


@pytest.mark.parametrize(
    ("sync_every", "delay", "fragments", "outer"),
    [(4, 0, 1, False), (4, 3, 1, False), (8, 1, 8, False), (4, 1, 4, True)],
)
def test_bytes_on_the_wire_and_in_memory(sync_every: int, delay: int, fragments: int, outer: bool) -> None:
    settings = {"sync_every": sync_every, "delay": delay, "fragments": fragments}
    found = counted(*settings.items(), ("outer_optimizer", NESTEROV if outer else None))
    whole = found["parameters_bytes"]
    exchanged = found["exchanged_bytes"] / (16 * whole)  # what is due after the last step has not left
    assert exchanged == pytest.approx(1 / sync_every, rel=0.02)
    copies = 1 if delay == 0 else 2
    assert found["peak_bytes"] <= 1.05 * copies * whole / fragments
    assert found["outer_bytes"] <= (1.05 * 2 * whole / 2 if outer else 0)


def planned(rank: int, world_size: int) -> Any:
    trainer = Trainer(rank, LocalSGDState(8, 1, 8))
    trainer.train(10)
    plan = trainer.state.plan()
    LocalSGDState(**plan.arguments()).close()
    trainer.train(1)
    trainer.state.close()
    return plan


def test_all_ranks_plan_the_same_intervals() -> None:
    first, second = run_ranks(planned, 2)
    assert first == second
    assert first.sync_every > first.delay > 0 and first.compute_s > 0


def no_deadlock_without_default_group(rank: int, world_size: int) -> torch.Tensor:
    """Averages over a group of its own, of two of three ranks."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return torch.zeros(1)
    state = LocalSGDState(2, 1, process_group=group)
    trainer = Trainer(rank, state, process_group=group, model=network())
    trainer.train(5)
    state.average()
    state.close()
    return trainer.values


def test_a_model_of_some_ranks_is_averaged_over_these() -> None:
    one, _, other = run_ranks(no_deadlock_without_default_group, 3)
    assert torch.equal(one, other)
