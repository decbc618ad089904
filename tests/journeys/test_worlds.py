"""Journeys of all ranks in one process, in any order, with deaths: what they must do whatever happens when.

The journeys here are those of the design, each a few lines over the three collectives; the package's take their places
as they come. Each check has a journey that makes the mistake which it is for.
"""

import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from crossover_ddp._averaging.replica import late_mean
from crossover_ddp._engine.buckets import split
from crossover_ddp._engine.links import LinkAround
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.oracles import tree_sum
from tests.harness.world import Gate, Layout, LostError, Once, World, WorldLink, until


@dataclass
class Bucket:
    """A bucket of one rank."""

    flat: Tensor
    layout: Layout
    last: bool
    future: Once = field(default_factory=Once)
    due: Gate = field(default_factory=Gate)
    updated: bool = False

    def hand_back(self) -> None:
        self.future.complete(self.flat)


@dataclass
class Turn:
    """Notes what happens to a rank's turn."""

    held: bool = True
    log: list[str] = field(default_factory=list)

    def release(self) -> None:
        assert self.held, "a turn was given away twice"
        self.held = False
        self.log.append("release")

    def acquire(self) -> None:
        assert not self.held, "a turn was taken twice"
        self.held = True
        self.log.append("acquire")


Journey = Callable[[Bucket, WorldLink], Coroutine[Any, Any, None]]


async def decoupled(bucket: Bucket, link: WorldLink) -> None:
    bucket.hand_back()
    await link.reduce_scatter(bucket.flat, bucket.layout)
    arriving = link.begin_all_gather(bucket.flat, bucket.layout)
    await bucket.due
    arriving.wait()
    bucket.updated = True


async def on_owners(bucket: Bucket, link: WorldLink) -> None:
    """Owners send back another vector than they got, cut otherwise, after a long computation."""
    own = await link.reduce_scatter(bucket.flat, bucket.layout)
    await link.compute()
    back = torch.zeros(2 * bucket.flat.numel(), dtype=bucket.flat.dtype)
    layout = [2 * numel for numel in bucket.layout]
    back.split(layout)[link.rank].copy_(torch.cat([own, -own]))
    await link.all_gather(back, layout)
    for part, pair in zip(bucket.flat.split(list(bucket.layout)), back.split(layout), strict=True):
        part.copy_(pair[: part.numel()])


class HalfLink(LinkAround):
    """A codec as a link around a link: what travels has half the bytes."""

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        coded = flat.half()
        await super().reduce_scatter(coded, layout)
        return flat.copy_(coded)

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        coded = flat.half()
        await super().all_gather(coded, layout)
        flat.copy_(coded)


async def coded(bucket: Bucket, link: WorldLink) -> None:
    await split(bucket, HalfLink(link))


async def averaged(bucket: Bucket, link: WorldLink) -> None:
    """The package's mean of parameters, with an owner's step that turns the sign, and what was sent taken off."""
    zeros = torch.zeros_like(bucket.flat)
    await late_mean(bucket.flat, bucket.layout, link, owner_step=lambda own: own.neg_(), sent=zeros)
    bucket.flat.neg_()


WORLDS = 1000 if IN_CAMPAIGN else 100  # made up at random
JOURNEYS = [split, decoupled, on_owners, coded, averaged]


async def in_turn(bucket: Bucket, link: WorldLink, journey: Journey, turn: Turn) -> None:
    """Give the turn away at the last bucket's first await, and take it before its Future completes."""
    if not bucket.last:
        return await journey(bucket, link)
    way = journey(bucket, link).__await__()
    await _Launched(way, turn.release)
    turn.acquire()


class _Launched:
    """Goes a way, and calls ``then`` when it is about to leave the hook's thread."""

    def __init__(self, way: Any, then: Callable[[], None]) -> None:
        self._way, self._then = way, then

    def __await__(self) -> Any:
        try:
            first = next(self._way)
        except StopIteration:
            return self._then()
        self._then()
        yield first
        return (yield from self._way)


