"""A codec as a link: all ranks in one process, in any order, with the bits of messages that are passed on by hand."""

import random

import pytest
import torch

from crossover_ddp._compression.choice import codecs_of
from crossover_ddp._compression.codec import Whole
from crossover_ddp._compression.coded_link import CodedBucket, CodedLink, DrainedLink
from crossover_ddp._engine.links import LinkAround
from crossover_ddp.codecs import Codec, Half, Int8, SIDCo
from tests.harness.world import World
from tests.unit.compression.test_coded_bucket import CPU, DIMENSIONS, NUMELS, Ranks, gradients

STEPS = 4


def travel(ranks: Ranks, flats: list[torch.Tensor], *, drained: bool = False) -> None:
    """Let each rank's gradient travel; owners double what they have where they have work."""
    world, order = World(len(flats)), random.Random(0)

    async def journey(rank: int) -> None:
        coded, flat = ranks.buckets[rank], flats[rank]
        layout = [sum(run.span.numel for run in part.coded) + part.exact_numel for part in ranks.parts]
        if drained:  # ranks' residuals are in the gradients
            flat.add_(kept[rank])
            link: LinkAround = DrainedLink(world.link(rank), coded, ranks.parts[rank])
        else:
            coded.encode(flat, ranks.parts)
            link = CodedLink(world.link(rank), coded)
        own = await link.reduce_scatter(flat, layout)
        await link.compute()
        if coded.has_work:
            own.mul_(2)
        await link.all_gather(flat, layout)

    kept = ranks.kept()
    for rank in range(len(flats)):
        world.start(f"journey {rank}", rank, journey(rank))
    world.run(order.choice)
    assert not world.failures


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("codec", [Int8(), (Half(), Int8(100)), SIDCo(0.05)], ids=repr)
def test_the_bits_are_those_of_messages(codec: Codec, world_size: int) -> None:
    linked, passed = Ranks(codec, world_size), Ranks(codec, world_size)
    for step in range(STEPS):
        found, expected = gradients(world_size, step), gradients(world_size, step)
        travel(linked, found)
        passed.step(expected)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("codec", [Int8(), Whole()], ids=repr)
def test_what_owners_make_of_the_mean_comes_back(codec: Codec) -> None:
    """Twice the mean, rounded by two codecs; what is missing comes with an exact step."""
    ranks = Ranks(codec, 3)
    parameters = ranks.buckets[0].parameters
    ranks.buckets = [
        CodedBucket(codecs_of(codec), parameters, ranks.parts, rank, CPU, has_work=True) for rank in range(3)
    ]
    missing, exact = (
        torch.zeros(sum(NUMELS)),
        torch.tensor(DIMENSIONS).eq(1).repeat_interleave(torch.tensor(NUMELS)),
    )
    for step in range(STEPS):
        flats = gradients(3, step)
        wanted = 2 * torch.stack(flats).mean(0)
        travel(ranks, flats, drained=step == STEPS - 1)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        assert torch.allclose(flats[0][exact], wanted[exact], atol=1e-6)
        missing += wanted - flats[0]
        is_rounded = codec != Whole() and step < STEPS - 1
        assert bool(missing.abs().max() > 1e-3) == is_rounded
