"""Decoupled training with an owner for each parameter: the replicated optimizer's results at a part of its state."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp.comm_hooks import DecoupledState
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.muon_training import equal
from tests.multiprocess.owned_training import MAKE, ByOwners, OwnedRun, batch, loss_of, mixture

pytestmark = pytest.mark.torch_version

# Within five steps all is decided, buckets too, and every optimizer has used what it keeps.
FEW = 9 if IN_CAMPAIGN else 6
BEFORE, AFTER = (4, 4) if IN_CAMPAIGN else (3, 3)
# With these, `test_owners_muon` takes longer walks.
WALKED_ELSEWHERE = () if IN_CAMPAIGN else ("muon in groups", "muon without nesterov", "adamw and muon")
KINDS_BY_OWNERS = [("soap", 4), ("shampoo", 4), ("adamw", 3)]
if IN_CAMPAIGN:
    KINDS_BY_OWNERS += [("adamw", 4), ("soap", 3)]


def differences(rank: int, world_size: int, kind: str, options: dict[str, Any] | None = None) -> list[int]:
    """Return the steps after which a parameter differs from plain DDP's."""
    ours = OwnedRun(mixture(), kind, owners=True, options=options)
    plain = OwnedRun(mixture(), kind, owners=False, options=options)
    different = []
    for step in range(FEW):
        for each in (ours, plain):
            each.step(batch(rank, step))
        if not equal(ours.parameters(), plain.parameters()):
            different.append(step)
    return different


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind not in WALKED_ELSEWHERE])
def test_two_ranks_get_the_bits_of_the_replicated_optimizers(kind: str) -> None:
    assert run_ranks(differences, 2, args=(kind,)) == [[]] * 2


def state_bytes(run: OwnedRun) -> int:
    kept = [value for each in run.optimizers for state in each.state.values() for value in state.values()]
    flat = [each for value in kept for each in (value if isinstance(value, (list, tuple)) else [value])]
    return sum(each.nbytes for each in flat if isinstance(each, Tensor))


def by_owners(rank: int, world_size: int, kind: str) -> tuple[list[int], float]:
    """Return the steps after which a parameter differs, and the rank's part of the replicated optimizers' state."""
    ours = OwnedRun(mixture(), kind, owners=True)
    assert ours.state is not None and ours.state.owners is not None
    theirs = ByOwners(mixture(), kind, ours.state.owners)
    different = []
    for step in range(FEW):
        ours.step(batch(rank, step))
        theirs.step(batch(rank, step))
        if not equal(ours.parameters(), theirs.parameters()):
            different.append(step)
    assert ours.state.memory_usage()["state"] == state_bytes(ours)
    whole = sum(
        each.nbytes
        for optimizer in theirs.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        for each in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(each, Tensor)
    )
    return different, state_bytes(ours) / whole


@pytest.mark.parametrize(("kind", "world_size"), KINDS_BY_OWNERS)
def test_more_ranks_get_the_bits_of_the_optimizers_fed_the_owners_sums(kind: str, world_size: int) -> None:
    results = run_ranks(by_owners, world_size, args=(kind,))
    assert [different for different, _ in results] == [[]] * world_size
    assert sum(part for _, part in results) == pytest.approx(1.0), "each state is kept once"
    if world_size == 4:
        assert max(part for _, part in results) <= 0.30


def unused(rank: int, world_size: int) -> list[int]:
    """Most matrices have no gradient in some steps: the count of Shampoo's groups goes on all the same."""
    options = {"find_unused_parameters": True}
    runs = [OwnedRun(mixture(), "shampoo", owners=owners, options=options) for owners in (True, False)]
    different = []
    for step in range(FEW):
        for each in runs:
            each.module.is_short = step % 3 == 1
            each.step(batch(rank, step))
        if not equal(runs[0].parameters(), runs[1].parameters()):
            different.append(step)
    counts = [[group["steps"] for group in each.optimizers[0].param_groups] for each in runs]
    assert counts[0] == counts[1]
    return different


def test_parameters_without_gradients_stay_as_they_are() -> None:
    assert run_ranks(unused, 2) == [[], []]


def skipped(rank: int, world_size: int) -> list[str]:
    """Skip steps by zero_grad, and by nothing, which is an error."""
    ours, plain = (OwnedRun(mixture(), "soap", owners=owners) for owners in (True, False))
    messages = []
    for step in range(FEW):
        for each in (ours, plain):
            if step % 3 == 1:
                each.backward(batch(rank, 700 + step))
                for optimizer in each.optimizers:
                    optimizer.zero_grad()
            if step % 3 == 2 and each is ours:
                each.backward(batch(rank, 700 + step))
                with pytest.raises(UnsupportedConfigurationError) as error:
                    each.backward(batch(rank, 700 + step))
                messages.append(str(error.value))
                for optimizer in each.optimizers:
                    optimizer.zero_grad()
            each.step(batch(rank, step))
        assert equal(ours.parameters(), plain.parameters()), step
    return messages


def test_a_skipped_step_changes_nothing_and_a_forgotten_one_is_an_error() -> None:
    for messages in run_ranks(skipped, 2):
        assert len(messages) == FEW // 3
        assert all("expected step() between two exchanges" in message for message in messages)


Checkpoint = dict[str, Any]


def saved(run: OwnedRun) -> Checkpoint:
    return copy.deepcopy(
        {
            "module": run.module.state_dict(),
            "optimizers": [each.state_dict() for each in run.optimizers],
            "schedulers": [each.state_dict() for each in run.schedulers],
        }
    )


