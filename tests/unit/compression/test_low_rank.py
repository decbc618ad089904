"""`PowerSGD`: which parameters it codes, and one bucket's messages, with all ranks in one process."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossover_ddp import DecoupledState, KFACState, MuonState, UnsupportedConfigurationError
from crossover_ddp._compression.coded_link import parts_of
from crossover_ddp._compression.low_rank import LowRankLink, Shape, shape_of
from crossover_ddp._compression.planning import cost_of
from crossover_ddp._ddp.layout import spans_of
from crossover_ddp._engine.buckets import Run
from crossover_ddp.codecs import CompressedState, Int8, PerPair, PowerSGD
from tests.unit.compression.test_coded_link import InOneProcess

# Two matrices of one shape, a bias between them, a kernel, and a matrix that is too small.
SHAPES = [(40, 30), (50,), (40, 30), (12, 5, 3), (2, 3)]
NUMELS = [math.prod(shape) for shape in SHAPES]
SPANS = spans_of(tuple(NUMELS))
MATRICES = {0: (40, 30), 2: (40, 30), 3: (12, 15)}
EXACT = [1, 4]


class Ranks:
    """All ranks of one bucket."""

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        by_collectives: bool = False,
        leaves_unused: bool = False,
    ) -> None:
        self.size, self.by_collectives = world_size, by_collectives
        parameters = [torch.empty(shape, device="meta") for shape in SHAPES]
        runs = [Run(p, 0, span) for p, span in zip(parameters, SPANS, strict=True)]
        [content] = parts_of(runs, [sum(NUMELS)])
        self.coded = [
            LowRankLink(
                link,
                PowerSGD(),
                parameters,
                content,
                torch.device(device),
                leaves_unused=leaves_unused,
            )
            for link in self._links()
        ]

    def _links(self) -> list[Any]:
        mail: Any = defaultdict(lambda: asyncio.get_running_loop().create_future())
        return [
            InOneProcess(rank, self.size, mail, self.by_collectives) for rank in range(self.size)
        ]

    def step(self, flats: Sequence[Tensor]) -> None:
        """Replace each rank's gradient by the mean."""

        async def journey(rank: int, link: Any) -> None:
            self.coded[rank].encode(flats[rank], link)
            await self.coded[rank].all_reduce(flats[rank], [])

        async def run() -> None:
            journeys = (journey(rank, link) for rank, link in enumerate(self._links()))
            await asyncio.wait_for(asyncio.gather(*journeys), 60)

        asyncio.run(run())

    def residuals(self) -> list[Tensor]:
        """Return each rank's residuals, as long as a gradient."""
        found = []
        for coded in self.coded:
            kept = {id(parameter): residual.cpu() for parameter, residual in coded.residuals()}
            empty = zip(coded.parameters, map(torch.zeros, NUMELS), strict=True)
            found.append(torch.cat([kept.get(id(parameter), zeros) for parameter, zeros in empty]))
        return found


def gradients(world_size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(sum(NUMELS), generator=generator).to(dtype) for _ in range(world_size)]


def piece(flat: Tensor, index: int) -> Tensor:
    return flat[slice(*SPANS[index])].view(SHAPES[index])


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (torch.empty(40, 30), Shape(40, 30, 2)),
        (torch.empty(40, 3, 5, 5), Shape(40, 75, 2)),
        (torch.empty(40, 8, 3, 3).to(memory_format=torch.channels_last), Shape(40, 72, 2)),
        (torch.empty(40, 30).t(), Shape(40, 30, 2)),
        (torch.empty(30, 40), Shape(30, 40, 2)),
        (torch.empty(5, 4), Shape(5, 4, 2)),
        (torch.empty(4, 4), None),
        (torch.empty(1, 900), None),
        (torch.empty(900), None),
        (torch.empty(()), None),
        (torch.empty(0, 9), None),
        (torch.empty(40, 30, dtype=torch.complex64), None),
    ],
)
def test_a_parameter_is_a_matrix_as_it_lies_in_memory_if_factors_are_smaller(
    parameter: Tensor, expected: Shape | None
) -> None:
    assert shape_of(parameter, 2) == expected


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_a_rank_that_is_no_positive_integer_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match=f"expected rank >= 1, got rank={rank}; 2 is the default"):
        PowerSGD(rank)


