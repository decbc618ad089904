"""The messages of one bucket without processes: the ranks are objects that pass each other's bytes on."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from crossover_ddp._compression.choice import CodecChoice, codecs_of
from crossover_ddp._compression.codec import Scratch
from crossover_ddp._compression.coded_link import CodedBucket, Sent, parts_of, runs_of
from crossover_ddp._ddp.contents import Content
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.links import parts
from crossover_ddp.codecs import Codec, Half, Int8, SIDCo

# A large matrix, a bias, and matrices whose last blocks are short.
NUMELS, DIMENSIONS = [40000, 50, 3000, 20, 7], [2, 1, 2, 1, 2]
CPU = torch.device("cpu")
PAIRS: list[tuple[Codec, Codec]] = [
    (Int8(), Int8()),
    (Int8(64), Half()),
    (Half(torch.float16), Int8(100)),
    (Half(), Half()),
]


class Ranks:
    """All ranks of one bucket."""

    def __init__(
        self,
        codec: CodecChoice,
        world_size: int,
        device: torch.device = CPU,
        *,
        by_collectives: bool = False,
        leaves_unused: bool = False,
    ) -> None:
        share = sum(NUMELS) // world_size
        layout = [share] * (world_size - 1) + [sum(NUMELS) - share * (world_size - 1)]
        parameters = [
            torch.empty([numel] + [1] * (dims - 1), device="meta")
            for numel, dims in zip(NUMELS, DIMENSIONS, strict=True)
        ]
        stops = list(accumulate(NUMELS))
        spans = [Span(stop - numel, stop) for numel, stop in zip(NUMELS, stops, strict=True)]
        contents = [Content(each, each, span) for each, span in zip(parameters, spans, strict=True)]
        self.parts = parts_of(layout, runs_of(contents, layout))
        scratch = Scratch()
        self.buckets = [
            CodedBucket(
                codecs_of(codec),
                parameters,
                self.parts,
                rank,
                device,
                by_collectives=by_collectives,
                leaves_unused=leaves_unused,
                scratch=scratch,
            )
            for rank in range(world_size)
        ]

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace each rank's gradient by the mean."""
        for bucket, flat in zip(self.buckets, gradients, strict=True):
            bucket.encode(flat, self.parts)
        for rank, bucket in enumerate(self.buckets):
            for source, other in enumerate(self.buckets):
                parts(*bucket.incoming)[source].copy_(parts(*other.outgoing)[rank])
            bucket.add()
        for bucket in self.buckets:
            for owner, other in enumerate(self.buckets):
                parts(*bucket.gather)[owner].copy_(parts(*other.gather)[owner])
            bucket.unload()

    def kept(self) -> list[torch.Tensor]:
        """Return each rank's residuals, as long as a gradient."""
        found = []
        for bucket in self.buckets:
            kept = {id(parameter): residual.cpu() for parameter, residual in bucket.kept()}
            empty = zip(bucket.parameters, map(torch.zeros, NUMELS), strict=True)
            found.append(torch.cat([kept.get(id(parameter), zeros) for parameter, zeros in empty]))
        return found

    def messages(self) -> list[Sent]:
        return [each for bucket in self.buckets for each in (bucket.outgoing, bucket.incoming, bucket.gather)]


def gradients(world_size: int, step: int, device: torch.device = CPU) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(sum(NUMELS), generator=generator).pow(3).to(device) for _ in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("codec", [Int8(), Half(), SIDCo(0.05), (SIDCo(0.05), Int8(100))], ids=repr)
def test_what_is_applied_and_what_is_kept_are_all_gradients(codec: CodecChoice, world_size: int) -> None:
    ranks, missing = Ranks(codec, world_size), torch.zeros(sum(NUMELS), dtype=torch.float64)
    for step in range(6):
        flats = gradients(world_size, step)
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        missing -= flats[0]
    kept = ranks.kept()
    assert all(bool(each.any()) for each in kept)
    missing -= torch.stack(kept).double().mean(0)
    assert float(missing.abs().max()) < 1e-4


def test_messages_stay_where_they_are() -> None:
    def places() -> list[int]:
        return [each.tensor.data_ptr() for each in ranks.messages()]

    ranks = Ranks(Int8(), 3)
    ranks.step(gradients(3, 0))
    before = places()
    ranks.step(gradients(3, 1))
    assert places() == before


def test_collectives_get_parts_where_they_are_fast() -> None:
    ranks = Ranks((Int8(), Half()), 3, by_collectives=True)
    ranks.step(gradients(3, 0))
    for each in ranks.messages():
        assert all(length % 128 == 0 for length in each.layout)
    assert all(len(set(bucket.gather.layout)) == 1 for bucket in ranks.buckets)


def check_bits(codecs: tuple[Codec, Codec], world_size: int, device: torch.device) -> None:
    """Compare all that is applied, and all that is kept, with what a bucket on gloo makes of it."""
    there, here = Ranks(codecs, world_size, device, by_collectives=True), Ranks(codecs, world_size)
    for step in range(5):
        found, expected = gradients(world_size, step, device), gradients(world_size, step)
        there.step(found)
        here.step(expected)
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
    for got, wanted in zip(there.kept(), here.kept(), strict=True):
        assert bool(wanted.any())
        assert torch.equal(got, wanted)


def check_infinities(codecs: tuple[Codec, Codec], bad: float, device: torch.device) -> None:
    """One rank's value makes its owner's coded part NaN everywhere, and stays out of all residuals."""
    ranks = Ranks(codecs, 3, device)
    ranks.step(gradients(3, 0, device))
    before, flats, owner = ranks.kept(), gradients(3, 1, device), 0
    flats[1][10] = bad
    ranks.step(flats)
    for flat in flats:
        assert all(
            bool(flat[each.span.start : each.span.stop].isnan().all()) for each in ranks.parts[owner].coded
        )
    after = ranks.kept()
    assert all(bool(residual.isfinite().all()) for residual in after)
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True)), "others' residuals go on"
    ranks.step(found := gradients(3, 2, device))
    assert all(bool(flat.isfinite().all()) for flat in found)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codecs", [*PAIRS[:3], (SIDCo(0.05), Int8())], ids=repr)
def test_infinities_reach_all_ranks_and_no_residual(codecs: tuple[Codec, Codec], bad: float) -> None:
    check_infinities(codecs, bad, CPU)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codecs", PAIRS, ids=repr)
def test_buckets_for_collectives_have_the_bits_of_those_for_messages(
    codecs: tuple[Codec, Codec], world_size: int
) -> None:
    check_bits(codecs, world_size, CPU)


def test_where_all_gradients_are_zero_nothing_is_sent_if_the_parameter_may_be_unused() -> None:
    """Those of one rank alone do not hold back what others send; its own waits."""
    start, stop = sum(NUMELS[:2]), sum(NUMELS[:3])
    ranks = Ranks(Int8(), 2, leaves_unused=True)
    ranks.step(gradients(2, 0))
    before = [kept[start:stop] for kept in ranks.kept()]
    flats = gradients(2, 1)
    for flat in flats:
        flat[start:stop] = 0
    ranks.step(flats)
    for flat, kept, old in zip(flats, ranks.kept(), before, strict=True):
        assert not flat[start:stop].any()
        assert bool(flat[:start].any())
        assert torch.equal(kept[start:stop], old)
    flats = gradients(2, 2)
    flats[0][start:stop] = 0
    ranks.step(flats)
    after = [kept[start:stop] for kept in ranks.kept()]
    assert bool(flats[0][start:stop].any())
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
