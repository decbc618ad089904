"""`OwnerState` and `MuonState`: bits of replicated optimizers, with a part of their state."""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Final
from unittest import mock

import pytest
import timm.optim
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils._pytree import tree_leaves

from crossover_ddp._system import torch_private
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_hook
from crossover_ddp.owner_hooks import OwnerState, owner_hook
from tests.conformance.reference import adding
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of
from tests.harness.training import Training, Way, same
from tests.unit.decoupled.decoupled_training import Acting, act, owned

pytestmark = pytest.mark.torch_version

TINY_MB: Final = 0.004
VOCABULARY, WIDTH = 11, 12


class Mixture(nn.Module):
    """Tall, wide, square and transposed matrices, and parameters that Muon does not take."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.wide = nn.Linear(2 * WIDTH + 5, WIDTH)
        self.tall = nn.Linear(WIDTH, 2 * WIDTH + 5)
        self.square = nn.Linear(WIDTH, WIDTH, bias=False)
        self.turned = nn.Parameter(torch.randn(3 * WIDTH, WIDTH).mul_(0.2).T)
        self.back = nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.is_short = False
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.is_short:  # uses none of Muon's matrices
            return self.head(self.norm(x))  # type: ignore[no-any-return]
        x = x + self.wide(torch.tanh(self.tall(self.norm(x))))
        x = x + self.square(torch.tanh(x))
        x = x + self.back(torch.relu(x @ self.turned))
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def matrices(self) -> list[nn.Parameter]:
        return [
            self.wide.weight,
            self.tall.weight,
            self.square.weight,
            self.turned,
            self.back.weight,
        ]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Soap(Optimizer):
    """Rotates gradients into eigenbases, as SOAP does.

    It keeps lists and tuples in its state, and a count of steps in the group.

    Args:
        params: as for any optimizer.
        in_place: compute products of the gradient in its own memory, so that their bits depend on
            where it begins.
    """

    def __init__(self, params: Iterable[Any], *, in_place: bool) -> None:
        super().__init__(params, {"lr": 0.01, "every": 2, "in_place": in_place, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], gradient if group["in_place"] else gradient.clone()
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sides"] = [
                1e-4 * torch.eye(size, dtype=gradient.dtype) for size in gradient.shape
            ]
        state["step"] += 1
        for side, term in zip(
            state["sides"], (gradient @ gradient.T, gradient.T @ gradient), strict=True
        ):
            side.lerp_(term, 0.1)
        if (int(state["step"]) - 1) % group["every"] == 0:
            state["bases"] = tuple(torch.linalg.eigh(side)[1] for side in state["sides"])
        left, right = state["bases"]
        turned = left.T @ gradient @ right
        lr = group["lr"] / (1 + 0.01 * group["steps"])
        parameter.sub_(lr * (left @ (turned / (turned.abs() + 1e-3)) @ right.T))


def soap(module: nn.Module, *, in_place: bool = True) -> list[Optimizer]:
    """Return Soap and AdamW. Soap's second group has one matrix: most ranks own none of it."""
    parameters = [*module.parameters()]
    matrices = [p for p in parameters if p.dim() == 2]
    groups = [{"params": matrices[:-1]}, {"params": matrices[-1:], "lr": 0.02}]
    return [
        Soap(groups, in_place=in_place),
        AdamW([p for p in parameters if p.dim() != 2], lr=3e-3),
    ]


def muon_in_groups(module: Mixture, **settings: Any) -> list[Optimizer]:
    matrices = module.matrices()
    others = [p for p in module.parameters() if all(p is not each for each in matrices)]
    groups = [
        {"params": matrices[:2], "adjust_lr_fn": "match_rms_adamw"},
        {"params": matrices[2:], "weight_decay": 0.01, "momentum": 0.9},
    ]
    return [Muon(groups, **{"lr": 0.02, **settings}), AdamW(others, lr=3e-3)]


MAKE: dict[str, Callable[[Any], list[Optimizer]]] = {
    "soap": soap,
    "soap copied": functools.partial(soap, in_place=False),
    "muon in groups": muon_in_groups,
    "muon without nesterov": functools.partial(muon_in_groups, nesterov=False, ns_steps=3),
    "adamw": lambda module: [AdamW(module.parameters(), lr=3e-3)],
}


def by_owners(*_: Any) -> tuple[Any, Any]:
    """Plain DDP whose gradients are added in the owners' order, by a hook of the tests."""
    return adding("tree")


