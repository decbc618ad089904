"""Two sibling jobs with Muon: turns are taken, directions are computed in them, and nobody's results change."""

from typing import Any

import pytest
from torch.optim import _muon as torch_muon

from crossover_ddp import GPUMutex
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.groups import new_group
from tests.multiprocess.muon_training import Training, batch, mixture

STEPS = 12


def train(rank: int, world_size: int, group: str) -> dict[str, Any]:
    """Train; without a group alone and without turns."""
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    training = Training(mixture(), hook=False)
    state = MuonState(training.muon, mutex=mutex)
    training.model.register_comm_hook(state, muon_hook)
    held: dict[str, list[bool]] = {"forward": [], "direction": []}

    def note(what: str) -> None:
        held[what].append(mutex is None or mutex.holding)

    training.module.register_forward_pre_hook(lambda *_: note("forward"))
    compute = torch_muon._zeropower_via_newtonschulz

    def watched(*arguments: Any, **options: Any) -> Any:
        note("direction")
        return compute(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_muon, "_zeropower_via_newtonschulz", watched)
        for step in range(STEPS):
            training.step(batch(rank, step))
    stats = mutex.stats() if mutex is not None else {}
    if mutex is not None:
        mutex.close()
    return {
        "parameters": [parameter.tolist() for parameter in training.parameters()],
        "held": held,
        "own": sum(owner == rank for owner in state.owners),
        "stats": stats,
    }


def test_siblings_train_as_alone_and_compute_directions_in_their_turns() -> None:
    group = new_group()
    alone = run_ranks(train, 2, args=("",))
    jobs = [Job(train, 2, (group,), name=name) for name in "ab"]
    for job in run_jobs(jobs, timeout_s=120):
        for rank, of_rank in enumerate(job):
            assert of_rank["parameters"] == alone[rank]["parameters"]
            assert all(of_rank["held"]["forward"][1:]), "the first forward comes before the first hook"
            assert of_rank["stats"]["turns"] >= STEPS - 1
            assert of_rank["stats"]["disabled_because"] is None
            assert of_rank["stats"]["leases_expired"] == 0
            made = of_rank["held"]["direction"]
            assert len(made) == of_rank["own"] * STEPS
            assert all(made[of_rank["own"] :]), "those of the first step come before the first turn"
