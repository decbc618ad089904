"""All ranks of a process group in one process: a scheduler decides who goes on, what has arrived, and who dies.

What runs are coroutines: journeys of buckets, over a link with three collectives, and the programs that start them.
Between two awaits a coroutine has its rank to itself, as it has its thread; whatever may happen meanwhile is another
order in which `World.run` lets them go on. Real links must show by themselves that a death reaches everybody, see
``test_failures`` beside the tests of this.
"""

import types
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.harness.oracles import tree_sum

Ready = Callable[[], bool]
Choose = Callable[[Sequence[str]], str]
Layout = Sequence[int]  # elements of each rank's part


class LostError(RuntimeError):
    """A peer will not send what is waited for."""


@types.coroutine
def until(ready: Ready) -> Generator[Ready, None, None]:
    """Go on later, once ``ready``: what a journey does at each await."""
    yield ready


class Once:
    """A Future that takes one value or one error, once."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        assert not self.done, "a Future was completed twice"
        self.value, self.error, self.done = value, error, True


class Gate:
    """Where a journey waits for its program; what follows runs in the program's step, see `World.open`."""

    def __await__(self) -> Generator[Any, None, None]:
        yield self


@dataclass
class Actor:
    """A coroutine of one rank, and what it waits for: a condition, or a gate."""

    rank: int
    coroutine: Coroutine[Any, Any, Any]
    ended: Callable[[BaseException | None], None]
    waits_for: Any = None
    steps: int = 0


