"""Local SGD: a snapshot leaves, its mean comes back some steps later, and local progress in between is kept.

[Note: delta rule] A rank sends s, its parameters after step k, and adds mean(s) - s to what it has after step k + d.
With d = 0 that is the mean itself. After CoCoD-SGD and DaSGD (arXiv 2006.00441); fragments after streaming DiLoCo.

[Note: the clock] What counts is the number of backward passes that reached the hook, which is the same on all ranks.
``optimizer.step()`` does not count: a GradScaler skips it on one rank alone. What is due after n of them happens before
the next training forward: then the update of the n-th is in the parameters.

[Note: outer steps] After DiLoCo (arXiv 2311.08105, and the code of its followers): z are the parameters after the last
outer step, and the outer optimizer steps them by the gradient z - mean(x), each owner its part.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Layout, all_finite

from .replica import FlatBlock, Replica, gather, wide

OuterOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]


# --- when: pure ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Which fragments leave, and which come back, after how many backward passes.

    Args:
        sync_every: steps from one exchange of an element to the next.
        delay: steps from its leaving to its coming back.
        fragments: number of equal slices of the flat parameters; they leave evenly spread over the interval.
        warmup_steps: steps before the first local one.
    """

    sync_every: int
    delay: int = 0
    fragments: int = 1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_count("sync_every", self.sync_every, 1, "pass the steps between two exchanges")
        _check_count("delay", self.delay, 0, "pass the steps that an exchange may take")
        _check_count("fragments", self.fragments, 1, "pass the number of slices")
        _check_count("warmup_steps", self.warmup_steps, 0, "pass the steps that are averaged as by DDP")
        if self.sync_every < self.delay + 1:
            raise ValueError(
                f"expected sync_every >= delay + 1, got sync_every={self.sync_every} and delay={self.delay}: with two "
                "exchanges of one element in flight corrections are counted twice; "
                f"pass sync_every={self.delay + 1} or more"
            )
        if self.sync_every == 1 and self.fragments > 1:
            raise ValueError(
                f"expected fragments=1 with sync_every=1, got fragments={self.fragments}; every step averages all "
                "gradients then, and no parameters"
            )

    @property
    def has_local_steps(self) -> bool:
        """Whether any step, however late, uses this rank's gradients alone."""
        return self.sync_every > 1

    def is_local(self, steps: int) -> bool:
        """Whether the step after ``steps`` of them uses this rank's gradients alone."""
        return self.has_local_steps and steps >= self.warmup_steps

    def leaving(self, steps: int) -> tuple[int, ...]:
        local = steps - self.warmup_steps
        if local <= 0 or self.sync_every == 1:
            return ()
        return tuple([f for f in range(self.fragments) if (local - self._offset(f)) % self.sync_every == 0])

    def arriving(self, steps: int) -> tuple[int, ...]:
        return self.leaving(steps - self.delay)

    def _offset(self, fragment: int) -> int:
        return fragment * self.sync_every // self.fragments


def fragment_span(numel: int, fragment: int, fragments: int) -> Span:
    """Return the slice of a flat vector; slices differ by one element at most."""
    return Span(numel * fragment // fragments, numel * (fragment + 1) // fragments)


def _check_count(name: str, value: int, least: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected an integer {name} >= {least}, got {name}={value!r}; {remedy}")


# --- the outer optimizer ---------------------------------------------------------------------------------------------


def described(make: OuterOptimizer) -> str:
    """Return the optimizer's class and arguments as a text; refuse what makes none."""
    made = None if isinstance(make, Optimizer) or not callable(make) else make(_nothing())
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"expected outer_optimizer to make an optimizer, got outer_optimizer={make!r}; pass a function of the "
            "parameters such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)"
        )
    given = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    return f"{type(made).__name__}({given})"


def _nothing() -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.zeros(1))]


