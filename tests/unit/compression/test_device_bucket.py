"""Messages that nobody looks at on the host, without processes: the bits of `CodedBucket`."""

from collections.abc import Sequence

import pytest
import torch

from crossover_ddp._compression.bucket import Buffers
from crossover_ddp._compression.choice import Codecs
from crossover_ddp._compression.device_bucket import DeviceBucket, can_encode_on_device
from crossover_ddp.codecs import Codec, Half, Int8, SIDCo, Threshold
from tests.unit.compression.test_coded_bucket import DIMENSIONS, NUMELS, Ranks, gradients

CODECS: list[tuple[Codec, Codec]] = [
    (Int8(), Int8()),
    (Int8(64), Half()),
    (Half(torch.float16), Int8(100)),
    (Half(), Half()),
]


class DeviceRanks:
    """All ranks of one bucket, whose messages pass as `all_to_all_single` and an all-gather pass them."""

    def __init__(self, codecs: tuple[Codec, Codec], world_size: int, device: torch.device) -> None:
        like = Ranks(codecs[0], world_size)
        self.parts = like.parts
        parameters = [torch.empty(each, device="meta") for each in NUMELS]
        self.buckets = [
            DeviceBucket(Codecs(*codecs), parameters, NUMELS, self.parts, rank, device)
            for rank in range(world_size)
        ]

    def step(self, flats: Sequence[torch.Tensor]) -> None:
        """Replace each rank's gradient by the mean."""
        world_size = len(flats)
        for bucket, flat in zip(self.buckets, flats, strict=True):
            bucket.encode(Buffers(flat, self.parts, flat, self.parts))
        for rank, bucket in enumerate(self.buckets):
            places = bucket.incoming.chunk(world_size)
            for source, place in enumerate(places):
                place.copy_(self.buckets[source].outgoing.chunk(world_size)[rank])
            bucket.step()
        for bucket in self.buckets:
            for owner, other in enumerate(self.buckets):
                span = bucket.gather.layout.part(owner)
                bucket.gather.tensor[span.start : span.stop] = other.gather.tensor[span.start : span.stop]
            bucket.unload()

    def kept(self) -> list[torch.Tensor]:
        return [residual.cpu() for bucket in self.buckets for _, residual in bucket.kept()]


def with_pair(codecs: tuple[Codec, Codec], world_size: int) -> Ranks:
    ranks = Ranks(codecs[0], world_size)
    ranks.buckets = [
        type(bucket)(Codecs(*codecs), bucket.parameters, NUMELS, ranks.parts, bucket.rank)
        for bucket in ranks.buckets
    ]
    return ranks


def check_bits(codecs: tuple[Codec, Codec], world_size: int, device: torch.device) -> None:
    """Compare all that is applied, and all that is kept, with what a bucket on gloo makes of it."""
    there, here = DeviceRanks(codecs, world_size, device), with_pair(codecs, world_size)
    for step in range(5):
        expected = gradients(world_size, step)
        found = [flat.clone().to(device) for flat in expected]
        there.step(found)
        here.step(expected)
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
    kept = [residual for bucket in here.buckets for _, residual in bucket.kept()]
    assert any(bool(residual.any()) for residual in kept)
    for got, wanted in zip(there.kept(), kept, strict=True):
        assert torch.equal(got, wanted)
    for one, other in zip(there.buckets, here.buckets, strict=True):
        assert one.nbytes == other.nbytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("codecs", CODECS, ids=repr)
def test_bits_are_those_of_messages_on_gloo(codecs: tuple[Codec, Codec], world_size: int) -> None:
    check_bits(codecs, world_size, torch.device("cpu"))


def check_infinities(codecs: tuple[Codec, Codec], bad: float, device: torch.device) -> None:
    """One rank's value makes its owner's coded part NaN everywhere, and stays out of all residuals."""
    ranks = DeviceRanks(codecs, 3, device)
    ranks.step([flat.to(device) for flat in gradients(3, 0)])
    before = ranks.kept()
    flats = [flat.to(device) for flat in gradients(3, 1)]
    owner = 0
    flats[1][10] = bad
    ranks.step(flats)
    coded = ranks.parts[owner].coded
    for flat in flats:
        assert all(bool(flat[each.span.start : each.span.stop].isnan().all()) for each in coded)
    after = ranks.kept()
    assert all(bool(residual.isfinite().all()) for residual in after)
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)), "others' residuals go on"
    ranks.step(found := [flat.to(device) for flat in gradients(3, 2)])
    assert all(bool(flat.isfinite().all()) for flat in found)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codecs", CODECS[:3], ids=repr)
def test_infinities_reach_all_ranks_and_no_residual(codecs: tuple[Codec, Codec], bad: float) -> None:
    check_infinities(codecs, bad, torch.device("cpu"))


def test_what_is_kept_of_another_bucket_is_sent_with_the_next_message() -> None:
    ranks = DeviceRanks((Int8(), Int8()), 2, torch.device("cpu"))
    residuals = [torch.full((numel,), 0.5) for numel in NUMELS]
    for bucket in ranks.buckets:
        for number, residual in enumerate(residuals):
            bucket.keep(number, residual)
    flats = [torch.zeros(sum(NUMELS)) for _ in range(2)]
    ranks.step(flats)
    starts = [sum(NUMELS[:number]) for number in range(len(NUMELS))]
    for number, (start, numel) in enumerate(zip(starts, NUMELS, strict=True)):
        piece = flats[0][start : start + numel]
        wanted = 0.5 if DIMENSIONS[number] > 1 else 0.0
        torch.testing.assert_close(piece, torch.full_like(piece, wanted), rtol=0.01, atol=0)


def test_only_codecs_of_one_size_can_encode_on_a_device() -> None:
    assert can_encode_on_device(Codecs(Int8(), Half()))
    assert not can_encode_on_device(Codecs(Int8(), SIDCo(0.01)))
    assert not can_encode_on_device(Codecs(Threshold(0.01), Half()))