class Run:
    """One step of a job: each rank's program starts its buckets, waits for all, and opens what waits for forward."""

    def __init__(
        self,
        journey: Journey,
        layouts: Sequence[Layout],
        seed: int = 0,
        around: Callable[..., Coroutine[Any, Any, None]] = in_turn,
    ) -> None:
        self.world = World(len(layouts[0]))
        self.turns = [Turn() for _ in range(self.world.size)]
        self.over: dict[str, BaseException | None] = {}
        generator = torch.Generator().manual_seed(seed)
        values = [
            [torch.randn(sum(layout), generator=generator) for _ in range(self.world.size)]
            for layout in layouts
        ]
        dtype = torch.float16 if journey is coded else torch.float32
        self.expected = [
            tree_sum([value.to(dtype) / self.world.size for value in of_ranks]).float() for of_ranks in values
        ]
        self.buckets = [
            [
                Bucket(values[index][rank].clone(), layout, index == len(layouts) - 1)
                for index, layout in enumerate(layouts)
            ]
            for rank in range(self.world.size)
        ]
        for rank in range(self.world.size):
            self.world.start(f"program {rank}", rank, self._program(rank, journey, around))

    async def _program(self, rank: int, journey: Journey, around: Any) -> None:
        links = []
        for index, bucket in enumerate(self.buckets[rank]):
            await until(lambda: True)  # backward
            links.append(self.world.link(rank))
            name = f"journey {rank} {index}"
            way = around(bucket, links[-1], journey, self.turns[rank])
            self.world.start(name, rank, way, self._ended(name, rank, bucket))
        await until(lambda: all(bucket.future.done for bucket in self.buckets[rank]))
        for index in reversed(range(len(links))):  # forward
            await self.world.open(f"journey {rank} {index}", self.buckets[rank][index].due, links[index])

    def _ended(self, name: str, rank: int, bucket: Bucket) -> Callable[[BaseException | None], None]:
        def ended(error: BaseException | None) -> None:
            assert name not in self.over, "a journey ended twice"
            self.over[name] = error
            if not bucket.future.done:
                assert error is not None or self.turns[rank].held or not bucket.last, (
                    "a Future was completed outside of the turn"
                )
                bucket.future.complete(bucket.flat, error)

        return ended

    def check_turn(self, name: str) -> None:
        """Before a thread of the link goes on with a last bucket, the turn must have been given away."""
        _, rank, *index = name.split()
        if index and self.buckets[int(rank)][int(index[0])].last and self.world.actors[name].steps == 1:
            assert self.turns[int(rank)].log, "the turn was kept while others could hear of the last bucket"

    def choosing(self, choose: Callable[[Sequence[str]], str]) -> Callable[[Sequence[str]], str]:
        def checked(able: Sequence[str]) -> str:
            name = choose(able)
            self.check_turn(name)
            return name

        return checked

    def check_end(self) -> None:
        """All ranks have the bits of the oracle, and nothing is left."""
        assert not self.world.mail, "messages are left"
        assert not any(self.over.values())
        for rank, buckets in enumerate(self.buckets):
            for bucket, expected in zip(buckets, self.expected, strict=True):
                assert bucket.future.done
                assert torch.equal(bucket.flat, expected), f"rank {rank} has other bits"
            assert self.turns[rank].log in (["release", "acquire"], ["acquire", "release"])

    def check_end_after_death(self) -> None:
        """Whoever lives has ended each journey once, and each Future has a value or an error that names its rank."""
        for rank, buckets in enumerate(self.buckets):
            if rank in self.world.dead:
                continue
            for index, bucket in enumerate(buckets):
                name = f"journey {rank} {index}"
                assert bucket.future.done and (name in self.over)
                error = bucket.future.error
                assert error is None or f"rank {rank} of" in str(error)
            log = self.turns[rank].log
            assert log[:1] != ["acquire"] and len(log) <= 2, log


def random_run(seed: int, journey: Journey) -> tuple[Run, random.Random]:
    chance = random.Random(seed)
    size = chance.randint(1, 6)
    layouts = [[chance.choice((0, 1, 3, 8)) for _ in range(size)] for _ in range(chance.randint(1, 4))]
    return Run(journey, layouts, seed), chance


