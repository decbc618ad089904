"""torch's Muon with owners, decoupled: directions travel in bfloat16, and the bits are those of plain DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Muon

from crossover_ddp._decoupled import owned
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.muon_training import equal
from tests.multiprocess.owned_training import ByOwners, DerivedMuon, OwnedRun, batch, mixture

pytestmark = pytest.mark.torch_version

STEPS, FEW = (24, 9) if IN_CAMPAIGN else (9, 6)
MATRICES = 5
KIND = "muon in groups"


def pair(
    kind: str = KIND, dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None
) -> list[OwnedRun]:
    return [
        OwnedRun(mixture(dtype=dtype), kind, owners=owners, options=options and {**options})
        for owners in (True, False)
    ]


def count_directions(patch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return the shapes of the matrices whose directions are computed from now on."""
    computed: list[torch.Size] = []
    direction_of = owned.direction_of

    def counted(gradient: Tensor, *others: Any) -> Tensor:
        computed.append(gradient.shape)
        return direction_of(gradient, *others)

    patch.setattr(owned, "direction_of", counted)
    return computed


VARIANTS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "no nesterov": {"kind": "muon without nesterov"},
    "the other order": {"kind": "adamw and muon"},
    "no views": {"options": {"gradient_as_bucket_view": False}},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
}


def differences(rank: int, world_size: int, variant: str) -> tuple[list[int], int]:
    """Return the steps after which a parameter differs from plain DDP's, and how many directions were computed."""
    runs, different = pair(**VARIANTS[variant]), []
    with pytest.MonkeyPatch.context() as patch:
        computed = count_directions(patch)
        for step in range(STEPS):
            for each in runs:
                each.step(batch(rank, step))
            if not equal(runs[0].parameters(), runs[1].parameters()):
                different.append(step)
    return different, len(computed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_get_the_bits_of_ddp_with_muon_and_adamw(variant: str) -> None:
    results = run_ranks(differences, 2, args=(variant,))
    assert [different for different, _ in results] == [[], []]
    assert sum(count for _, count in results) == STEPS * MATRICES, "once per matrix, all ranks together"


def by_owners(rank: int, world_size: int) -> tuple[list[int], int, int, bool]:
    """Return the steps after which a parameter differs, directions, bytes of momentum, and whether only owned."""
    ours = OwnedRun(mixture(), KIND, owners=True)
    assert ours.state is not None and ours.state.owners is not None
    theirs = ByOwners(mixture(), KIND, ours.state.owners)
    different = []
    with pytest.MonkeyPatch.context() as patch:
        computed = count_directions(patch)
        for step in range(STEPS):
            for each in (ours, theirs):
                each.step(batch(rank, step))
            if not equal(ours.parameters(), theirs.parameters()):
                different.append(step)
    matrices = [p for group in ours.optimizers[0].param_groups for p in group["params"]]
    owned = {id(p) for p, owner in zip(matrices, ours.state.owners, strict=False) if owner == rank}
    kept = ours.optimizers[0].state
    momentum_bytes = sum(state["momentum_buffer"].nbytes for state in kept.values())
    return different, len(computed), momentum_bytes, {id(p) for p in kept} == owned


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_get_the_bits_of_muon_fed_the_owners_sums(world_size: int) -> None:
    results = run_ranks(by_owners, world_size)
    assert [different for different, _, _, _ in results] == [[]] * world_size
    assert sum(count for _, count, _, _ in results) == STEPS * MATRICES
    whole_bytes = 4 * sum(matrix.numel() for matrix in mixture().matrices())
    assert sum(momentum_bytes for _, _, momentum_bytes, _ in results) == whole_bytes
    assert all(only_owned for _, _, _, only_owned in results)


# --- situations ----------------------------------------------------------------------------------------------


def unused(rank: int, step: int, run: OwnedRun) -> None:
    run.module.is_short = step % 3 == 1
    run.step(batch(rank, step))


def changed(rank: int, step: int, run: OwnedRun) -> None:
    """Change what enters the step before and after it: ours is applied later."""
    run.backward(batch(rank, step))
    for group in run.optimizers[0].param_groups:
        group.update(momentum=0.8 + 0.01 * step, weight_decay=0.1 / (1 + step), lr=0.03)
    run.update()
    for group in run.optimizers[0].param_groups:
        group.update(momentum=0.5, weight_decay=0.3, lr=1.0, adjust_lr_fn=None, ns_steps=4 + step % 2)


def tensor_rate(rank: int, step: int, run: OwnedRun) -> None:
    """The learning rate is a tensor that is changed in place after the step."""
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    if not all(isinstance(rate, Tensor) for rate in rates):
        run.schedulers = run.schedulers[1:]
        for group in run.optimizers[0].param_groups:
            group["lr"] = torch.tensor(0.02)
    run.step(batch(rank, step))
    for group in run.optimizers[0].param_groups:
        group["lr"].mul_(0.9)


SITUATIONS = {each.__name__: each for each in (unused, changed, tensor_rate)}


def walk(rank: int, world_size: int, situation: str) -> list[int]:
    runs, different = pair(options={"find_unused_parameters": situation == "unused"}), []
    for step in range(FEW):
        for each in runs:
            SITUATIONS[situation](rank, step, each)
        if not equal(runs[0].parameters(), runs[1].parameters()):
            different.append(step)
    kept = [
        {name for name, p in each.module.named_parameters() if p in each.optimizers[0].state} for each in runs
    ]
    assert kept[0] <= kept[1]
    return different


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_bits_are_the_same_in_each_situation(situation: str) -> None:
    assert run_ranks(walk, 2, args=(situation,)) == [[], []]


def built_differently(rank: int, world_size: int) -> str:
    run = OwnedRun(mixture(), KIND, owners=False)
    muon = (DerivedMuon if rank else Muon)(run.module.matrices(), lr=0.02)
    state = DecoupledState([muon, run.optimizers[1]], owners="layers")
    run.model.register_comm_hook(state, decoupled_hook)
    with pytest.raises(UnsupportedConfigurationError) as error:
        run.backward(batch(rank, 0))
    return str(error.value)


def test_ranks_of_which_only_one_would_send_directions_are_told() -> None:
    for message in run_ranks(built_differently, 2):
        assert "the same parameters in the optimizers on all ranks" in message and "DerivedMuon" in message
