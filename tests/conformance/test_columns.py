"""Each hook beside a sibling, with a peer that dies, and resumed from a checkpoint."""

import copy
import functools
import io
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from crossover_ddp import GPUMutex
from crossover_ddp._engine.states import HookState
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from tests.conformance.cases import TINY_MB, WIDTH, Recorder, Results, inputs, loss_of
from tests.conformance.hooks import HOOKS, MUTEX, Row, alone
from tests.conformance.reference import adding
from tests.conformance.test_conformance import differences, end
from tests.harness import Job, in_ranks, run_jobs, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import new_group
from tests.harness.oracles import error_of

STEPS = 12 if IN_CAMPAIGN else 8
DEATH_TIMEOUT_S = 50.0  # a peer's death must raise within this time, on a busy machine
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
OUTER = {"sync_every": 2, "delay": 1, "fragments": 2, "outer_optimizer": NESTEROV}
# Hooks whose replicas differ between two averages, so that they have no reference in `HOOKS`.
REPLICAS = {
    "local_sgd": Row(alone(LocalSGDState, local_sgd_hook, sync_every=2)),
    "elastic": Row(alone(ElasticState, elastic_hook, sync_every=2, mode="sync", moving_rate=0.2)),
    "nesterov": Row(alone(LocalSGDState, local_sgd_hook, **OUTER), takes_turns=False),
}
# Only for the tests of resuming: K-FAC with factors under way, with the other solver, with a codec,
# and below in decoupled training.
KFACS: dict[str, dict[str, Any]] = {
    "kfac_late": {"factor_update_steps": 3, "inv_update_steps": 6},
    "kfac_eigen": {"factor_update_steps": 2, "inv_update_steps": 4, "solver": "eigen"},
    "kfac_int8": {"codec": ddp.Int8(), "inv_update_steps": 4},
}
RESUMED = {
    name: Row(
        lambda model, optimizers, given=given: (
            ddp.KFACState(model, optimizers[0], **given),
            ddp.kfac_hook,
        )
    )
    for name, given in KFACS.items()
}
RESUMED["kfac_decoupled"] = Row(
    lambda model, optimizers: (
        ddp.DecoupledKFACState(optimizers[0], ddp.KFACState(model, optimizers[0])),
        ddp.decoupled_hook,
    )
)
# The short form leaves out hooks whose path is another hook's except for details.
IN_COLUMNS = {name: row for name, row in HOOKS.items() if IN_CAMPAIGN or not row.is_like_others}
ROWS = IN_COLUMNS | REPLICAS
RESUMED |= {**ROWS, "decoupled_int8": HOOKS["decoupled_int8"]}