@pytest.mark.usefixtures("process_group")
def test_states_that_work_between_the_halves_refuse_it() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))])
    muon = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    codec: Any = PowerSGD(4)
    made = (
        lambda: DecoupledState(sgd, codec=codec),
        lambda: KFACState(nn.Linear(2, 2), sgd, kl_clip=None, codec=codec),
        lambda: MuonState(muon, codec=codec),
    )
    for make in made:
        with pytest.raises(UnsupportedConfigurationError, match=r"got codec=PowerSGD\(rank=4\)"):
            make()


@pytest.mark.usefixtures("process_group")
def test_it_is_no_half_of_an_exchange_and_has_no_known_rate() -> None:
    for pair in ((PowerSGD(), Int8()), (Int8(), PowerSGD()), (PerPair(((PowerSGD(),),)), Int8())):
        with pytest.raises(
            TypeError, match=r"expected a codec such as Int8.*PowerSGD\(\) suits CompressedState"
        ):
            CompressedState(pair)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedConfigurationError, match="got PowerSGD"):
        cost_of(PowerSGD(), 2)


def average(addends: Sequence[Tensor]) -> Tensor:
    """Return the mean, added as ((0 + 1) + 2)."""
    total = addends[0].clone()
    for each in addends[1:]:
        total += each
    return total / len(addends)


def orthogonal(transposed: Tensor) -> Tensor:
    return torch.linalg.qr(transposed.mT).Q.mT


