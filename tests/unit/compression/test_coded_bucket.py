"""The messages of one bucket without processes: the ranks are objects that pass each other's bytes on."""

from collections.abc import Sequence

import pytest
import torch

from crossover_ddp._compression.bucket import Buffers, CodedBucket
from crossover_ddp._compression.choice import CodecChoice, codecs_of
from crossover_ddp._compression.cut import cut
from crossover_ddp._compression.scratch import Scratch
from crossover_ddp._exchange.layout import Layout
from crossover_ddp.codecs import Codec, Half, Int8, SIDCo

# A large matrix, a bias, and matrices whose last blocks are short.
NUMELS, DIMENSIONS = [40000, 50, 3000, 20, 7], [2, 1, 2, 1, 2]


class Ranks:
    """All ranks of one bucket."""

    def __init__(self, codec: CodecChoice, world_size: int) -> None:
        numel = sum(NUMELS)
        self.parts = cut(NUMELS, DIMENSIONS, Layout.equal(numel, world_size))
        parameters = [torch.empty(each, device="meta") for each in NUMELS]
        scratch = Scratch()
        self.buckets = [
            CodedBucket(codecs_of(codec), parameters, NUMELS, self.parts, rank, scratch=scratch)
            for rank in range(world_size)
        ]

    def step(self, gradients: Sequence[torch.Tensor], *, whole: bool = False) -> None:
        """Replace each rank's gradient by the mean."""
        for bucket, flat in zip(self.buckets, gradients, strict=True):
            bucket.encode(Buffers(flat, self.parts, flat, self.parts), whole=whole)
        for rank, bucket in enumerate(self.buckets):
            for source, message in bucket.incoming.items():
                message.copy_(self.buckets[source].outgoing[rank])
            bucket.step()
        for bucket in self.buckets:
            for owner, other in enumerate(self.buckets):
                span = bucket.gather.layout.part(owner)
                place = bucket.gather.tensor[span.start : span.stop]
                place.copy_(other.gather.tensor[span.start : span.stop])
            bucket.unload()

    def places(self) -> list[int]:
        """Return where all messages lie in memory."""
        return [
            tensor.data_ptr()
            for bucket in self.buckets
            for tensor in (*bucket.outgoing.values(), *bucket.incoming.values(), bucket.gather.tensor)
        ]


def gradients(world_size: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(sum(NUMELS), generator=generator).pow(3) for _ in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("codec", [Int8(), Half(), SIDCo(0.05)], ids=repr)
def test_what_is_applied_and_what_is_kept_are_all_gradients(codec: Codec, world_size: int) -> None:
    ranks, missing = Ranks(codec, world_size), torch.zeros(sum(NUMELS), dtype=torch.float64)
    for step in range(6):
        flats = gradients(world_size, step)
        missing += torch.stack(flats).double().mean(0)
        ranks.step(flats)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        missing -= flats[0]
    for bucket in ranks.buckets:
        kept = {id(parameter): residual for parameter, residual in bucket.kept()}
        empty = [torch.zeros(numel) for numel in NUMELS]
        residuals = [
            kept.get(id(parameter), zeros) for parameter, zeros in zip(bucket.parameters, empty, strict=True)
        ]
        missing -= torch.cat(residuals).double() / world_size
    assert float(missing.abs().max()) < 1e-4


def test_messages_stay_where_they_are_but_for_those_of_a_whole_step() -> None:
    ranks = Ranks(Int8(), 3)
    ranks.step(gradients(3, 0))
    places = ranks.places()
    ranks.step(gradients(3, 1), whole=True)
    assert not any(bucket.is_kept for bucket in ranks.buckets)
    assert not set(places) & set(ranks.places())
    ranks.step(gradients(3, 2))
    assert ranks.places() == places