def training_of(
    way: str | Way | None,
    rank: int,
    kind: str = "muon in groups",
    *,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Training:
    return Training(
        way,
        rank,
        module=Mixture(seed, dtype),
        optimizers=lambda model: MAKE[kind](model.module),
        schedule=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 100),
        loss=loss_of,
        **{"bucket_cap_mb": TINY_MB, **options},
    )


# Within five steps buckets have settled, and every optimizer has used its state.
STEPS = 24 if IN_CAMPAIGN else 7
LOOKED_AT = (1, STEPS - 1)  # not in between, so that steps are deferred
NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"
# Kinds whose Muon has these, in two groups.
IN_GROUPS, MATRICES = ("muon in groups", "muon without nesterov"), 5


def is_short(training: Training, step: int) -> None:
    training.model.module.is_short = step % 3 == 1
    training.step()


def changed(training: Training, step: int) -> None:
    """Change hyper-parameters before and after the step: ours is applied later."""
    training.backward()
    for group in training.optimizer.param_groups:
        group.update(momentum=0.8 + 0.01 * step, weight_decay=0.1 / (1 + step), lr=0.03)
    training.update()
    for group in training.optimizer.param_groups:
        group.update(
            momentum=0.5, weight_decay=0.3, lr=1.0, adjust_lr_fn=None, ns_steps=4 + step % 2
        )


def tensor_rate(training: Training, step: int) -> None:
    """Learning rates are tensors of two shapes, which are changed in place after the step."""
    if step == 0:
        del training.schedulers[0]
        for group, shape in zip(training.optimizer.param_groups, ((), (1,)), strict=True):
            group["lr"] = torch.full(shape, 0.02)
    training.step()
    for group in training.optimizer.param_groups:
        group["lr"].mul_(0.9)


# By the number of ranks: arguments of `training_of`, and "act", which replaces a plain step.
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
        "unused-soap": {"kind": "soap copied", **UNUSED},
        "changed": {"act": changed},
    },
    3: {"muon_hook": {"way": "muon"}, "owned-muon": {}},
    4: {"owned-muon": {}, "owned-soap": {"kind": "soap"}},
}  # fmt: skip


def without_parameters(training: Training) -> str:
    groups = [group for each in training.optimizers for group in each.param_groups]
    return str(
        [{name: value for name, value in group.items() if name != "params"} for group in groups]
    )


@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for size in WALKS for name in WALKS[size]]
)
@in_ranks()
def test_ranks_get_the_bits_of_the_replicated_optimizers(
    rank: int, world_size: int, name: str
) -> None:
    """With three ranks and more, the bits of optimizers that receive the owners' sums."""
    settings = {"way": "owned", **WALKS[world_size][name]}
    way, act = settings.pop("way"), settings.pop("act", None)
    ours = training_of(way, rank, **settings)
    plain = training_of(None if world_size < 3 else by_owners, rank, **settings)
    computed, original = 0, torch.optim._muon._zeropower_via_newtonschulz

    @functools.wraps(original)  # whose signature Muon's state reads
    def counted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal computed
        computed += 1
        return original(*arguments, **options)

    ours_counted = mock.patch.object(torch_private, "newton_schulz", counted)
    with mock.patch(NEWTON_SCHULZ, counted), ours_counted:
        for step in range(STEPS):
            for each in (ours, plain):
                act(each, step) if act else each.step()
            is_deferred = way == "owned" and ours.is_pending
            assert step not in LOOKED_AT or same(ours, plain), step
    assert without_parameters(ours) == without_parameters(plain)
    kept_bytes = ours.state.memory_usage()["state" if way == "owned" else "momentum"]
    states = [{**each.state} for each in plain.optimizers[: None if way == "owned" else 1]]
    whole_bytes = sum(t.nbytes for t in tree_leaves(states) if isinstance(t, Tensor))
    of_all = torch.tensor([kept_bytes, computed - STEPS * MATRICES])
    dist.all_reduce(of_all)
    assert of_all[0] == whole_bytes, "each state is kept once"
    if name == "owned-soap" and world_size == 4:
        assert kept_bytes <= 0.30 * whole_bytes
    if act is None and settings.get("kind", "muon in groups") in IN_GROUPS:
        assert of_all[1] == STEPS * MATRICES, (
            "directions are computed once per matrix, all ranks together"
        )
    if act is None and way == "owned":
        assert is_deferred, "the gather is deferred into the next forward"


def others_of(training: Training) -> list[nn.Parameter]:
    matrices = {*map(id, training.model.module.matrices())}
    return [each for each in training.model.parameters() if id(each) not in matrices]