class Oracle:
    """PowerSGD by the formulas of the paper, in one place."""

    def __init__(self, world_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        # Matrices of one shape draw together.
        alike, other = (
            torch.randn(count, 2, columns, generator=generator)
            for count, columns in ((2, 30), (1, 15))
        )
        self.known = {0: alike[:1], 2: alike[1:], 3: other}
        self.rests = [
            {index: torch.zeros(1, *shape) for index, shape in MATRICES.items()}
            for _ in range(world_size)
        ]

    def step(self, flats: Sequence[Tensor]) -> Tensor:
        mean = torch.empty_like(flats[0])
        for index in EXACT:
            piece(mean, index).copy_(average([piece(flat, index) for flat in flats]))
        for index, shape in MATRICES.items():
            sums = [
                piece(flat, index).view(1, *shape) + rest[index]
                for flat, rest in zip(flats, self.rests, strict=True)
            ]
            known = orthogonal(self.known[index])
            left = orthogonal(average([torch.bmm(known, each.mT) for each in sums]))
            right = average([torch.bmm(left, each) for each in sums])
            self.known[index] = right
            product = torch.mm(left[0].mT, right[0])[None]
            piece(mean, index).copy_(product.view(SHAPES[index]))
            for rest, each in zip(self.rests, sums, strict=True):
                rest[index] = each - product
        return mean


@pytest.mark.parametrize("by_collectives", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_apply_the_bits_of_the_papers_formulas(
    world_size: int, by_collectives: bool
) -> None:
    ranks, oracle = Ranks(world_size, by_collectives=by_collectives), Oracle(world_size)
    for step in range(4):
        flats = gradients(world_size, step)
        expected = oracle.step(flats)
        ranks.step(flats)
        assert all(torch.equal(flat, expected) for flat in flats)
    for residual, rest in zip(ranks.residuals(), oracle.rests, strict=True):
        for index in MATRICES:
            assert torch.equal(piece(residual, index), rest[index].view(SHAPES[index]))


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_applied_means_and_residuals_add_up_to_all_gradients(
    world_size: int, dtype: torch.dtype, unused: bool
) -> None:
    """Also where one rank does not use a matrix, and where no rank does: then none gets a residual."""
    ranks = Ranks(world_size, leaves_unused=unused)
    missing = torch.zeros(sum(NUMELS), dtype=torch.float64)
    for step in range(6):
        flats = gradients(world_size, step, dtype)
        for flat in flats if unused and step == 3 else flats[:1]:
            piece(flat, 2).zero_()
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        assert bool(piece(flats[0], 2).any()) is not (unused and step == 3)
        missing -= flats[0]
    kept = ranks.residuals()
    assert all(bool(piece(each, index).any()) for each in kept for index in MATRICES)
    missing -= torch.stack(kept).double().mean(0)
    coded = torch.cat([piece(missing, index).flatten() for index in MATRICES])
    assert float(coded.abs().max()) < 1e-5
    rounding = 1e-6 if dtype == torch.float32 else 0.05  # exact means are rounded to the dtype
    assert float(missing.abs().max()) < rounding


def test_means_beyond_half_precision_are_clamped_and_the_excess_is_sent_later() -> None:
    """Residuals are added to gradients that are nearly as large as float16 allows."""
    ranks = Ranks(2)
    missing = torch.zeros(sum(NUMELS), dtype=torch.float64)
    limit = torch.finfo(torch.float16).max
    has_clamped = False
    for step in range(6):
        flats = [(flat.clamp(-1, 1) * 0.99 * limit).half() for flat in gradients(2, step)]
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        has_clamped |= float(piece(flats[0], 0).abs().max()) == limit
        assert bool(flats[0].isfinite().all())
        missing -= flats[0]
    assert has_clamped
    missing -= torch.stack(ranks.residuals()).double().mean(0)
    assert float(piece(missing, 0).abs().max()) < 1e-5 * limit


def test_the_mean_of_a_matrix_of_a_low_rank_is_exact() -> None:
    """The matrices have rank 1, so one of the codec's two columns is not needed."""
    ranks = Ranks(3)
    for step in range(3):
        flats = gradients(3, step)
        generator = torch.Generator().manual_seed(step)
        for index, (rows, columns) in MATRICES.items():
            factor = torch.randn(rows, 1, generator=generator)
            for flat in flats:
                row = torch.randn(1, columns, generator=generator)
                piece(flat, index).copy_((factor @ row).view(SHAPES[index]))
        expected = torch.stack(flats).mean(0)
        ranks.step(flats)
        torch.testing.assert_close(flats[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_matrix_that_is_not_finite_is_nan_on_all_ranks_and_leaves_no_trace(
    world_size: int, bad: float
) -> None:
    """Neither residuals nor Q change: the next steps are as if this one had not been."""
    ranks, others = Ranks(world_size), Ranks(world_size)
    for each in (ranks, others):
        each.step(gradients(world_size, 0))
    before = ranks.residuals()
    flats = [torch.zeros_like(flat) for flat in gradients(world_size, 1)]
    flats[1][10] = bad
    ranks.step(flats)
    for flat in flats:
        assert bool(piece(flat, 0).isnan().all())
        assert not bool(piece(flat, 2).isnan().any())
    for kept, former in zip(ranks.residuals(), before, strict=True):
        assert torch.equal(piece(kept, 0), piece(former, 0))
    for step in range(2, 4):
        found, expected = gradients(world_size, step), gradients(world_size, step)
        ranks.step(found)
        others.step(expected)
        assert torch.equal(piece(found[0], 0), piece(expected[0], 0))
        assert bool(found[0].isfinite().all())


def test_values_that_travel_exactly_are_not_finite_by_themselves() -> None:
    ranks = Ranks(2)
    flats = gradients(2, 0)
    piece(flats[1], 1)[7] = math.nan
    ranks.step(flats)
    for flat in flats:
        assert int(flat.isnan().sum()) == 1
        assert bool(piece(flat, 1)[7].isnan())


def test_gradients_of_zeros_do_not_stop_later_ones() -> None:
    """A Q of zeros would make all later products zero."""
    ranks, others = Ranks(2), Ranks(2)
    zeros = [torch.zeros(sum(NUMELS)) for _ in range(2)]
    ranks.step(zeros)
    assert not zeros[0].any()
    found, expected = gradients(2, 0), gradients(2, 0)
    ranks.step(found)
    others.step(expected)
    torch.testing.assert_close(found[0], expected[0])


def test_residuals_follow_the_scale_of_the_loss() -> None:
    """Gradients as small or large as a GradScaler makes them lose no digit."""
    for scale in (2.0**-60, 2.0**16):
        ranks, others = Ranks(3), Ranks(3)
        for step in range(3):
            found, expected = gradients(3, step), gradients(3, step)
            if step == 1:
                for coded in ranks.coded:
                    coded.scale(scale)
            if step:
                found = [flat * scale for flat in found]
            ranks.step(found)
            others.step(expected)
            factor = scale if step else 1.0
            torch.testing.assert_close(found[0] / factor, expected[0], rtol=1e-3, atol=1e-4)


def test_a_rank_sends_both_factors_and_the_exact_values() -> None:
    """With more than two ranks twice as much as one shard for each other rank."""
    factors = 2 * (2 * (40 + 30) + 12 + 15)
    exact = 50 + 6
    (two, _), (three, *_) = Ranks(2).coded, Ranks(3).coded
    assert two.sent_bytes() == 4 * (factors + exact)
    left, right = 2 * (2 * 40 + 12) + exact, 2 * (2 * 30 + 15)
    shards = [math.ceil(numel / 3 / 32) * 32 for numel in (left, right)]
    assert three.sent_bytes() == 4 * 2 * 2 * sum(shards)
    assert two.nbytes == 4 * (2 * 40 * 30 + 12 * 15)