class World:
    """See the module. ``size`` is the number of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[Hashable, Tensor] = {}
        self.actors: dict[str, Actor] = {}
        self.dead: set[int] = set()
        self.failures: dict[int, BaseException] = {}
        self.links = [0] * size

    def link(self, rank: int) -> "WorldLink":
        """Return the rank's next link; all ranks draw them in one order."""
        self.links[rank] += 1
        return WorldLink(self, rank, self.links[rank])

    def start(
        self,
        name: str,
        rank: int,
        coroutine: Coroutine[Any, Any, Any],
        ended: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        """Start a coroutine: it runs to its first await in the step of whoever starts it, as on a hook's thread."""
        self.actors[name] = Actor(rank, coroutine, ended)
        failure = self.failures.get(rank)
        self._go(name, failure if failure is not None and name.startswith("journey") else None)

    async def open(self, name: str, gate: Gate, link: "WorldLink") -> None:
        """Open the gate at which a journey waits, and run what follows; a program's step.

        Where a program would block until the journey's gathers are there, it does not go on before, or a peer is lost.
        """

        def missing() -> set[int]:
            return set().union(*[each.is_there.sources for each in link.gathers if not each.is_there()])

        def is_due() -> bool:
            if name not in self.actors:
                return True
            return self.actors[name].waits_for is gate and (not missing() or bool(missing() & self._gone()))

        await until(is_due)
        if name in self.actors:
            self._go(name, self._lost(link.rank) if missing() else None)

    def able(self) -> list[str]:
        """Return who can go on now; those for whom a peer is lost can, too."""
        return sorted(
            name for name, actor in self.actors.items() if self._is_ready(actor) or self._is_lost(actor)
        )

    def _is_ready(self, actor: Actor) -> bool:
        return not isinstance(actor.waits_for, Gate) and bool(actor.waits_for())

    def _is_lost(self, actor: Actor) -> bool:
        """A peer's end closes its connections; so does a failure, by which each rank hears of the first one."""
        return bool(getattr(actor.waits_for, "sources", set()) & self._gone())

    def _gone(self) -> set[int]:
        return self.dead | self.failures.keys()

    def _lost(self, rank: int) -> LostError:
        return LostError(f"rank {rank} of {self.size}: a peer has gone")

    def step(self, name: str) -> None:
        """Let one coroutine go on to its next await."""
        actor = self.actors[name]
        lost = not self._is_ready(actor)
        self._go(name, self._lost(actor.rank) if lost else None)

    def _go(self, name: str, error: BaseException | None = None) -> None:
        actor = self.actors[name]
        actor.steps += 1
        try:
            actor.waits_for = actor.coroutine.send(None) if error is None else actor.coroutine.throw(error)
        except StopIteration:
            self._end(name, None)
        except AssertionError:  # the test's own
            raise
        except Exception as raised:
            self._end(name, raised)

    def _end(self, name: str, error: BaseException | None) -> None:
        actor = self.actors.pop(name)
        if error is not None:
            self._fail(actor.rank, error)
        actor.ended(self.failures.get(actor.rank) if error is not None else None)

    def _fail(self, rank: int, error: BaseException) -> None:
        """The first failure of a rank is thrown into all its journeys; its peers hear of it by closed connections."""
        if rank in self.failures:
            return
        self.failures[rank] = error
        for name in [name for name, actor in self.actors.items() if actor.rank == rank and "journey" in name]:
            if name in self.actors:
                self._go(name, error)

    def kill(self, rank: int) -> None:
        """End a rank where it is; nothing of it runs any more, not even its ``finally``."""
        self.dead.add(rank)
        for name in [name for name, actor in self.actors.items() if actor.rank == rank]:
            self.actors.pop(name)

    def run(self, choose: Choose, deaths: Mapping[int, int] | None = None) -> None:
        """Let coroutines go on, one step at a time, until all have ended.

        Args:
            choose: picks one of those that are able.
            deaths: by rank, the number of its steps after which it dies.
        """
        steps = [0] * self.size
        while self.actors:
            able = self.able()
            assert able, f"deadlock: {sorted(self.actors)} wait for ever"
            name = choose(able)
            rank = self.actors[name].rank
            if deaths and deaths.get(rank) == steps[rank]:
                self.kill(rank)
                continue
            steps[rank] += 1
            self.step(name)

    def key(self) -> Hashable:
        """Tell two states apart: who has gone how far, and what lies in the mail."""
        return tuple(sorted((name, a.steps) for name, a in self.actors.items())), frozenset(self.mail)


@dataclass
class Mail:
    """Messages that a rank waits for, all of one collective."""

    mail: Mapping[Hashable, Tensor]
    keys: Sequence[Hashable]
    sources: set[int] = field(default_factory=set)

    def __call__(self) -> bool:
        missing = [key for key in self.keys if key not in self.mail]
        self.sources = {key[-2] for key in missing}  # type: ignore[index]
        return not missing


class Arriving:
    """A gather under way."""

    def __init__(self, ready: Mail, put: Callable[[], None]) -> None:
        self.is_there, self._put = ready, put

    def wait(self) -> None:
        assert self.is_there(), "a gate was opened before the gather behind it had arrived"
        self._put()


class WorldLink:
    """One rank's link of one journey: the three collectives, and nothing else between ranks."""

    in_program_order = False

    def __init__(self, world: World, rank: int, number: int) -> None:
        self.rank, self.size = rank, world.size
        self._world, self._number, self._calls = world, number, 0
        self.gathers: list[Arriving] = []
        self._others = [other for other in range(world.size) if other != rank]

    def _post(self, outgoing: Mapping[int, Tensor]) -> Mail:
        """Send a tensor to each of these ranks; return what their like will be here."""
        tag, self._calls = (self._number, self._calls), self._calls + 1
        for to, tensor in outgoing.items():
            assert (tag, self.rank, to) not in self._world.mail, "two messages have one tag"
            self._world.mail[tag, self.rank, to] = tensor.clone()
        return Mail(self._world.mail, [(tag, source, self.rank) for source in self._others])

    def _take(self, mail: Mail) -> list[Tensor]:
        return [self._world.mail.pop(key) for key in mail.keys]

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Average ``flat`` into each part's owner; what stands in other parts is nobody's afterwards."""
        parts = flat.div_(self.size).split(list(layout))
        mail = self._post({other: parts[other] for other in self._others})
        await until(mail)
        received = self._take(mail)
        received.insert(self.rank, parts[self.rank])
        for other in self._others:
            parts[other].fill_(torch.nan)
        own: Tensor = parts[self.rank]
        return own.copy_(tree_sum(received))

    def begin_all_gather(self, flat: Tensor, layout: Layout, priority: int = 0) -> Arriving:
        """Copy each owner's part to all, for who waits later."""
        parts = flat.split(list(layout))
        mail = self._post(dict.fromkeys(self._others, parts[self.rank]))

        def put() -> None:
            for other, part in zip(self._others, self._take(mail), strict=True):
                parts[other].copy_(part)

        self.gathers.append(Arriving(mail, put))
        return self.gathers[-1]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each owner's part to all."""
        arriving = self.begin_all_gather(flat, layout)
        await until(arriving.is_there)
        arriving.wait()

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        """Do both halves."""
        await self.reduce_scatter(flat, layout)
        await self.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """Send each other rank its part of ``outgoing``, and receive its part of ``incoming`` from each."""
        leaving, coming = outgoing.split(list(to)), incoming.split(list(of))
        mail = self._post({other: leaving[other] for other in self._others})
        await until(mail)
        for source, part in zip(self._others, self._take(mail), strict=True):
            coming[source].copy_(part)

    async def settle(self) -> None:
        """Go on where a journey may block."""

    async def compute(self) -> None:
        """Go on where an owner may compute for long."""
        await until(lambda: True)
