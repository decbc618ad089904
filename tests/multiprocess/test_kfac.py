"""K-FAC in real ranks, compared with an independent computation."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tqdm
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from crossover_ddp import KFACState
from crossover_ddp._kfac import settings as kfac_settings
from crossover_ddp._kfac.curvature import DampedInverse, Eigenbasis
from crossover_ddp._kfac.factors import FactorTraffic
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp.codecs import Int8
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks, networks, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.oracles import heard
from tests.harness.turn import RecordingTurn
from tests.multiprocess import kfac_training
from tests.multiprocess.compressed_training import digest
from tests.multiprocess.identity_codec import Identity
from tests.multiprocess.kfac_oracle import Oracle, Settings, errors_beside
from tests.multiprocess.kfac_training import LR, OUTPUTS, WIDTH, Training, mlp, same

TINY_MB, ONE_MB = 0.0015, 25.0
TALL = (WIDTH, 300, 230, OUTPUTS)
STEPS = 4
# Relative errors against float64: of float32, of a float32 that travelled in 16 bits, of bfloat16.
EXACT = 1e-4
FINE = 1e-3
COARSE = 0.05


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 9, 8, generator=generator), torch.randint(
        0, 5, (6,), generator=generator
    )


class Everything(nn.Module):
    """Every kind of layer that is preconditioned, and some that pass through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 3)
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 4, (3, 2), groups=2, bias=False)
        self.spread = nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.point = nn.Conv2d(6, 3, 1, bias=False)
        self.tokens = nn.Linear(3, 3, bias=False)
        self.twice = nn.Linear(3, 3)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = self.depthwise(torch.tanh(self.spread(torch.tanh(self.grouped(x)))))
        x = self.point(torch.tanh(x)).flatten(2).mT
        x = torch.tanh(self.tokens(x)) + self.embedding(
            torch.arange(x.shape[1], device=x.device) % 7
        )
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Calls its second layer only if the first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, 30)
        self.second = nn.Linear(30, 30)
        self.head = nn.Linear(30, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if x[0, 0] > 0:
            hidden = torch.tanh(self.second(hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A layer of float64, then a layer of float32 that all ranks precondition together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(WIDTH, 300, dtype=torch.float64)
        self.others = mlp(300, 230, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.double()))
        return self.others(hidden.to(self.others[0].weight.dtype))  # type: ignore[no-any-return]


def uneven(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return few samples or many: factors travel as columns or as triangles.

    Only rank 0 calls both layers of `Branches`.
    """
    samples = [(3, 3), (3, 20), (40, 6), (30, 30)][step][rank]
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    inputs[0, 0] = 1 - 2 * rank
    return inputs, torch.randint(0, OUTPUTS, (samples,), generator=generator)


def plain() -> nn.Module:
    torch.manual_seed(3)
    convolutions = nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2), nn.Tanh()
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 5)
    )


def compiled(model: nn.Module) -> nn.Module:
    # torch.compile shows a progress bar, whose thread would stay.
    tqdm.tqdm.monitor_interval = 0
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def everything_channels_last() -> nn.Module:
    network: Any = Everything()
    return network.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def channels_last(rank: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(rank, step)
    return inputs.contiguous(memory_format=torch.channels_last), targets


@dataclass(frozen=True)
class Case:
    settings: Settings = field(default_factory=Settings)
    network: Callable[[], nn.Module] = Everything
    # Returns inputs and targets by rank and step.
    data: Callable[[int, int], tuple[Tensor, Tensor]] = batch
    # The size of DDP's buckets.
    cap_mb: float = TINY_MB
    ddp: Mapping[str, Any] = field(default_factory=dict)
    # Numbers of ranks, outside of the campaign.
    worlds: tuple[int, ...] = (2,)
    # Returns the callable that a step calls instead of the DDP model.
    wrap: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model
    codec: Any = None
    # Learning rates of weights and of biases. If they differ, each has an optimizer of its own.
    rates: tuple[float, float] = (LR, LR)
    # The name of the layer that is spread, if any.
    spread: str = ""
    # The largest error of a layer, relative to its largest element.
    tolerance: float = EXACT


def dominated(*hidden: int, settings: Mapping[str, Any] | None = None, **options: Any) -> Case:
    """Return a case with a layer that fills most of its bucket, and is spread."""
    seldom = {"factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": 1e-4, **(settings or {})}
    options = {"data": kfac_training.batch, "cap_mb": 0.1, "spread": "2", **options}
    options.setdefault("network", lambda: mlp(WIDTH, *hidden, OUTPUTS))
    return Case(Settings(**seldom), **options)


SEVERAL = (1, 2, 4)
CASES: dict[str, Case] = {
    "inverse": Case(worlds=SEVERAL),
    "channels last, one bucket": Case(
        network=everything_channels_last,
        data=channels_last,
        cap_mb=ONE_MB,
    ),
    "eigen": Case(Settings(solver="eigen"), worlds=(1, 2)),
    "seldom": Case(Settings(factor_update_steps=2, inv_update_steps=3), worlds=(1, 2)),
    "local": Case(Settings(factors="local"), worlds=(2, 4)),
    "reduce": Case(Settings(weight_sharing="reduce")),
    # The first two steps travel exact.
    "identity codec": Case(codec=Identity(), worlds=(2, 3)),
    # With a scale for each element. The errors of a scale for each block would grow in the solvers.
    "int8 codec": Case(Settings(kl_clip=None), codec=Int8(1), tolerance=FINE),
    "rates": Case(rates=(LR, 30 * LR)),
    "uneven": Case(network=Branches, data=uneven, ddp={"find_unused_parameters": True}),
    "wide and spread": dominated(230, 300),
    "tall and spread": dominated(300, 230, worlds=(3,)),
    "spread without a clip": dominated(230, 300, settings={"kl_clip": None}),
    "spread of local factors": dominated(230, 300, settings={"factors": "local"}),
    "spread of rates": dominated(230, 300, rates=(LR, 30 * LR)),
    "spread, another_dtype": dominated(network=Mixed, spread="others.0"),
    "autocast": Case(network=plain, wrap=torch.autocast("cpu", torch.bfloat16), tolerance=COARSE),
    "compiled": Case(
        Settings(factor_update_steps=2, inv_update_steps=3), plain, wrap=compiled, cap_mb=ONE_MB
    ),
}
CELLS = [
    (name, world_size)
    for name, case in CASES.items()
    for world_size in (SEVERAL if IN_CAMPAIGN and case.data is batch else case.worlds)
]


class Called(Training):
    def __init__(self, rank: int, case: Case, **given: Any) -> None:
        ddp = {**case.ddp, "bucket_cap_mb": case.cap_mb}
        self.case = case
        optimizers = self.two_optimizers if case.rates != (LR, LR) else None
        options = {**asdict(case.settings), "codec": case.codec, **given}
        super().__init__(
            rank, case.network(), data=case.data, ddp=ddp, optimizers=optimizers, **options
        )
        self.called = case.wrap(self.model)

    def two_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(
                [each for name, each in model.named_parameters() if self.rate_of(name) == lr], lr
            )
            for lr in self.case.rates
        ]

    def rate_of(self, name: str) -> float:
        return self.case.rates[name.endswith("bias")]

    def loss(self, part: int = 0, parts: int = 1) -> Tensor:
        inputs, targets = (each.to(self.device) for each in self.data(self.rank, self.steps))
        return F.cross_entropy(self.called(inputs).float(), targets)


@pytest.mark.defect("kfac-S6")
@pytest.mark.parametrize(("name", "world_size"), CELLS)
@in_ranks()
def test_gradients_are_those_of_an_independent_computation(
    rank: int, world_size: int, name: str
) -> str:
    case = CASES[name]
    training = Called(rank, case)
    oracle = Oracle(case.settings, training.rate_of, training.kfac.owners)
    assert max(errors_beside(oracle, training, STEPS, world_size)) < case.tolerance
    assert training.spread() == [case.spread] * bool(case.spread)
    assert (oracle.least_scale < 1) == (case.settings.kl_clip is not None), "the clip must act"
    training.close()
    return digest([training.parameters()])


# The micro-batches of rank 1. Rank 0 has one.
PARTS = {"3+3+2": (3, 3, 2), "8+0": (8, 0), "0+1+7": (0, 1, 7)}


def factors_of_parts(
    rank: int,
    sizes: Sequence[int],
    data: Callable[[int, int], tuple[Tensor, Tensor]],
    **options: Any,
) -> list[Tensor]:
    """Accumulate one step over micro-batches of these sizes. Return all directions and factors."""
    training = Training(rank, data=data, factor_decay=0.0, **options)
    parts = [each.split(list(sizes)) for each in training.data(rank, 0)]
    for number, (inputs, targets) in enumerate(zip(*parts, strict=True)):
        with contextlib.nullcontext() if number == len(sizes) - 1 else training.model.no_sync():
            total = F.cross_entropy(training.model(inputs), targets, reduction="sum")
            (total / kfac_training.SAMPLES).backward()
    found = [*training.gradients().values()]
    training.update()
    layers = training.kfac.state_dict()["layers"]
    training.close()
    return [*found, *[each[name] for each in layers.values() for name in ("a", "g")]]


@pytest.mark.parametrize(
    ("parts", "decoupled"), [*((each, False) for each in PARTS), ("3+3+2", True)]
)
@in_ranks(2)
def test_factors_do_not_depend_on_how_a_rank_cuts_its_batch_into_micro_batches(
    rank: int, parts: str, decoupled: bool
) -> None:
    size = kfac_training.SAMPLES
    whole = factors_of_parts(rank, (size,), kfac_training.batch)
    found = factors_of_parts(
        rank, PARTS[parts] if rank else (size,), kfac_training.batch, decoupled=decoupled
    )
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@in_ranks(2)
def test_a_rank_whose_whole_step_is_empty_does_not_change_the_factors(rank: int) -> None:
    def empty(rank: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = kfac_training.batch(0, step)
        return (inputs[:0], targets[:0]) if rank else (inputs, targets)

    size = kfac_training.SAMPLES
    alike = factors_of_parts(rank, (size,), lambda rank, step: kfac_training.batch(0, step))
    found = factors_of_parts(rank, (0,) if rank else (size,), empty)
    gradients = len(alike) // 2
    torch.testing.assert_close(found[gradients:], alike[gradients:])


@in_ranks(2)
def test_no_layer_is_spread_in_an_eigenbasis_or_if_ranks_round_differently(rank: int) -> None:
    tall = functools.partial(Training, rank, ddp={"bucket_cap_mb": ONE_MB}, inv_update_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kfac_settings, "rounding", lambda shapes, device: f"digest of rank {rank}")
        trainings = [tall(mlp(*TALL))]
    trainings.append(tall(mlp(*TALL), solver="eigen"))
    assert [each.run(2).spread() for each in trainings] == [[], []]


# When the state is saved, the newest solvers and factors are those of step 4. New factors are due
# at step 6, new solvers at step 8.
SAVED_AFTER = 6
SAVED = Settings(factor_update_steps=2, inv_update_steps=4, kl_clip=1e-4)


def save(rank: int, world_size: int, widths: tuple[int, ...]) -> dict[str, Any]:
    training = Training(rank, mlp(*widths), **asdict(SAVED))
    saved = training.run(SAVED_AFTER).save()
    assert bool(training.spread()) == (widths == TALL)
    return saved


def resume(rank: int, world_size: int, widths: tuple[int, ...], saved: dict[str, Any]) -> None:
    training = Training(rank, mlp(*widths), **asdict(SAVED))
    training.load(saved)
    layers = saved["state"]["layers"]
    running = {name: [each["a"].double(), each["g"].double()] for name, each in layers.items()}
    oracle = Oracle(SAVED, LR, running=running, frozen=dict(running), steps=SAVED_AFTER)
    assert max(errors_beside(oracle, training, 8, world_size)) < EXACT
    assert oracle.least_scale < 1, "the clip must act"


@pytest.mark.parametrize(
    ("widths", "world_size"), [((WIDTH, 8, 8, 8, OUTPUTS), 4), (TALL, 1)], ids=str
)
def test_four_ranks_or_one_resume_from_the_state_of_two(
    widths: tuple[int, ...], world_size: int
) -> None:
    """Two ranks resume to the last bit: see test_checkpoint.py."""
    # Any rank can save the state: here the last one.
    _, saved = run_ranks(save, 2, args=(widths,))
    run_ranks(resume, world_size, args=(widths, saved))


OPTIONS: dict[str, Any] = {"damping": 0.03, "kl_clip": 1e-4}
LATE: dict[str, Any] = {**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8}


WIDTHS = (WIDTH, 7, 9, 11, 13, OUTPUTS)  # no two layers alike
SIZES = [(inputs + 1, outputs) for inputs, outputs in itertools.pairwise(WIDTHS)]


@pytest.mark.parametrize(
    ("solver", "kind", "world_size"), [("inverse", DampedInverse, 4), ("eigen", Eigenbasis, 2)]
)
@in_ranks()
def test_each_rank_makes_and_keeps_solvers_of_its_own_layers_only(
    rank: int, solver: str, kind: Any
) -> list[int]:
    compute = kind.compute
    made: list[list[tuple[int, int]]] = []  # sizes of factors, by step

    def counted(a: Tensor, g: Tensor, *arguments: Any, **options: Any) -> Any:
        made[-1].append((a.shape[-1], g.shape[-1]))
        return compute(a, g, *arguments, **options)

    training = Training(rank, mlp(*WIDTHS), solver=solver, inv_update_steps=3)
    owners = [*training.kfac.owners.values()]
    own = [size for size, owner in zip(SIZES, owners, strict=True) if owner == rank]
    assert own, "more layers than ranks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "compute", staticmethod(counted))
        for step in range(7):
            made.append([])
            training.step()
            assert sorted(made[-1]) == (sorted(own) if step % 3 == 0 else [])
    memory = training.kfac.memory_usage()
    factors = 4 * sum(a**2 + g**2 for a, g in own)
    # The eigenvalues of both factors, and the damping.
    eigenvalues = 4 * sum(a + g + 1 for a, g in own) if solver == "eigen" else 0
    assert (memory["factors"], memory["solvers"]) == (factors, factors + eigenvalues)
    return owners


@in_ranks(2)
def test_a_step_that_shares_solvers_requests_its_turn_once(rank: int) -> None:
    turn = RecordingTurn()
    training = Training(rank, mlp(WIDTH, 300, 230, OUTPUTS), ddp={"bucket_cap_mb": 25}, mutex=turn)
    training.run(2)
    assert training.spread()
    assert turn.order == ["release", "request", "acquire"] * 2


@in_ranks(2)
def test_the_state_of_a_wider_layer_is_refused_and_changes_nothing(rank: int) -> None:
    wider = Training(rank, mlp(WIDTH, 8, 8, OUTPUTS + 1)).run(2)
    training = Training(rank, mlp(WIDTH, 8, 8, OUTPUTS)).run(2)
    saved = wider.kfac.state_dict()
    before = copy.deepcopy(training.kfac.state_dict())
    message = r"expected a factor of shape \(1, 5, 5\) for layer '4', got \(1, 6, 6\)"
    with pytest.raises(ValueError, match=message):
        training.kfac.load_state_dict(saved)
    after = training.kfac.state_dict()
    assert after["steps"] == 2
    assert all(map(torch.equal, tensors_in(after["layers"]), tensors_in(before["layers"])))
    training.run(2)


LATE_STEPS = 18


@in_ranks(3)
def test_late_factors_do_not_change_gradients_and_leave_one_group_a_step(rank: int) -> None:
    """The gradients are compared with those of factors that travel just before the buckets."""
    counts: list[int] = []
    leave = FactorTraffic.leave

    def count(traffic: FactorTraffic, after: Any = None, *, all_groups: bool = False) -> None:
        before = sum(map(len, traffic.late))
        leave(traffic, after, all_groups=all_groups)
        counts.append(before - sum(map(len, traffic.late)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "leave", count)
        late = Training(rank, **LATE).trained(LATE_STEPS)
        in_late = counts.copy()
        patch.setattr(FactorTraffic, "can_trail", False)
        assert same(late, Training(rank, **LATE).trained(LATE_STEPS))
        assert not any(counts[len(in_late) :])
    # Counted before each step. The factors of four layers are taken in steps 4 and 12. One layer's
    # leave after each step, so all have left before steps 8 and 16.
    assert in_late == [0] * 5 + [2] * 4 + [0] * 4 + [2] * 4 + [0] * 2


@in_ranks(2)
def test_after_close_no_late_factors_leave(rank: int) -> None:
    made = Training(rank, **LATE).run(5)
    assert made.kfac.memory_usage()["buffers"] > 0
    made.kfac.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "send", None)
        made.run(4)


DEFERRED_STEPS = 12
NOT_SETTLED = 2  # backward passes before DDP's buckets stay as they are


def both(rank: int, *widths: int, **options: Any) -> tuple[Training, Training]:
    """Return trainings with `decoupled_hook` and with `kfac_hook`."""
    widths = widths or (WIDTH, 8, 8, 8, OUTPUTS)
    deferred = Training(rank, mlp(*widths), decoupled=True, **options)
    plain = Training(rank, mlp(*widths), decoupled=False, **options)
    return deferred, plain


@pytest.mark.parametrize(
    ("world_size", "widths", "options"),
    [
        (1, (), OPTIONS),
        (2, (), OPTIONS),
        (2, (), LATE | {"kl_clip": None, "solver": "eigen", "factors": "local"}),
        (2, (WIDTH, 300, 230, OUTPUTS), LATE | {"ddp": {"bucket_cap_mb": 0.1}}),
        (4, (), LATE | {"ddp": {"gradient_as_bucket_view": True}}),
    ],
    ids=["alone", "riding", "local", "spread", "late"],
)
@in_ranks()
def test_decoupled_kfac_trains_as_kfac_hook_does_to_the_last_bit(
    rank: int, widths: tuple[int, ...], options: dict[str, Any]
) -> None:
    ours, plain = both(rank, *widths, **options)
    deferred = 0
    for _ in range(DEFERRED_STEPS):
        assert ours.step() == plain.step()
        deferred += bool(ours.state.stats()["deferred"])
    assert torch.equal(ours.parameters(), plain.parameters())
    assert deferred == DEFERRED_STEPS - NOT_SETTLED


@in_ranks(2)
def test_decoupled_kfac_equals_kfac_hook_in_loops_that_accumulate_clip_skip_flush_and_close(
    rank: int,
) -> None:
    ours, plain = both(rank, **LATE)
    free = Training(rank, **{**LATE, "kl_clip": None}).run(4)

    def both_do(*acts: Callable[[Training], object]) -> None:
        for act in acts:
            for each in (ours, plain):
                act(each)

    def equal() -> bool:
        return torch.equal(ours.parameters(), plain.parameters())

    both_do(lambda each: each.run(4))
    assert ours.state.stats()["deferred"]
    assert float((ours.parameters() - free.parameters()).abs().max()) > 1e-3, "clipped"
    both_do(*[lambda each: each.backward(parts=2), Training.update] * 2)
    assert equal(), "accumulated"
    both_do(Training.backward, Training.step)
    assert equal(), "a step was not taken"
    both_do(Training.backward)
    ours.state.flush()
    assert same([ours.gradients()], [plain.gradients()]), "flushed"
    both_do(Training.update, Training.step)
    assert equal(), "stepped after flush"
    for _ in range(2):
        both_do(Training.backward)
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        assert norm > 0.01
        torch.testing.assert_close(ours.state.clip_grad_norm_(0.01), norm)
        both_do(Training.update)
    # A norm may differ in the last bit.
    torch.testing.assert_close(ours.parameters(), plain.parameters(), rtol=1e-5, atol=1e-6)
    ours.state.close()
    both_do(lambda each: each.run(2))
    torch.testing.assert_close(ours.parameters(), plain.parameters(), rtol=1e-5, atol=1e-6)


@in_ranks(2)
def test_join_with_uneven_inputs_ends_with_the_same_model(rank: int) -> Tensor:
    """With `decoupled_hook`. tests/conformance tests the same with `kfac_hook`."""
    training = Training(rank, decoupled=True, inv_update_steps=2).run(3)
    with Join([training.model]):
        training.run(2 if rank else 4)
    assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
    assert training.kfac.steps == 7
    return training.parameters()


@in_ranks(2)
def test_a_drained_step_leaves_no_residuals(rank: int) -> str:
    """`state_dict` warns of residuals after coded steps, and not after `drain` and one step."""
    seldom = {"factor_update_steps": 100, "inv_update_steps": 100}
    training = Training(
        rank, mlp(WIDTH, 256, 128, OUTPUTS), ddp={"bucket_cap_mb": ONE_MB}, codec=Int8(), **seldom
    )
    training.run(6)
    assert 0.25 < training.kfac.stats()["codec"]["rate"] < 0.29
    warned = []
    for _ in range(3):
        with heard() as messages:
            training.kfac.state_dict()
        warned.append(any("residuals" in each for each in messages))
        if len(warned) == 1:
            training.kfac.drain()
        training.run(1)
    training.close()
    assert warned == [True, False, True]
    return digest([training.parameters()])


DIFFERENT_ARGUMENTS = {"kl_clip": 0.01, "solver": "eigen", "inv_update_steps": 2}
# Hidden layers of rank 1 that differ in a size, and in their number.
DIFFERENT_LAYERS = {"layer '0'": (9,), "layers": (8, 8)}


@pytest.mark.defect("strangers-3")
@in_ranks(3)
def test_layers_arguments_and_states_that_differ_between_ranks_are_refused_by_name(
    rank: int,
) -> None:
    """Otherwise the replicas would drift apart. All ranks raise, though only rank 1 differs."""
    for name in (*DIFFERENT_LAYERS, *DIFFERENT_ARGUMENTS):
        widths = DIFFERENT_LAYERS.get(name, (8,)) if rank == 1 else (8,)
        layers = networks.mlp(WIDTH, *widths, OUTPUTS, seed=1)
        arguments: dict[str, Any] = {}
        if rank == 1 and name in DIFFERENT_ARGUMENTS:
            arguments[name] = DIFFERENT_ARGUMENTS[name]
        with pytest.raises(UnsupportedConfigurationError) as caught:
            KFACState(layers, torch.optim.SGD(layers.parameters(), lr=0.1), **arguments)
        message = str(caught.value)
        assert message.startswith(
            f"expected the same {name} on all ranks, got {name} by rank {{0: "
        )
        assert name in DIFFERENT_LAYERS or f"1: {DIFFERENT_ARGUMENTS[name]!r}" in message
    training = Training(rank, networks.mlp(WIDTH, 8, OUTPUTS, seed=1))
    saved = training.kfac.state_dict()
    if rank == 1:
        training.kfac.load_state_dict({**saved, "steps": 7})
    found = r"the same steps of KFACState on all ranks, got steps of KFACState by rank \{0: 0, 1: 7"
    with pytest.raises(UnsupportedConfigurationError, match=found):
        training.backward()