def from_file(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as torch loads it if only tensors and plain containers are accepted."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


class SmallTraining(Recorder):
    """Trains a small model with BatchNorm, with a row's optimizers and hook."""

    def __init__(self, row: Row, seed: int = 5) -> None:
        torch.manual_seed(seed)
        layers = [
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.BatchNorm1d(WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
        ]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), bucket_cap_mb=TINY_MB, **row.options
        )
        vars(model)["row"] = row
        super().__init__(model)

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(self.model(inputs(rank, step))).backward()
            self.update()

    def save(self) -> dict[str, Any]:
        """Return rank 0's checkpoint."""
        if isinstance(self._state, HookState):
            saved = self._state.checkpoint(self.optimizers)
        else:
            optimizers = [each.state_dict() for each in self.optimizers]
            saved = {"model": self.model.module.state_dict(), "optimizer": optimizers}
        first = [from_file(saved)]
        dist.broadcast_object_list(first)
        return first[0]

    def load(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        if isinstance(self._state, HookState):
            self._state.restore(saved, self.optimizers)
        else:
            self.model.module.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
                optimizer.load_state_dict(state)

    def resume(self, rank: int, saved: dict[str, Any]) -> Results:
        """Load a checkpoint of step 4, train to step 7, and return the results."""
        self.load(saved)
        self.train(rank, 4, 7)
        end(self.model)
        return self.finish()


def train_beside(
    rank: int, world_size: int, hook: str, group: str
) -> tuple[Results, dict[str, Any]]:
    """Train as a sibling in ``group``, or alone if it is empty. Return results and statistics.

    ``held`` in the statistics has, for each forward, whether the job had the turn.
    """
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    MUTEX.set(mutex)
    training = SmallTraining(ROWS[hook])
    held = []
    training.model.module.register_forward_pre_hook(
        lambda *_: held.append(mutex is None or mutex.holding)
    )
    training.train(rank, 0, STEPS)
    stats = mutex.stats() if mutex is not None else {}
    end(training.model)
    if mutex is not None:
        mutex.close()
    MUTEX.set(None)
    return training.finish(), {**stats, "held": held}


@pytest.mark.parametrize("hook", [name for name, row in ROWS.items() if row.takes_turns])
def test_siblings_train_as_alone_and_take_turns(hook: str) -> None:
    alone = run_ranks(train_beside, 2, args=(hook, ""))
    group = new_group()
    steps_per_exchange = 1 if hook in HOOKS else 2
    jobs = [Job(train_beside, 2, (hook, group), name=name) for name in "ab"]
    for job in run_jobs(jobs, timeout_s=120):
        for rank, (results, stats) in enumerate(job):
            assert not differences(results, alone[rank][0], 0.0)
            assert stats["turns"] >= STEPS // steps_per_exchange - 1, "one turn per exchange"
            assert all(stats["held"][steps_per_exchange:]), (
                "every forward after the first exchange runs within a turn"
            )
            assert stats["disabled_because"] is None
            assert stats["leases_expired"] == 0


@pytest.mark.parametrize("hook", [name for name in IN_COLUMNS if not name.startswith("wrapped")])
@in_ranks(2, deaths={1: signal.SIGKILL})
def test_a_peer_that_dies_is_an_error_that_names_rank_and_bucket(rank: int, hook: str) -> None:
    """Rank 1 dies in the middle of its third backward pass."""
    training = SmallTraining(HOOKS[hook])
    training.train(rank, 0, 2)
    dist.barrier()
    if rank == 1:
        last = training.model.module[2].weight
        last.register_hook(lambda gradient: signal.raise_signal(signal.SIGKILL))
    begin_s = time.monotonic()
    errors = []
    for _ in range(2):
        errors.append(error_of(lambda: training.train(rank, 2, 6)))
        training.drop()
        # DDP's own broadcast of buffers would fail as well.
        training.model.require_forward_param_sync = False
    assert re.match(r"rank 0 of 2: the .+ of (bucket \d|factors of K-FAC)", errors[0])
    assert errors[1] == errors[0], "a failure is final"
    assert time.monotonic() - begin_s < DEATH_TIMEOUT_S
    dist.destroy_process_group()
    assert [each.name for each in threading.enumerate() if each.name.startswith("crossover")] == []


def resumed(rank: int, world_size: int, hook: str) -> tuple[list[str], dict[str, Any]]:
    """Train without a break, and resume from a checkpoint with a new model and state.

    Return the differences between the two, and the checkpoint. A hook that must have plain DDP's
    bits also resumes from plain DDP's checkpoint, and plain DDP from the hook's.
    """
    row = RESUMED[hook]
    unbroken = SmallTraining(row)
    unbroken.train(rank, 0, 3)
    if hook == "kfac_int8":  # otherwise its checkpoint lacks residuals, and it warns
        vars(unbroken.model)["state"].drain()
    unbroken.train(rank, 3, 4)
    saved = unbroken.save()
    unbroken.train(rank, 4, 7)
    end(unbroken.model)
    expected = unbroken.finish()
    found = [differences(SmallTraining(row, seed=9).resume(rank, saved), expected, 0.0)]
    if hook in HOOKS and row.like is None and not row.lossy:
        plain = Row(None, options=row.options, optimizers=row.optimizers)
        plain_training = SmallTraining(plain)
        plain_training.train(rank, 0, 4)
        # Plain DDP's checkpoint has no "hook".
        for other, checkpoint in ((plain, saved), (row, plain_training.save())):
            got = SmallTraining(other, seed=9).resume(rank, checkpoint)
            found.append(differences(parameters_of(got), parameters_of(expected), 0.0))
    return found, saved


def parameters_of(results: Results) -> Results:
    """Leave out buffers: between two steps plain DDP agrees with a hook on rank 0 only."""
    return {name: value for name, value in results.items() if name.endswith(("weight", "bias"))}


@pytest.mark.parametrize("hook", RESUMED)
def test_a_resumed_job_has_the_bits_of_an_unbroken_one(hook: str) -> None:
    for found, _ in run_ranks(resumed, 2, args=(hook,)):
        assert not any(found), found


def resumed_with_more(rank: int, world_size: int, hook: str, saved: dict[str, Any]) -> str:
    """Resume a checkpoint of two ranks with a hook, and with plain DDP that adds as owners do."""
    row = HOOKS[hook]
    plain = Row(
        lambda *_: adding("tree"), options=row.options, optimizers=row.optimizers, takes_turns=False
    )
    ours = parameters_of(SmallTraining(row, seed=9).resume(rank, saved))
    theirs = parameters_of(SmallTraining(plain, seed=9).resume(rank, saved))
    return differences(ours, theirs, 0.0)


@pytest.mark.parametrize("hook", ["muon", "owners"])
def test_a_checkpoint_of_owners_resumes_with_another_number_of_ranks(hook: str) -> None:
    (_, saved), _ = run_ranks(resumed, 2, args=(hook,))
    assert run_ranks(resumed_with_more, 3, args=(hook, saved)) == [""] * 3
