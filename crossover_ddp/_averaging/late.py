"""Local SGD: a snapshot leaves, its mean comes back some steps later, and local progress in between is kept.

[Note: delta rule] A rank sends s, its parameters after step k, and adds mean(s) - s to what it has after step k + d.
With d = 0 that is the mean itself. After CoCoD-SGD and DaSGD (arXiv 2006.00441); fragments after streaming DiLoCo.

[Note: the clock] What counts are the backward passes that reached the hook, as many on all ranks; not
``optimizer.step()``, which a GradScaler skips on one rank alone. What is due after n of them happens before the next
training forward: then the update of the n-th is in the parameters.

[Note: outer steps] After DiLoCo (arXiv 2311.08105, and the code of its followers): z are the parameters after the last
outer step, and the outer optimizer steps them by the gradient z - mean(x), each owner its part.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import check_keys
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import all_finite
from crossover_ddp.errors import UnsupportedConfigurationError

from .replica import KEPT, FlatBlock, Flight, Replica, wide

OuterOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]


@dataclass(frozen=True)
class Schedule:
    """Which fragments leave and come back after how many backward passes; the fields are ``LocalSGDState``'s. Pure."""

    sync_every: int
    delay: int = 0
    fragments: int = 1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in {"sync_every": 1, "delay": 0, "fragments": 1, "warmup_steps": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"expected an integer {name} >= {least}, got {name}={value!r}; see LocalSGDState"
                )
        if self.sync_every < self.delay + 1:
            raise ValueError(
                f"expected sync_every >= delay + 1, got sync_every={self.sync_every} and delay={self.delay}: of two "
                f"exchanges of an element in flight both would count; pass sync_every={self.delay + 1} or more"
            )
        if self.sync_every == 1 and self.fragments > 1:
            raise ValueError(
                f"expected fragments=1 with sync_every=1, got fragments={self.fragments}; every step averages all "
                "gradients then, and no parameters"
            )

    @property
    def local_from(self) -> float:
        """Number of steps after which steps use this rank's gradients alone."""
        return self.warmup_steps if self.sync_every > 1 else math.inf

    def leaving(self, steps: int) -> list[int]:
        every, local = self.sync_every, steps - self.local_from
        if local <= 0:
            return []
        return [
            f for f in range(self.fragments) if (local - f * every // self.fragments) % every == 0
        ]

    def arriving(self, steps: int) -> list[int]:
        return self.leaving(steps - self.delay)

    def span(self, numel: int, fragment: int) -> Span:
        """Return the slice of a flat vector; slices differ by one element at most."""
        return Span(numel * fragment // self.fragments, numel * (fragment + 1) // self.fragments)


def described(make: OuterOptimizer) -> str:
    """Return the optimizer's class and arguments as a text; refuse what makes none."""
    is_function = callable(make) and not isinstance(make, Optimizer)
    made = make([torch.nn.Parameter(torch.zeros(1))]) if is_function else None
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"expected outer_optimizer to make an optimizer, got outer_optimizer={make!r}; pass a function of the "
            "parameters such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)"
        )
    given = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    return f"{type(made).__name__}({given})"


class OuterPart:
    """What one owner keeps of a slice of a block: z and the optimizer's state of its parameters, not of buffers."""

    def __init__(
        self, block: FlatBlock, piece: Span, exchange: Exchange, make: OuterOptimizer
    ) -> None:
        self.piece = piece
        # Cut by the wire's dtype, which is the block's.
        flat = torch.empty(piece.numel, dtype=block.dtype, device=block.device)
        self.layout, rank = exchange.equal_layout(flat), exchange.rank
        start = piece.start + sum(self.layout[:rank])
        self.span = Span(start, max(start, min(start + self.layout[rank], block.parameters_numel)))
        self.anchor = torch.nn.Parameter(block.copy(self.span, wide(block.dtype)))
        """z."""
        self._optimizer = make([self.anchor])

    def step(self, mean: torch.Tensor) -> None:
        """Replace the mean of the own part by the next z, see [Note: outer steps]."""
        own = mean[: len(self.anchor)]
        if own.device.type == "cpu" and not all_finite(own):
            return  # every rank will see it, and refuse it
        self.anchor.grad = self.anchor.detach() - own
        self._optimizer.step()
        self.anchor.grad = None
        own.copy_(self.anchor.detach())

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return what there is for each element, z too, and the rest of the optimizer's state, such as its steps."""
        tensors = {"anchor": self.anchor.detach()}
        numbers: dict[str, float] = {}
        for key, value in self._optimizer.state.get(self.anchor, {}).items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.shape == self.anchor.shape:
                tensors[key] = value
            elif isinstance(value, int | float) or (is_tensor and value.dim() == 0):
                numbers[key] = float(value)
        return tensors, numbers

    def load(self, tensors: dict[str, torch.Tensor], part: dict[str, float | None]) -> None:
        """Take over ``part``; what is None there is in ``tensors``, which are of the whole block."""
        own = slice(*self.span)
        state = {
            key: tensors[key][own].clone()
            if number is None
            else torch.tensor(number, dtype=torch.float32)
            for key, number in part.items()
        }
        self.anchor.data.copy_(state.pop("anchor"))
        self._optimizer.state[self.anchor].update(state)


class LateMeans(Replica):
    """The rule of ``LocalSGDState``."""

    def __init__(self, schedule: Schedule, outer_optimizer: OuterOptimizer | None) -> None:
        outer = None if outer_optimizer is None else described(outer_optimizer)
        self.settings = {**asdict(schedule), "outer_optimizer": outer}
        self.local_from = schedule.local_from
        self._schedule, self._make_outer = schedule, outer_optimizer
        self._outers: list[list[OuterPart]] = []  # by fragment, and in it by block
        self._flights: dict[int, list[Flight]] = {}
        self._loaded: dict[str, Any] = {}
        self._exchanges = self._bytes = self._peak_bytes = 0

    def begin(self) -> None:
        if (make := self._make_outer) is not None:
            for each in range(self._schedule.fragments):
                pieces = [(block, self._schedule.span(block.numel, each)) for block in self.blocks]
                self._outers.append([OuterPart(*piece, self.exchange, make) for piece in pieces])
        for place, block in enumerate(self.blocks if self._loaded else ()):
            named, dtype = self._loaded["tensors"], wide(block.dtype)
            tensors = {name: block.unnamed(values, dtype) for name, values in named.items()}
            for outers, parts in zip(self._outers, self._loaded["parts"], strict=True):
                outers[place].load(tensors, parts[place])
        self._loaded = {}

    def act(self) -> None:
        arriving, leaving = self._schedule.arriving(self.acted), self._schedule.leaving(self.acted)
        is_late = self._schedule.delay > 0
        if is_late:
            self._land(arriving)
        for fragment in leaving:
            flights = self._flights[fragment] = []
            for place, block in enumerate(self.blocks):
                span = self._schedule.span(block.numel, fragment)
                if span.start < span.stop:
                    step = self._outers[fragment][place].step if self._outers else None
                    flights.append(self.send(block, span, step, late=is_late))
            self._exchanges += 1
            self._bytes += sum(flight.values.nbytes for flight in flights)
            flying = sum(flight.values.nbytes for flight in self._flying())
            self._peak_bytes = max(self._peak_bytes, flying * (2 if is_late else 1))
        if not is_late:
            self._land(leaving)

    def _flying(self) -> list[Flight]:
        return [flight for flights in self._flights.values() for flight in flights]

    def _land(self, fragments: list[int]) -> None:
        self.land([flight for fragment in fragments for flight in self._flights.pop(fragment, ())])

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        self.land(self._flying())
        if not leave:
            self._flights.clear()
        yield

    def kept(self) -> dict[str, Any]:
        for flight in self._flying():
            self.arrived(flight)  # the owner's step of a fragment in flight may be under way
        self.check_landed(self.acted + 1)
        if self._make_outer is None:
            return {}
        if not self._outers:
            raise UnsupportedConfigurationError(
                "expected a state that is in use, got one whose outer optimizer is gone: it was closed; save before"
            )
        states = [[outer.state() for outer in outers] for outers in self._outers]
        names = sorted({name for each in states for tensors, _ in each for name in tensors})
        return {
            "fragments": self._schedule.fragments,
            "tensors": {name: self._gathered(name) for name in names},
            "parts": [
                [dict.fromkeys(tensors) | numbers for tensors, numbers in each] for each in states
            ],
        }

    def _gathered(self, name: str) -> dict[str, torch.Tensor]:
        """Gather what owners keep of this name, by the tensors' names: zeros where there is none. **Collective**."""
        found: dict[str, torch.Tensor] = {}
        for place, block in enumerate(self.blocks):
            whole = torch.zeros(block.numel, dtype=wide(block.dtype), device=block.device)
            for outer in [outers[place] for outers in self._outers]:
                if (own := outer.state()[0].get(name)) is not None:
                    whole[slice(*outer.span)] = own
                    self.exchange.gather(whole[slice(*outer.piece)], outer.layout, KEPT)
            found.update(block.named(whole))
        return found

    def load(self, kept: dict[str, Any]) -> None:
        if kept:
            check_keys(kept, {"fragments", "tensors", "parts"}, "the state of a LocalSGDState")
        has = bool(kept)
        if has != (self._make_outer is not None):
            raise ValueError(
                f"expected a state saved {'without' if has else 'with'} an outer optimizer, got one saved "
                f"{'with' if has else 'without'} it; make LocalSGDState as it was when the state was saved"
            )
        if has and kept["fragments"] != self._schedule.fragments:
            raise ValueError(
                f"expected fragments={kept['fragments']} as when the state was saved, got "
                f"fragments={self._schedule.fragments}; pass the same"
            )
        self._loaded = kept

    def stats(self) -> dict[str, Any]:
        outers = [outer for each in self._outers for outer in each]
        return {
            "exchanges": self._exchanges,
            "exchanged_bytes": self._bytes,
            "in_flight": len(self._flights),
            "peak_bytes": self._peak_bytes,
            "outer_bytes": sum(
                each.nbytes for outer in outers for each in outer.state()[0].values()
            ),
        }

    def close(self) -> None:
        self._flights.clear()
        self._outers.clear()