def restored(run: Any, checkpoint: Checkpoint) -> Any:
    checkpoint = copy.deepcopy(checkpoint)
    run.module.load_state_dict(checkpoint["module"])
    for name in ("optimizers", "schedulers"):
        for each, state in zip(getattr(run, name), checkpoint[name], strict=True):
            each.load_state_dict(state)
    return run


def steps(run: Any, rank: int, first: int, count: int) -> list[Tensor]:
    for step in range(first, first + count):
        run.step(batch(rank, step))
    return run.parameters()  # type: ignore[no-any-return]


def resumed(rank: int, world_size: int, kind: str) -> tuple[Checkpoint, dict[str, bool]]:
    whole = OwnedRun(mixture(), kind, owners=True)
    steps(whole, rank, 0, BEFORE)
    assert whole.state is not None
    with pytest.raises(UnsupportedConfigurationError, match="consolidate"):
        whole.optimizers[0].state_dict()
    whole.state.consolidate(to=0)
    if rank:
        with pytest.raises(UnsupportedConfigurationError, match="consolidate"):
            whole.optimizers[0].state_dict()
    whole.state.consolidate()
    checkpoint = saved(whole)
    expected = steps(whole, rank, BEFORE, AFTER)
    found = {}
    for owners in (True, False):
        run = restored(OwnedRun(mixture(9), kind, owners=owners), checkpoint)
        found[f"owners={owners}"] = equal(expected, steps(run, rank, BEFORE, AFTER))
    plain = OwnedRun(mixture(), kind, owners=False)
    steps(plain, rank, 0, BEFORE)
    run = restored(OwnedRun(mixture(9), kind, owners=True), saved(plain))
    found["from plain"] = equal(expected, steps(run, rank, BEFORE, AFTER))
    return checkpoint, found


def resumed_with_more(rank: int, world_size: int, kind: str, checkpoint: Checkpoint) -> bool:
    ours = restored(OwnedRun(mixture(9), kind, owners=True), checkpoint)
    assert ours.state is not None
    theirs = restored(ByOwners(mixture(9), kind, ours.state.owners), checkpoint)
    return equal(steps(ours, rank, BEFORE, AFTER), steps(theirs, rank, BEFORE, AFTER))


@pytest.mark.parametrize("kind", ["soap", "shampoo", "muon in groups"])
def test_checkpoints_are_torchs_own_and_go_on_with_the_same_bits(kind: str) -> None:
    results = run_ranks(resumed, 2, args=(kind,))
    for _, found in results:
        assert found == {"owners=True": True, "owners=False": True, "from plain": True}
    assert run_ranks(resumed_with_more, 4, args=(kind, results[0][0])) == [True] * 4


def misused(rank: int, world_size: int) -> dict[str, str]:
    """Provoke what is refused, on all ranks alike."""
    messages = {}

    run = OwnedRun(mixture(), "soap", owners=True)
    gradients = [*run.module.parameters()]
    run.backward(batch(rank, 0))
    torch.nn.utils.clip_grad_norm_(gradients, 0.1)
    with pytest.raises(UnsupportedConfigurationError) as error:
        run.optimizers[0].step()
    messages["clipping"] = str(error.value)

    run = OwnedRun(mixture(), "soap", owners=True)
    run.backward(batch(rank, 0))
    run.optimizers[0].step()
    with pytest.raises(UnsupportedConfigurationError) as error:
        run.module.state_dict()
    messages["a read"] = str(error.value)
    with pytest.raises(UnsupportedConfigurationError) as error:
        loss_of(run.model, batch(rank, 1))
    messages["forward"] = str(error.value)

    run = OwnedRun(mixture(), "soap", owners=True)
    run.step(batch(rank, 0))
    with run.model.no_sync():
        run.backward(batch(rank, 1))
    with pytest.raises(UnsupportedConfigurationError) as error:
        run.optimizers[0].step()
    messages["no exchange"] = str(error.value)

    run = OwnedRun(mixture(), "soap", owners=True)
    run.optimizers[0].register_step_post_hook(lambda *_: None)
    run.backward(batch(rank, 0))
    with pytest.raises(UnsupportedConfigurationError) as error:
        run.optimizers[0].step()
    messages["a step hook"] = str(error.value)
    return messages


def test_misuse_is_refused_with_the_remedy() -> None:
    for messages in run_ranks(misused, 2):
        assert "state.clip_grad_norm_" in messages["clipping"]
        assert "call all of them after each backward()" in messages["a read"]
        assert "call all of them" in messages["forward"]
        assert "outside of no_sync()" in messages["no exchange"]
        assert "owners=None" in messages["a step hook"]


class Talkative(torch.optim.SGD):
    """An optimizer with a collective of its own, as public distributed Muons have one."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        return super().step(closure)


def collectives(rank: int, world_size: int) -> str:
    with pytest.raises(UnsupportedConfigurationError) as error:
        DecoupledState(Talkative(mixture().parameters(), lr=0.1), owners="layers")
    return str(error.value)


def test_an_optimizer_with_collectives_of_its_own_is_refused() -> None:
    for message in run_ranks(collectives, 2):
        assert "Talkative" in message and "allreduce" in message


def deferred(rank: int, world_size: int) -> tuple[bool, bool]:
    """Parameters are updated when they are read, not before, and `flush` updates them all."""
    run = OwnedRun(mixture(), "soap", owners=True)
    plain = OwnedRun(mixture(), "soap", owners=False)
    for step in range(FEW):
        for each in (run, plain):
            each.step(batch(rank, step))
    assert run.state is not None
    pending = run.state.stats()["deferred"] > 0
    run.state.flush()
    return pending and not run.state.stats()["deferred"], equal(run.parameters(), plain.parameters())


def test_the_gather_is_deferred_into_the_next_forward() -> None:
    assert run_ranks(deferred, 2) == [(True, True)] * 2
