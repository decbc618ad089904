"""K-FAC in real ranks: the directions of an independent float64 computation, in every setting."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import tqdm
from torch import Tensor, nn

from crossover_ddp._kfac import settings as kfac_settings
from tests.harness import in_ranks, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess import kfac_training
from tests.multiprocess.compressed_training import digest
from tests.multiprocess.identity_codec import Identity
from tests.multiprocess.kfac_oracle import Oracle, Settings, errors_beside
from tests.multiprocess.kfac_training import LR, OUTPUTS, WIDTH, Training, mlp

TINY_MB, ONE_MB = 0.0015, 25.0
TALL = (WIDTH, 300, 230, OUTPUTS)
STEPS = 4
EXACT, COARSE = 1e-4, 0.05  # float32 and bfloat16 against float64


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 9, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


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
        x = torch.tanh(self.tokens(x)) + self.embedding(torch.arange(x.shape[1]) % 7)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Calls its second layer where its first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.head = nn.Linear(WIDTH, 30), nn.Linear(30, 30), nn.Linear(30, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(hidden)) if x[0, 0] > 0 else hidden)  # type: ignore[no-any-return]


def uneven(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return few samples and many, whose factors travel as columns and as triangles; rank 0 alone has both layers."""
    samples = [(3, 3), (3, 20), (40, 6), (30, 30)][step][rank]
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    inputs[0, 0] = 1 - 2 * rank
    return inputs, torch.randint(0, OUTPUTS, (samples,), generator=generator)


def plain() -> nn.Module:
    """Return a network without a norm, which bfloat16 would blur."""
    torch.manual_seed(3)
    convolutions = nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2), nn.Tanh()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 5))


def compiled(model: nn.Module) -> nn.Module:
    tqdm.tqdm.monitor_interval = 0  # torch.compile shows its progress by it; no thread shall be left behind
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def channels_last(rank: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(rank, step)
    return inputs.contiguous(memory_format=torch.channels_last), targets


@dataclass(frozen=True)
class Case:
    """What is trained and how."""

    settings: Settings = field(default_factory=Settings)
    network: Callable[[], nn.Module] = Everything
    data: Callable[[int, int], tuple[Tensor, Tensor]] = batch  # of a rank and a step
    cap_mb: float = TINY_MB  # of DDP's buckets
    ddp: Mapping[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = (2,)  # if not in the campaign
    wrap: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model  # makes what is called
    codec: Any = None
    rates: tuple[float, float] = (LR, LR)  # of weights and of biases; two optimizers, if they differ
    is_spread: bool = False  # whether its second layer is
    tolerance: float = EXACT  # of the greatest error of a layer, relative to its greatest element


def dominated(*hidden: int, settings: Mapping[str, Any] | None = None, **options: Any) -> Case:
    """Return a case of a layer that costs more than all others."""
    seldom = {"factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": 1e-4, **(settings or {})}
    options = {"data": kfac_training.batch, "cap_mb": 0.1, "is_spread": True, **options}
    return Case(Settings(**seldom), lambda: mlp(WIDTH, *hidden, OUTPUTS), **options)


SEVERAL = (1, 2, 4)
CASES: dict[str, Case] = {
    "inverse": Case(worlds=SEVERAL),
    "channels last, one bucket": Case(
        network=lambda: Everything().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        data=channels_last,
        cap_mb=ONE_MB,
    ),
    "eigen": Case(Settings(solver="eigen"), worlds=(1, 2)),
    "seldom": Case(Settings(factor_update_steps=2, inv_update_steps=3), worlds=(1, 2)),
    "local": Case(Settings(factors="local"), worlds=(2, 4)),
    "reduce": Case(Settings(weight_sharing="reduce")),
    # The first two steps travel exact.
    "identity codec": Case(codec=Identity(), worlds=(2, 3)),
    "rates": Case(rates=(LR, 30 * LR)),
    "uneven": Case(network=Branches, data=uneven, ddp={"find_unused_parameters": True}),
    "wide and spread": dominated(230, 300),
    "tall and spread": dominated(300, 230, worlds=(3,)),
    "spread without a clip": dominated(230, 300, settings={"kl_clip": None}),
    "spread of local factors": dominated(230, 300, settings={"factors": "local"}),
    "spread of rates": dominated(230, 300, rates=(LR, 30 * LR)),
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
    """Calls the model as a case says."""

    def __init__(self, rank: int, case: Case) -> None:
        ddp = {**case.ddp, "bucket_cap_mb": case.cap_mb}
        self.case = case
        optimizers = self.two_optimizers if case.rates != (LR, LR) else None
        options = {**asdict(case.settings), "codec": case.codec}
        super().__init__(rank, case.network(), data=case.data, ddp=ddp, optimizers=optimizers, **options)
        self.called = case.wrap(self.model)

    def two_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([each for name, each in model.named_parameters() if self.rate_of(name) == lr], lr)
            for lr in self.case.rates
        ]

    def rate_of(self, name: str) -> float:
        return self.case.rates[name.endswith("bias")]

    def loss(self, part: int = 0, parts: int = 1) -> Tensor:
        inputs, targets = self.data(self.rank, self.steps)
        return F.cross_entropy(self.called(inputs).float(), targets)


@pytest.mark.defect("kfac-S6")
@pytest.mark.parametrize(("name", "world_size"), CELLS)
@in_ranks()
def test_gradients_are_those_of_an_independent_computation(rank: int, world_size: int, name: str) -> str:
    case = CASES[name]
    training = Called(rank, case)
    oracle = Oracle(case.settings, training.rate_of, training.kfac.owners)
    assert max(errors_beside(oracle, training, STEPS, world_size)) < case.tolerance
    assert training.spread() == ["2"] * case.is_spread
    assert (oracle.least_scale < 1) == (case.settings.kl_clip is not None), "the clip is to be seen at work"
    training.close()
    return digest([training.parameters()])


@in_ranks(2)
def test_nothing_is_spread_in_an_eigenbasis_or_by_ranks_that_round_differently(rank: int) -> None:
    tall = functools.partial(Training, rank, ddp={"bucket_cap_mb": ONE_MB}, inv_update_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kfac_settings, "rounding", lambda shapes, device: f"of rank {rank}")
        trainings = [tall(mlp(*TALL))]
    trainings.append(tall(mlp(*TALL), solver="eigen"))
    assert [each.run(2).spread() for each in trainings] == [[], []]


# Solvers are last made at step 4, of the factors of step 4; the next are due at steps 8 and 6.
SAVED_AFTER, SAVED = 6, Settings(factor_update_steps=2, inv_update_steps=4, kl_clip=1e-4)


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
    assert oracle.least_scale < 1, "the clip is to be seen at work"


@pytest.mark.parametrize(("widths", "world_size"), [((WIDTH, 8, 8, 8, OUTPUTS), 4), (TALL, 1)], ids=str)
def test_four_ranks_or_one_go_on_with_the_factors_of_two(widths: tuple[int, ...], world_size: int) -> None:
    """Two go on to the last bit: test_checkpoint.py."""
    _, saved = run_ranks(save, 2, args=(widths,))  # any rank can save it
    run_ranks(resume, world_size, args=(widths, saved))
