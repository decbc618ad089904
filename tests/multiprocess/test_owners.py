"""Optimizers on owners, by `DecoupledState` and by `MuonState`: the replicated ones' bits at a part of their state."""

from functools import cache, wraps
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Muon

from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import in_ranks, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.training import Training, same
from tests.multiprocess.owned_training import MAKE, by_owners, training_of

pytestmark = pytest.mark.torch_version

# Within five steps all is decided, buckets too, and every optimizer has used what it keeps.
STEPS = 24 if IN_CAMPAIGN else 7
LOOKED_AT = (1, STEPS - 1)  # not in between, so that steps are deferred
NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"
# Kinds whose Muon has these, in two groups.
IN_GROUPS, MATRICES = ("muon in groups", "muon without nesterov"), 5


def is_short(training: Training, step: int) -> None:
    """Most matrices have no gradient in some steps."""
    training.model.module.is_short = step % 3 == 1
    training.step()


def changed(training: Training, step: int) -> None:
    """Change what enters the step before and after it: ours is applied later."""
    training.backward()
    for group in training.optimizer.param_groups:
        group.update(momentum=0.8 + 0.01 * step, weight_decay=0.1 / (1 + step), lr=0.03)
    training.update()
    for group in training.optimizer.param_groups:
        group.update(momentum=0.5, weight_decay=0.3, lr=1.0, adjust_lr_fn=None, ns_steps=4 + step % 2)


def tensor_rate(training: Training, step: int) -> None:
    """Learning rates are tensors, of one shape and another, that are changed in place after the step."""
    training.schedulers = training.schedulers[1:] if step == 0 else training.schedulers
    for group in training.optimizer.param_groups:
        shape = () if group is training.optimizer.param_groups[0] else (1,)
        group["lr"] = torch.full(shape, 0.02) if step == 0 else group["lr"]
    training.step()
    for group in training.optimizer.param_groups:
        group["lr"].mul_(0.9)


# By the number of ranks: arguments of `training_of`, and what is done in a step if it is not just trained.
UNUSED = {"act": is_short, "find_unused_parameters": True}
WALKS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"muon_hook": {"way": "muon"}},
    2: {
        **{f"owned-{kind}": {"kind": kind} for kind in MAKE},
        "muon_hook": {"way": "muon", "gradient_as_bucket_view": False},
        "muon_hook-nesterov": {"way": "muon", "kind": "muon without nesterov"},
        "no_views": {"gradient_as_bucket_view": False},
        "muon_hook-bfloat16": {"way": "muon", "dtype": torch.bfloat16},
        "muon_hook-float64": {"way": "muon", "dtype": torch.float64},
        "muon_hook-unused": {"way": "muon", **UNUSED},
        "muon_hook-tensor_rate": {"way": "muon", "act": tensor_rate},
        "bfloat16": {"dtype": torch.bfloat16},
        "unused": UNUSED,
        "unused-soap": {"kind": "soap in groups", **UNUSED},
        "changed": {"act": changed},
    },
    3: {"muon_hook": {"way": "muon"}, "owned-muon": {}},
    4: {"owned-muon": {}, "owned-soap": {"kind": "soap"}},
}  # fmt: skip


class Found(NamedTuple):
    """What a rank has of a walk: steps after which it differs, directions computed, bytes kept, and by plain DDP."""

    differs: list[int]
    directions: int
    kept_bytes: int
    whole_bytes: int
    is_deferred: bool


def walk(rank: int, world_size: int, name: str) -> Found:
    settings = {"way": "owned", **WALKS[world_size][name]}
    way, act = settings.pop("way"), settings.pop("act", lambda training, step: training.step())
    ours = training_of(way, rank, **settings)
    plain = training_of(None if world_size < 3 else by_owners, rank, **settings)
    differs, computed, is_deferred = [], 0, False
    original = torch.optim._muon._zeropower_via_newtonschulz

    @wraps(original)  # whose signature Muon's state reads
    def counted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal computed
        computed += 1
        return original(*arguments, **options)

    with mock.patch(NEWTON_SCHULZ, counted):
        for step in range(STEPS):
            for each in (ours, plain):
                act(each, step)
            is_deferred = way == "owned" and ours.is_pending
            if step in LOOKED_AT and not same(ours, plain):
                differs.append(step)
    assert without_parameters(ours) == without_parameters(plain)
    usage = ours.state.memory_usage()
    kept_bytes = usage["state"] if way == "owned" else usage["momentum"]
    owned = plain.optimizers if way == "owned" else plain.optimizers[:1]
    return Found(
        differs, computed - STEPS * MATRICES, kept_bytes, nbytes([each.state for each in owned]), is_deferred
    )


def without_parameters(training: Training) -> str:
    groups = [group for each in training.optimizers for group in each.param_groups]
    return str([{name: value for name, value in group.items() if name != "params"} for group in groups])


def nbytes(kept: Any) -> int:
    if isinstance(kept, Tensor):
        return kept.nbytes
    inner = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, (list, tuple)) else ()
    return sum(map(nbytes, inner))


def walk_all(rank: int, world_size: int) -> dict[str, Found]:
    return {name: walk(rank, world_size, name) for name in WALKS[world_size]}