class OuterPart:
    """What one owner keeps of one slice: z and the optimizer's state, over the parameters in its part.

    ``span`` is the own part, in the block; buffers in it are averaged and not stepped.
    """

    def __init__(self, block: FlatBlock, span: Span, make: OuterOptimizer) -> None:
        self.span = Span(span.start, max(span.start, min(span.stop, block.parameters_numel)))
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

    def load(self, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        """Take over what `state` returned; tensors are of the whole block."""
        own = {key: value[slice(*self.span)] for key, value in tensors.items()}
        self.anchor.data.copy_(own.pop("anchor"))
        state = self._optimizer.state[self.anchor]
        state.update({key: value.clone() for key, value in own.items()})
        state.update({key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()})


# --- what travels ----------------------------------------------------------------------------------------------------


class _Slice(NamedTuple):
    """One fragment of one block, who owns what of it, and what this owner keeps."""

    block: FlatBlock
    span: Span
    layout: Layout
    outer: OuterPart | None


class _Flight(NamedTuple):
    """A slice on its way: ``values`` come back as the mean, or as its difference from what was ``sent``."""

    piece: _Slice
    values: torch.Tensor
    sent: torch.Tensor | None
    trip: Trip

    @property
    def nbytes(self) -> int:
        return self.values.nbytes * (1 if self.sent is None else 2)


class LateMeans(Replica):
    """The rule of ``LocalSGDState``."""

    def __init__(self, schedule: Schedule, outer_optimizer: OuterOptimizer | None) -> None:
        outer = None if outer_optimizer is None else described(outer_optimizer)
        self.settings = {**asdict(schedule), "outer_optimizer": outer}
        self.has_local_steps = schedule.has_local_steps
        self._schedule, self._make_outer = schedule, outer_optimizer
        self._slices: list[list[_Slice]] = []  # by fragment
        self._flights: dict[int, list[_Flight]] = {}
        self._loaded: dict[str, Any] | None = None
        self._exchanges = self._bytes = self._peak_bytes = 0

    def is_local(self, steps: int) -> bool:
        return self._schedule.is_local(steps)

    def begin(self) -> None:
        fragments = range(self._schedule.fragments)
        self._slices = [[self._slice(block, fragment) for block in self.blocks] for fragment in fragments]
        if self._loaded is not None:
            self._load_outer(self._loaded)
            self._loaded = None

    def _slice(self, block: FlatBlock, fragment: int) -> _Slice:
        exchange, make = self.exchange, self._make_outer
        span = fragment_span(block.numel, fragment, self._schedule.fragments)
        # Cut by the wire's dtype, which is the block's.
        layout = exchange.equal_layout(torch.empty(span.numel, dtype=block.dtype, device=block.device))
        start = span.start + sum(layout[: exchange.rank])
        own = Span(start, start + layout[exchange.rank])
        return _Slice(block, span, layout, None if make is None else OuterPart(block, own, make))

    # --- between two steps -----------------------------------------------------------------------------------

    def act(self) -> None:
        arriving, leaving = self._schedule.arriving(self.acted), self._schedule.leaving(self.acted)
        if self._schedule.delay:
            self._land(arriving)
        self._leave(leaving)
        if not self._schedule.delay:
            self._land(leaving)

    def _leave(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self._flights[fragment] = [
                self._send(piece) for piece in self._slices[fragment] if sum(piece.layout)
            ]
            self._exchanges += 1
            flying = [flight for flights in self._flights.values() for flight in flights]
            self._peak_bytes = max(self._peak_bytes, sum(flight.nbytes for flight in flying))

    def _send(self, piece: _Slice) -> _Flight:
        values = piece.block.copy(piece.span)
        sent = values.clone() if self._schedule.delay else None
        step = None if piece.outer is None else piece.outer.step
        self._bytes += values.nbytes
        return _Flight(piece, values, sent, self.begin_mean(values, owner_step=step, sent=sent))

    def _land(self, fragments: Sequence[int], *, leave: bool = False) -> None:
        """Apply what has come back; nothing of what was applied early, by `at_rest`."""
        for fragment in fragments:
            for (block, span, _, _), values, sent, trip in self._flights.get(fragment, ()):
                self.wait(trip, without_turn=sent is None)
                if sent is None:
                    self.check_finite(values, block.pieces(span))
                    block.unpack(span, values)
                else:
                    block.add(span, self.finite_or_zero(values, sent))
            if not leave:
                self._flights.pop(fragment, None)

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        self._land(list(self._flights), leave=leave)
        yield

    # --- what is kept ----------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Any]:
        for flights in self._flights.values():
            for flight in flights:
                self.wait(flight.trip)  # the owner's step of a fragment in flight may be under way
        if self._make_outer is None:
            return {}
        outers = [slices[0].outer for slices in self._slices]
        names = () if outers[0] is None else outers[0].state()[0]
        state = {name: self._gathered(name) for name in sorted(names)}
        return {
            "fragments": self._schedule.fragments,
            "anchor": state.pop("anchor"),
            "state": state,
            "numbers": {fragment: outer.state()[1] for fragment, outer in enumerate(outers) if outer},
        }

    def _gathered(self, name: str) -> dict[str, torch.Tensor]:
        """Gather what all owners keep of this name, by the tensors' names. **Collective**."""
        found: dict[str, torch.Tensor] = {}
        for place, block in enumerate(self.blocks):
            whole = torch.zeros(block.numel, dtype=wide(block.dtype), device=block.device)
            for _, span, layout, outer in [slices[place] for slices in self._slices]:
                assert outer is not None
                whole[slice(*outer.span)] = outer.state()[0][name]
                gather(self.exchange, whole[slice(*span)], layout)
            found.update(block.named(whole))
        return found

    def load(self, kept: dict[str, Any]) -> None:
        has = "anchor" in kept
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
        self._loaded = kept if has else None

    def _load_outer(self, kept: dict[str, Any]) -> None:
        for place, block in enumerate(self.blocks):
            named = {"anchor": kept["anchor"], **kept["state"]}
            tensors = {name: block.unnamed(values, wide(block.dtype)) for name, values in named.items()}
            for fragment, slices in enumerate(self._slices):
                outer = slices[place].outer
                assert outer is not None
                outer.load(tensors, kept["numbers"][fragment])

    def stats(self) -> dict[str, Any]:
        outers = [each.outer for slices in self._slices for each in slices if each.outer is not None]
        return {
            "exchanges": self._exchanges,
            "exchanged_bytes": self._bytes,
            "in_flight": len(self._flights),
            "peak_bytes": self._peak_bytes,
            "outer_bytes": sum(each.nbytes for outer in outers for each in outer.state()[0].values()),
        }

    def close(self) -> None:
        self._flights.clear()
        self._slices.clear()
