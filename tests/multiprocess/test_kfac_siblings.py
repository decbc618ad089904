"""Two sibling jobs with K-FAC: turns are taken, solvers are made in them, and nobody's results change."""

from typing import Any

import pytest

from crossover_ddp import GPUMutex
from crossover_ddp._kfac.factors import DampedInverse
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.groups import new_group
from tests.multiprocess.kfac_training import Training

STEPS, INVERT_EVERY = 12, 3


def train(rank: int, world_size: int, group: str, way: str) -> dict[str, Any]:
    """Train; without a group alone and without turns."""
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    decoupled = way == "decoupled"
    training = Training(rank, mutex=mutex, decoupled=decoupled, inv_update_steps=INVERT_EVERY)
    held: dict[str, list[bool]] = {"forward": [], "solver": []}

    def note(what: str) -> None:
        held[what].append(mutex is None or mutex.holding)

    training.model.module[0].register_forward_pre_hook(lambda *_: note("forward"))  # type: ignore[operator]
    compute = DampedInverse.compute

    def watched(*arguments: Any, **options: Any) -> Any:
        note("solver")
        return compute(*arguments, **options)

    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DampedInverse, "compute", staticmethod(watched))
        for step in range(STEPS):
            if way == "early" and step == 2:
                training.state.plan_factors(early=True)
            losses.append(training.step())
    stats = mutex.stats() if mutex is not None else {}
    if mutex is not None:
        mutex.close()
    return {
        "losses": losses,
        "parameters": training.parameters().tolist(),
        "held": held,
        "own": training.owners.count(rank),
        "stats": stats,
    }


@pytest.mark.parametrize("way", ["in the buckets", "early", "decoupled"])
def test_siblings_train_as_alone_and_make_solvers_in_their_turns(way: str) -> None:
    group = new_group()
    alone = run_ranks(train, 2, args=("", way))
    jobs = [Job(train, 2, (group, way), name=name) for name in "ab"]
    for job in run_jobs(jobs, timeout_s=120):
        for rank, of_rank in enumerate(job):
            assert of_rank["losses"] == alone[rank]["losses"]
            assert of_rank["parameters"] == alone[rank]["parameters"]
            assert all(of_rank["held"]["forward"][1:]), "the first forward comes before the first hook"
            assert of_rank["stats"]["turns"] >= STEPS - 1
            assert of_rank["stats"]["disabled_because"] is None
            assert of_rank["stats"]["leases_expired"] == 0
            made = of_rank["held"]["solver"]
            assert len(made) == of_rank["own"] * len(range(0, STEPS, INVERT_EVERY))
            # Those of the first step come before the first turn.
            assert all(made[of_rank["own"] :])
