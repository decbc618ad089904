"""Each hook beside a sibling, with a peer that dies, and resumed from a checkpoint."""

import copy
import functools
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

STEPS = 12
SECONDS = 50.0  # a peer's death is heard of within these, on a busy machine
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
OUTER = {"sync_every": 2, "delay": 1, "fragments": 2, "outer_optimizer": NESTEROV}
# Replicas that differ between two averages, so that no other row walks with them.
REPLICAS = {
    "local_sgd": Row(alone(LocalSGDState, local_sgd_hook, sync_every=2)),
    "elastic": Row(alone(ElasticState, elastic_hook, sync_every=2, mode="sync", moving_rate=0.2)),
    "nesterov": Row(alone(LocalSGDState, local_sgd_hook, **OUTER), takes_turns=False),
}
# Of kinds that are resumed only: factors are under way, a solver of another kind, a codec, another hook's state.
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
        ddp.DecoupledState(optimizers[0], kfac=ddp.KFACState(model, optimizers[0])),
        ddp.decoupled_hook,
    )
)
# In the short form without those whose path is that of another hook but for details.
IN_COLUMNS = {name: row for name, row in HOOKS.items() if IN_CAMPAIGN or not row.is_like_others}
ROWS = IN_COLUMNS | REPLICAS
RESUMED |= {**ROWS, "decoupled_int8": HOOKS["decoupled_int8"]}


class Walk(Recorder):
    """A small model with BatchNorm that is trained by a row's optimizers and hook."""

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
        first = [copy.deepcopy(saved)]
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

    def go_on(self, rank: int, saved: dict[str, Any]) -> Results:
        self.load(saved)
        self.train(rank, 4, 7)
        end(self.model)
        return self.finish()


def beside(rank: int, world_size: int, hook: str, group: str) -> tuple[Results, dict[str, Any]]:
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    MUTEX.set(mutex)
    walk = Walk(ROWS[hook])
    held = []
    walk.model.module.register_forward_pre_hook(
        lambda *_: held.append(mutex is None or mutex.holding)
    )
    walk.train(rank, 0, STEPS)
    stats = mutex.stats() if mutex is not None else {}
    end(walk.model)
    if mutex is not None:
        mutex.close()
    MUTEX.set(None)
    return walk.finish(), {**stats, "held": held}


@pytest.mark.parametrize("hook", [name for name, row in ROWS.items() if row.takes_turns])
def test_siblings_train_as_alone_and_take_turns(hook: str) -> None:
    alone, group = run_ranks(beside, 2, args=(hook, "")), new_group()
    every = 1 if hook in HOOKS else 2  # steps from exchange to exchange
    for job in run_jobs([Job(beside, 2, (hook, group), name=name) for name in "ab"], timeout_s=120):
        for rank, (results, stats) in enumerate(job):
            assert not differences(results, alone[rank][0], 0.0)
            assert stats["turns"] >= STEPS // every - 1, "a turn an exchange"
            assert all(stats["held"][every:]), (
                "the first forwards come before the first turn, all others in one"
            )
            assert stats["disabled_because"] is None
            assert stats["leases_expired"] == 0


@pytest.mark.parametrize("hook", [name for name in IN_COLUMNS if not name.startswith("wrapped")])
@in_ranks(2, deaths={1: signal.SIGKILL})
def test_a_peer_that_dies_is_an_error_that_names_rank_and_bucket(rank: int, hook: str) -> None:
    """Rank 1 dies in the middle of its third backward pass."""
    walk = Walk(HOOKS[hook])
    walk.train(rank, 0, 2)
    dist.barrier()
    if rank == 1:
        last = walk.model.module[2].weight
        last.register_hook(lambda gradient: signal.raise_signal(signal.SIGKILL))
    begin_s, heard = time.monotonic(), []
    for _ in range(2):
        heard.append(error_of(lambda: walk.train(rank, 2, 6)))
        walk.drop()
        walk.model.require_forward_param_sync = False  # DDP's own broadcast of buffers fails, too
    assert re.match(r"rank 0 of 2: the .+ of (bucket \d|factors of K-FAC)", heard[0])
    assert heard[1] == heard[0], "a failure is final"
    assert time.monotonic() - begin_s < SECONDS
    dist.destroy_process_group()
    assert [each.name for each in threading.enumerate() if each.name.startswith("crossover")] == []


def resumed(rank: int, world_size: int, hook: str) -> tuple[list[str], dict[str, Any]]:
    """Go on from a checkpoint in a new model and state; return how that differs from going on, and the checkpoint."""
    row = RESUMED[hook]
    whole = Walk(row)
    whole.train(rank, 0, 3)
    if hook == "kfac_int8":  # else residuals are not in its checkpoint, of which it warns
        vars(whole.model)["state"].drain()
    whole.train(rank, 3, 4)
    saved = whole.save()
    whole.train(rank, 4, 7)
    end(whole.model)
    expected = whole.finish()
    found = [differences(Walk(row, seed=9).go_on(rank, saved), expected, 0.0)]
    if (
        hook in HOOKS and row.like is None and not row.lossy
    ):  # such a hook resumes plain DDP, which resumes it
        plain = Row(None, options=row.options, optimizers=row.optimizers)
        first = Walk(plain)
        first.train(rank, 0, 4)
        for other, theirs in (
            (plain, saved),
            (row, first.save()),
        ):  # of plain DDP's there is no "hook"
            got = Walk(other, seed=9).go_on(rank, theirs)
            found.append(differences(parameters_of(got), parameters_of(expected), 0.0))
    return found, saved


def parameters_of(results: Results) -> Results:
    """Leave out buffers, which between two steps are rank 0's with plain DDP."""
    return {name: value for name, value in results.items() if name.endswith(("weight", "bias"))}


@pytest.mark.parametrize("hook", RESUMED)
def test_a_resumed_job_goes_on_to_the_last_bit(hook: str) -> None:
    for found, _ in run_ranks(resumed, 2, args=(hook,)):
        assert not any(found), found


def resumed_with_more(rank: int, world_size: int, hook: str, saved: dict[str, Any]) -> str:
    """Go on from the checkpoint of two ranks, beside plain DDP that adds as owners do."""
    row = HOOKS[hook]
    plain = Row(
        lambda *_: adding("tree"), options=row.options, optimizers=row.optimizers, takes_turns=False
    )
    ours, theirs = (parameters_of(Walk(each, seed=9).go_on(rank, saved)) for each in (row, plain))
    return differences(ours, theirs, 0.0)


@pytest.mark.parametrize("hook", ["muon", "owners"])
def test_what_owners_had_is_for_any_number_of_ranks(hook: str) -> None:
    (_, saved), _ = run_ranks(resumed, 2, args=(hook,))
    assert run_ranks(resumed_with_more, 3, args=(hook, saved)) == [""] * 3