@cache
def walks(world_size: int) -> list[dict[str, Found]]:
    return run_ranks(walk_all, world_size, timeout_s=180)


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size in WALKS for name in WALKS[size]])
def test_ranks_get_the_bits_of_the_replicated_optimizers_at_a_part_of_their_state(
    world_size: int, name: str
) -> None:
    """With three ranks and more those of optimizers that are fed the owners' sums."""
    found = [of_rank[name] for of_rank in walks(world_size)]
    assert [each.differs for each in found] == [[]] * world_size
    assert sum(each.kept_bytes for each in found) == found[0].whole_bytes, "each state is kept once"
    if name == "owned-soap" and world_size == 4:
        assert max(each.kept_bytes for each in found) <= 0.30 * found[0].whole_bytes
    settings = WALKS[world_size][name]
    if "act" not in settings and settings.get("kind", "muon in groups") in IN_GROUPS:
        assert sum(each.directions for each in found) == STEPS * MATRICES, (
            "once per matrix, all ranks together"
        )
    if "act" not in settings and settings.get("way") != "muon":
        assert all(each.is_deferred for each in found), "the gather is deferred into the next forward"


@in_ranks(3)
def test_muons_state_tells_the_norm_of_gradients_that_only_owners_have(rank: int) -> float:
    ours, theirs = training_of("muon", rank), training_of(by_owners, rank)
    for each in (ours, theirs):
        each.backward()
    assert not any(matrix.grad.any() for matrix in ours.model.module.matrices())
    gradients = torch.cat([matrix.grad.flatten() for matrix in theirs.model.module.matrices()])
    norm = float(ours.state.grad_norm())
    assert norm == pytest.approx(float(gradients.double().norm()), rel=1e-12)
    return norm


@in_ranks(2)
def test_an_overflow_on_one_rank_skips_muons_step_on_all_of_them(rank: int) -> list[float]:
    """Train with a GradScaler; on step 4 the loss of rank 1 overflows in the layer whose matrix rank 0 or 1 owns."""
    found = []
    for hook in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

        def way(*made: Any, scale: Any = scaler.get_scale) -> tuple[Any, Any]:
            return MuonState(made[1][0], loss_scale=scale), muon_hook

        training = training_of(way if hook else None, rank)
        walked, scales, finite = [], [], []
        for step in range(8):
            loss, tall = training.loss(step), training.model.module.tall.weight
            if (step, rank) == (4, 1):
                loss = loss + tall.sum() * torch.inf
            scaler.scale(loss).backward()
            finite.append(bool(tall.grad.isfinite().all()))
            for each in training.optimizers:
                scaler.step(each)
            scaler.update()
            scales.append(scaler.get_scale())
            training.drop()
            walked.append(torch.cat([value.flatten() for value in training.weights()]))
        found.append((walked, scales, finite))
    (ours, our_scales, our_finite), (theirs, *others) = found
    assert [our_scales, our_finite] == others
    assert all(map(torch.equal, ours, theirs))
    assert our_finite == [step != 4 for step in range(8)]
    assert len(set(our_scales)) > 2, "the scale is to have changed both ways"
    return our_scales


@pytest.mark.parametrize(("way", "count"), [("owned", 6), ("muon", 3)])
@in_ranks(2)
def test_a_part_of_the_state_is_never_saved(rank: int, way: str, count: int) -> None:
    """Consolidate to rank 1; every other one refuses to save a part, and so does rank 1 after the next step."""
    training = Training(way, rank).run(2)
    for refused in (training.optimizer.state_dict, training.state.close):
        with pytest.raises(UnsupportedConfigurationError, match=r"expected state\.consolidate"):
            refused()
    with pytest.raises(ValueError, match="expected 0 <= to < 2"):
        training.state.consolidate(to=2)
    training.state.consolidate(to=1)
    if rank == 1:
        assert len(training.optimizer.state_dict()["state"]) == count
        training.run(1)
    else:
        with pytest.raises(UnsupportedConfigurationError, match=r"expected state\.consolidate"):
            training.optimizer.state_dict()
        training.run(1)
    with pytest.raises(UnsupportedConfigurationError, match=r"expected state\.consolidate"):
        training.optimizer.state_dict()


@in_ranks(2)
def test_state_of_lists_and_tuples_and_counts_of_groups_are_saved(rank: int) -> None:
    """What is a plain dictionary of tensors is resumed in tests/conformance, also with and without the hook."""
    whole = training_of("owned", rank, "soap in groups").run(3)
    whole.state.consolidate()
    saved = [whole.save()]
    dist.broadcast_object_list(saved)
    again = training_of("owned", rank, "soap in groups", seed=9).load(saved[0])
    assert same(again.run(4), whole.run(4))


@in_ranks(2)
def test_ranks_with_other_optimizers_are_told(rank: int) -> None:
    def way(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
        muon = (SGD if rank else Muon)(model.module.matrices(), lr=0.02)
        return DecoupledState([muon, optimizers[1]], owners="layers"), decoupled_hook

    message = "the same parameters in the optimizers on all ranks.*Muon"
    with pytest.raises(UnsupportedConfigurationError, match=message):
        training_of(way, rank).backward()
