"""Muon's checkpoints are torch's: with and without the hook, with other numbers of ranks, to the last bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState
from tests.harness import run_ranks
from tests.multiprocess.muon_training import ByOwners, Training, batch, equal, loss_of, mixture

pytestmark = pytest.mark.torch_version

BEFORE, AFTER = 3, 4
Checkpoint = dict[str, Any]


def saved(training: Training) -> Checkpoint:
    parts = {"module": training.module, "muon": training.muon, "adamw": training.adamw}
    return copy.deepcopy(
        {
            **{name: part.state_dict() for name, part in parts.items()},
            "schedulers": [each.state_dict() for each in training.schedulers],
        }
    )


def restore(training: Training | ByOwners, checkpoint: Checkpoint) -> None:
    checkpoint = copy.deepcopy(checkpoint)
    training.module.load_state_dict(checkpoint["module"])
    training.muon.load_state_dict(checkpoint["muon"])
    training.adamw.load_state_dict(checkpoint["adamw"])
    for scheduler, state in zip(training.schedulers, checkpoint["schedulers"], strict=True):
        scheduler.load_state_dict(state)


def steps(training: Training, rank: int, first: int, count: int) -> list[Tensor]:
    for step in range(first, first + count):
        training.step(batch(rank, step))
    return training.parameters()


def resumed(rank: int, world_size: int) -> tuple[Checkpoint, dict[str, bool]]:
    whole = Training(mixture(), hook=True)
    steps(whole, rank, 0, BEFORE)
    assert whole.state is not None
    whole.state.consolidate()
    checkpoint = saved(whole)
    expected = steps(whole, rank, BEFORE, AFTER)
    found = {}
    for name, hook in (("with the hook", True), ("without", False)):
        training = Training(mixture(seed=9), hook=hook)
        restore(training, checkpoint)
        found[name] = equal(steps(training, rank, BEFORE, AFTER), expected)
    # Without the hook, and back again: the state of a Muon that was loaded before its MuonState was made.
    plain = Training(mixture(), hook=False)
    steps(plain, rank, 0, BEFORE)
    back = Training(mixture(seed=9), hook=False)
    restore(back, saved(plain))
    again = Training(mixture(seed=9), hook=True)
    restore(again, saved(back))
    found["back"] = equal(steps(again, rank, BEFORE, AFTER), expected)
    return checkpoint, found


def momenta_of(checkpoint: Checkpoint) -> list[Tensor]:
    return [state["momentum_buffer"] for _, state in sorted(checkpoint["muon"]["state"].items())]


def with_other_ranks(rank: int, world_size: int, checkpoint: Checkpoint) -> list[int]:
    ours = Training(mixture(seed=9), hook=True)
    assert ours.state is not None
    theirs = ByOwners(mixture(seed=9))
    for each in (ours, theirs):
        restore(each, checkpoint)
    different = []
    for step in range(BEFORE, BEFORE + AFTER):
        loss_of(ours.model, batch(rank, step)).backward()
        theirs.backward(
            batch(rank, step), [None if p.grad is None else p.grad.clone() for p in ours.module.parameters()]
        )
        ours.update()
        theirs.update()
        if not equal(ours.parameters(), theirs.parameters()):
            different.append(step)
    return different


def test_training_resumes_to_the_last_bit_with_as_many_ranks_with_others_and_without_the_hook() -> None:
    results = run_ranks(resumed, 2)
    for checkpoint, found in results:
        assert found == {"with the hook": True, "without": True, "back": True}
        momenta, others = momenta_of(checkpoint), momenta_of(results[0][0])
        assert len(momenta) == 5 and equal(momenta, others)
    assert run_ranks(with_other_ranks, 4, args=(results[0][0],)) == [[]] * 4


def consolidated(rank: int, world_size: int) -> tuple[int, str]:
    """Consolidate to rank 1; every other one refuses to save a part, and so does rank 1 after the next step."""
    training = Training(mixture(), hook=True)
    assert training.state is not None
    assert training.muon.state_dict()["state"] == {}
    steps(training, rank, 0, 2)
    with pytest.raises(UnsupportedConfigurationError, match=r"expected state\.consolidate"):
        training.muon.state_dict()
    with pytest.raises(UnsupportedConfigurationError, match=r"state\.close\(\), got the state of"):
        training.state.close()
    with pytest.raises(ValueError, match="expected 0 <= to < 2"):
        training.state.consolidate(to=2)
    training.state.consolidate(to=1)
    try:
        found = len(training.muon.state_dict()["state"])
    except UnsupportedConfigurationError:
        found = 0
    steps(training, rank, 2, 1)
    with pytest.raises(UnsupportedConfigurationError) as error:
        training.muon.state_dict()
    return found, str(error.value)


def test_a_part_of_the_momentum_is_never_saved() -> None:
    assert [found for found, _ in run_ranks(consolidated, 2)] == [0, 5]


def closed(rank: int, world_size: int) -> bool:
    """Close the state, and go on by plain DDP with the same Muon; then make another state."""
    ours, plain = Training(mixture(), hook=True), Training(mixture(), hook=False)
    for each in (ours, plain):
        steps(each, rank, 0, 2)
    assert ours.state is not None
    with pytest.raises(UnsupportedConfigurationError, match="has another already"):
        MuonState(ours.muon)
    ours.state.consolidate()
    ours.state.close()
    after = Training.__new__(Training)
    after.__dict__.update(ours.__dict__)
    after.model = torch.nn.parallel.DistributedDataParallel(ours.module)
    expected = steps(plain, rank, 2, 2)
    assert equal(steps(after, rank, 2, 2), expected)
    assert vars(ours.muon).get("zero_grad") is None
    MuonState(ours.muon)
    return True


def test_a_closed_state_gives_muon_back() -> None:
    assert run_ranks(closed, 2) == [True, True]