@pytest.mark.parametrize("journey", JOURNEYS)
def test_random_worlds_have_the_bits_of_the_tree_on_all_ranks(journey: Journey) -> None:
    for seed in range(WORLDS):
        run, chance = random_run(seed, journey)
        run.world.run(run.choosing(chance.choice))
        run.check_end()


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_death_at_any_await_leaves_nobody_waiting(journey: Journey) -> None:
    """At each step of each of three ranks, in five orders each, until a rank's last one."""
    deaths = 0
    for victim, seed in itertools.product(range(3), range(5)):
        for steps in itertools.count():
            run, chance = Run(journey, [[2, 2, 1], [1, 0, 3]], seed), random.Random(seed)
            run.world.run(run.choosing(chance.choice), {victim: steps})
            if not run.world.dead:
                break
            deaths += 1
            run.check_end_after_death()
    assert deaths >= 3 * 5 * 4


def all_orders(make: Callable[[], Run]) -> int:
    """Go through each state that any order of steps can reach, once, and each step out of it; return their number.

    Coroutines cannot be copied, so each path is run anew from the start. A state is who has gone how far, what lies in
    the mail, and what has happened to the turns; two paths to one state go on alike.
    """
    seen: set[Any] = set()
    paths: list[list[str]] = [[]]
    transitions = 0
    while paths:
        path, run = paths.pop(), make()
        for name in path:
            run.check_turn(name)
            run.world.step(name)
        while True:
            transitions += 1
            state = run.world.key(), tuple(tuple(turn.log) for turn in run.turns)
            if state in seen:
                break
            seen.add(state)
            able = run.world.able()
            if not able:
                assert not run.world.actors, f"deadlock: {sorted(run.world.actors)} wait for ever"
                run.check_end()
                break
            paths += [[*path, other] for other in able[1:]]
            path = [*path, able[0]]
            run.check_turn(able[0])
            run.world.step(able[0])
    return transitions


@pytest.mark.parametrize("journey", [split, decoupled])
def test_all_orders_of_three_ranks_and_two_buckets(journey: Journey) -> None:
    assert all_orders(lambda: Run(journey, [[1, 1, 1], [1, 1, 1]])) > 1000


# --- each check sees its mistake -----------------------------------------------------------------------------


async def late_release(bucket: Bucket, link: WorldLink, journey: Journey, turn: Turn) -> None:
    await journey(bucket, link)
    if bucket.last:
        turn.release()
        turn.acquire()


async def no_acquire(bucket: Bucket, link: WorldLink, journey: Journey, turn: Turn) -> None:
    if bucket.last:
        turn.release()
    await journey(bucket, link)


async def twice(bucket: Bucket, link: WorldLink, journey: Journey, turn: Turn) -> None:
    bucket.hand_back()
    await in_turn(bucket, link, journey, turn)
    bucket.hand_back()


async def no_gather(bucket: Bucket, link: WorldLink) -> None:
    bucket.flat.div_(link.size)
    await link.reduce_scatter(bucket.flat, bucket.layout)


async def swallowed(bucket: Bucket, link: WorldLink) -> None:
    try:
        await split(bucket, link)
    except LostError:
        await until(lambda: False)


MISTAKES = {
    late_release: "kept while others could hear",
    no_acquire: "outside of the turn",
    twice: "completed twice",
    no_gather: "other bits",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: Any) -> None:
    is_around = mistake in (late_release, no_acquire, twice)
    with pytest.raises(AssertionError, match=MISTAKES[mistake]):
        for seed in range(20):
            run = Run(
                *((split,) if is_around else (mistake,)),
                [[2, 2], [1, 3]],
                seed,
                mistake if is_around else in_turn,
            )
            run.world.run(run.choosing(random.Random(seed).choice))
            if run.world.failures:
                raise next(iter(run.world.failures.values()))
            run.check_end()


def test_a_swallowed_loss_is_seen() -> None:
    run = Run(swallowed, [[2, 2], [1, 3]])
    with pytest.raises(AssertionError, match="deadlock"):
        run.world.run(random.Random(0).choice, {1: 3})
