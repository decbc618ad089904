"""All ranks of a process group in one process: a scheduler decides which journey goes on.

What runs are coroutines over a link with the engine's collectives. Between two awaits a coroutine has its rank to
itself, as it has its thread; whatever may happen meanwhile is another order in which `World.run` lets them go on.
"""

import types
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.harness.oracles import tree_sum

Ready = Callable[[], bool]
Layout = Sequence[int]  # elements of each rank's part


@types.coroutine
def until(ready: Ready) -> Generator[Ready, None, None]:
    """Go on later, once ``ready``: what a journey does at each await."""
    yield ready


class World:
    """See the module. ``size``: the number of ranks. ``failures``: by rank, what its journeys have raised."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[Hashable, Tensor] = {}
        self.failures: dict[int, BaseException] = {}
        self._links = [0] * size
        self._ranks: dict[str, tuple[int, Coroutine[Any, Any, None]]] = {}
        self._waiting: dict[str, Ready] = {}

    def link(self, rank: int) -> "WorldLink":
        """Return the rank's next link; all ranks draw them in one order."""
        self._links[rank] += 1
        return WorldLink(self, rank, self._links[rank])

    def start(self, name: str, rank: int, journey: Coroutine[Any, Any, None]) -> None:
        """Let a journey go to its first await, as on a hook's thread."""
        self._ranks[name] = rank, journey
        self._go(name)

    def _go(self, name: str) -> None:
        rank, journey = self._ranks[name]
        self._waiting.pop(name, None)
        try:
            self._waiting[name] = journey.send(None)
        except StopIteration:
            pass
        except Exception as error:
            self.failures[rank] = error

    def run(self, choose: Callable[[Sequence[str]], str]) -> None:
        """Let journeys go on, one await at a time, until all have ended; ``choose`` picks one that can."""
        while self._waiting and not self.failures:
            able = [name for name, ready in self._waiting.items() if ready()]
            assert able, f"deadlock: {sorted(self._waiting)} wait for ever"
            self._go(choose(able))


@dataclass
class Mail:
    """Messages that a rank waits for, all of one collective."""

    mail: Mapping[Hashable, Tensor]
    keys: Sequence[Hashable]

    def __call__(self) -> bool:
        return all(key in self.mail for key in self.keys)


class WorldLink:
    """One rank's link of one journey: the collectives, and nothing else between ranks."""

    in_program_order = False

    def __init__(self, world: World, rank: int, number: int) -> None:
        self.rank, self.size = rank, world.size
        self._world, self._number, self._calls = world, number, 0
        self._others = [other for other in range(world.size) if other != rank]

    async def _exchanged(self, outgoing: Mapping[int, Tensor]) -> list[Tensor]:
        """Send a tensor to each of these ranks; return what their like is here."""
        tag, self._calls = (self._number, self._calls), self._calls + 1
        for to, tensor in outgoing.items():
            assert (tag, self.rank, to) not in self._world.mail, "two messages have one tag"
            self._world.mail[tag, self.rank, to] = tensor.clone()
        mail = Mail(self._world.mail, [(tag, source, self.rank) for source in self._others])
        await until(mail)
        return [self._world.mail.pop(key) for key in mail.keys]

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Average ``flat`` into each part's owner; what stands in other parts is nobody's afterwards."""
        parts = flat.div_(self.size).split(list(layout))
        received = await self._exchanged({other: parts[other] for other in self._others})
        received.insert(self.rank, parts[self.rank])
        for other in self._others:
            parts[other].fill_(torch.nan)
        own: Tensor = parts[self.rank]
        return own.copy_(tree_sum(received))

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each owner's part to all."""
        parts = flat.split(list(layout))
        received = await self._exchanged(dict.fromkeys(self._others, parts[self.rank]))
        for other, part in zip(self._others, received, strict=True):
            parts[other].copy_(part)

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        """Do both halves."""
        await self.reduce_scatter(flat, layout)
        await self.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """Send each other rank its part of ``outgoing``, and receive its part of ``incoming`` from each."""
        leaving, coming = outgoing.split(list(to)), incoming.split(list(of))
        received = await self._exchanged({other: leaving[other] for other in self._others})
        for source, part in zip(self._others, received, strict=True):
            coming[source].copy_(part)

    async def settle(self) -> None:
        """Go on where a journey may block."""

    async def compute(self) -> None:
        """Go on where an owner may compute for long."""
        await until(lambda: True)