@in_ranks(3)
def test_grad_norm_is_that_of_the_matrices_mean_gradients(rank: int) -> float:
    ours, theirs = training_of("muon", rank), training_of(by_owners, rank)
    for each in (ours, theirs):
        each.backward()
    assert not any(matrix.grad.any() for matrix in ours.model.module.matrices())
    gradients = torch.cat([matrix.grad.flatten() for matrix in theirs.model.module.matrices()])
    norm = float(ours.state.grad_norm())
    assert norm == pytest.approx(float(gradients.double().norm()), rel=1e-12)
    # The lines of docs/muon.md that clip the other parameters by the norm of all gradients.
    others = others_of(ours)
    total = torch.hypot(ours.state.grad_norm(), get_total_norm(p.grad for p in others))
    assert float(clip_grad_norm_(theirs.model.parameters(), 0.1)) == pytest.approx(float(total))
    clip_grads_with_norm_(others, 0.1, total)
    for mine, its in zip(others, others_of(theirs), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    return norm


NORMS: Final = (1.0, 3.0, float("inf"))


class Rows(nn.Module):
    """Two rows, of which each of two ranks owns one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 1, bias=False)
        self.second = nn.Linear(6, 1, bias=False)
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        moved: Tensor = self.first(inputs) + self.factor * self.second(inputs)
        return moved


def norm_of_rows(rank: int, norm_type: float, factor: float) -> float:
    """Return a norm of the gradients. The second row's are ``factor`` times the first row's."""
    training = Training("owned", rank, module=Rows(factor))
    training.model(torch.arange(6.0).expand(1, 6)).sum().backward()
    norm = float(training.state.clip_grad_norm_(1e9, norm_type))
    training.close()
    return norm


@pytest.mark.parametrize("norm_type", NORMS)
@in_ranks(2)
def test_any_norm_is_that_of_all_owners_gradients(rank: int, norm_type: float) -> float:
    first = torch.arange(6.0)
    expected = torch.linalg.vector_norm(torch.cat([first, 3 * first]), norm_type)
    norm = norm_of_rows(rank, norm_type, 3.0)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    return norm


@pytest.mark.parametrize("norm_type", NORMS)
@in_ranks(2)
def test_any_norm_is_nan_if_one_owners_gradient_is(rank: int, norm_type: float) -> None:
    assert math.isnan(norm_of_rows(rank, norm_type, float("nan")))


@in_ranks(2)
def test_an_overflow_on_one_rank_skips_muons_step_on_all(rank: int) -> list[float]:
    """With a GradScaler; in step 4 the loss of rank 1 overflows in one layer."""

    def way(*made: Any) -> tuple[Any, Any]:
        return MuonState(made[1][0], loss_scale=scalers[0].get_scale), muon_hook

    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) for _ in range(2)]
    trainings, scales = [training_of(each, rank) for each in (way, None)], []
    for step in range(8):
        for training, scaler in zip(trainings, scalers, strict=True):
            loss, tall = training.loss(step), training.model.module.tall.weight
            if (step, rank) == (4, 1):
                loss = loss + tall.sum() * torch.inf
            scaler.scale(loss).backward()
            assert bool(tall.grad.isfinite().all()) == (step != 4)
            for each in training.optimizers:
                scaler.step(each)
            scaler.update()
            training.drop()
        assert same(*trainings)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    assert len(set(scales)) > 2, "the scale has grown and shrunk"
    return scales


@pytest.mark.parametrize(("way", "count"), [("owned", 6), ("muon", 3)])
@in_ranks(2)
def test_a_part_of_the_state_is_never_saved(rank: int, way: str, count: int) -> None:
    """After consolidation to rank 1 rank 0 refuses to save; after the next step rank 1 does."""
    training = Training(way, rank).run(2)
    for refused in (training.optimizer.state_dict, training.state.close):
        with pytest.raises(UnsupportedConfigurationError, match=r"call state\.checkpoint\(\)"):
            refused()
    with pytest.raises(ValueError, match="expected 0 <= to < 2"):
        training.state.consolidate(to=2)
    training.state.consolidate(to=1)
    if rank == 1:
        assert len(training.optimizer.state_dict()["state"]) == count
        training.run(1)
    else:
        with pytest.raises(UnsupportedConfigurationError, match=r"call state\.checkpoint\(\)"):
            training.optimizer.state_dict()
        training.run(1)
    with pytest.raises(UnsupportedConfigurationError, match=r"call state\.checkpoint\(\)"):
        training.optimizer.state_dict()


@in_ranks(2)
def test_state_of_lists_and_tuples_and_counts_of_groups_are_saved(rank: int) -> None:
    """States that are dictionaries of tensors are resumed in tests/conformance."""
    whole = training_of("owned", rank, "soap copied").run(3)
    whole.state.consolidate()
    saved = [whole.save()]
    dist.broadcast_object_list(saved)
    again = training_of("owned", rank, "soap copied", seed=9).load(saved[0])
    assert same(again.run(4), whole.run(4))


@in_ranks(2)
def test_ranks_with_different_optimizers_are_refused(rank: int) -> None:
    def way(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
        muon = (SGD if rank else Muon)(model.module.matrices(), lr=0.02)
        return OwnerState([muon, optimizers[1]]), owner_hook

    message = "the same parameters in the optimizers on all ranks.*Muon"
    with pytest.raises(UnsupportedConfigurationError, match=message):
        training_of(way, rank).backward()


@pytest.mark.defect("decoupled-11", "strangers-29")
@pytest.mark.parametrize("muon", [False, True])
@in_ranks(2)
def test_frozen_parameters_cost_their_owner_nothing(rank: int, muon: bool) -> None:
    parameters = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    parameters.append(nn.Parameter(torch.ones(40, 40), requires_grad=False))
    if muon:
        owners = MuonState(torch.optim.Muon(parameters)).owners
    else:
        owners = OwnerState(torch.optim.AdamW(parameters)).owners or ()
    trained_by = [0, 0]
    for parameter, owner in zip(parameters, owners, strict=True):
        trained_by[owner] += parameter.numel() if parameter.requires_grad else 0
    assert trained_by == [128, 128]


@pytest.mark.defect("strangers-6")
@in_ranks(2)
def test_a_lookahead_around_owners_is_refused(rank: int) -> None:
    training = owned()
    wrapper = timm.optim.Lookahead(training.optimizer, k=2)
    with pytest.raises(UnsupportedConfigurationError, match="lookahead_slow_buff"):
        for step in range(6):
            training.backward(2 * step + rank)
            wrapper.step()
            wrapper.zero_grad()


@pytest.mark.defect("strangers-31")
@in_ranks(2)
def test_a_step_skipped_on_one_rank_raises_an_error_that_names_step(rank: int) -> None:
    training = owned(ddp={"process_group": impatient_group(2)})

    def train() -> None:
        for step in range(3):
            training.backward(step)
            training.drop() if rank and step == 1 else training.update()
        training.weights()

    told: list[Any] = [None, None]
    dist.all_gather_object(told, error_of(train))
    assert any("step()" in each for each in told)


@pytest.mark.defect("strangers-28")
@in_ranks(2)
def test_torchs_distributed_checkpoint_resumes_muon(rank: int) -> None:
    """tests/recipes/test_loops.py does it with `OwnerState`."""
    saving, resumed = Training("muon", rank).run(4), Training("muon", rank)
    saving.state.consolidate()
    saved = copy.deepcopy(get_optimizer_state_dict(saving.model, saving.optimizers[0]))
    set_optimizer_state_dict(resumed.model, resumed.optimizers[0], saved)
    resumed.model.load_state_dict(saving.model.state_dict())
    resumed.steps = saving.steps
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.1
    assert same(resumed.run(2), saving.run(2))


@in_ranks(2)
def test_muon_states_compare_settings_by_value(rank: int) -> None:
    first, second = Training("muon", rank), Training("muon", rank)
    # On a device of its own each rank's tensor prints differently.
    first.optimizer.param_groups[0].update(
        lr=torch.tensor(0.02, requires_grad=bool(rank)), note=object()
    )
    first.run(2)
    second.optimizer.param_groups[0]["weight_decay"] = 0.1 * rank
    assert error_of(second.step).startswith("expected the same settings on all ranks")


@pytest.mark.defect("decoupled-14")
@in_ranks(2, timeout_s=90)
def test_a_failed_owner_fails_other_ranks_before_the_groups_timeout(rank: int) -> None:
    training = owned(make=Acting.of, ddp={"process_group": impatient_group(50)})
    training.backward()
    began_s = time.monotonic()
    failing = act(side_effect=KeyboardInterrupt if rank else None)
    with failing, contextlib.suppress(KeyboardInterrupt, ExchangeError):
        training.optimizer.step()
        if rank == 0:
            training.weights()
    waited_s = time.monotonic() - began_s
    dist.barrier()
    assert waited_s < 40
