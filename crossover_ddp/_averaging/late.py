"""Local SGD: a snapshot leaves, its mean comes back some steps later, and local progress in between is kept.

[Note: delta rule] A rank sends s, its parameters after step k, and adds mean(s) - s to what it has after step k + d.
With d = 0 that is the mean itself. After CoCoD-SGD and DaSGD (arXiv 2006.00441); fragments after streaming DiLoCo.

[Note: outer steps around the mean] After DiLoCo (arXiv 2311.08105, and the code of its followers) the outer gradient is
Δ = z - mean(x), where z are the parameters after the last outer step. The optimizer does not step z itself but the
distance p = z - mean, and z becomes mean + p. That is the same step for every optimizer that does not look at the
parameters' values, and with rate 1 and without momentum p is exactly 0: then the step is the mean, to the last bit.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Layout

from .replica import FlatBlock, Replica, Rule, all_finite, gather, wide
from .schedule import Schedule, fragment_span

OuterOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]

_DECAY: Final = "weight_decay"


class OuterPart:
    """What one owner keeps of one slice: z and the optimizer's state, over the parameters in its part.

    Args:
        block: of the model.
        span: the own part, in the block; buffers in it are averaged and not stepped.
        make: makes the optimizer.
    """

    def __init__(self, block: FlatBlock, span: Span, make: OuterOptimizer) -> None:
        self.span = Span(span.start, max(span.start, min(span.stop, block.parameters_numel)))
        self.anchor = block.copy(self.span, wide(block.dtype))
        """z."""
        self._distance = torch.nn.Parameter(self.anchor.new_empty(0))
        self._optimizer = make([self._distance])

    def step(self, mean: torch.Tensor) -> None:
        """Replace the mean of the own part by the next z, see [Note: outer steps around the mean]."""
        own = mean[: len(self.anchor)]
        if own.device.type == "cpu" and not all_finite([own]):
            return  # every rank will see it, and refuse it
        values = own.to(self.anchor.dtype)
        gradient = self.anchor - values
        self._distance.data, self._distance.grad = gradient.clone(), gradient
        self._optimizer.step()
        torch.add(values, self._distance.data, out=self.anchor)
        own.copy_(self.anchor)
        self._distance.data, self._distance.grad = self.anchor.new_empty(0), None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state for each element, by name."""
        return {key: value for key, value in self._state().items() if self._is_elementwise(value)}

    def numbers(self) -> dict[str, float]:
        """Return the rest of its state, such as a count of steps."""
        return {key: float(value) for key, value in self._state().items() if _is_number(value)}

    def load(self, anchor: torch.Tensor, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        """Take over what `tensors` and `numbers` returned, of the whole block."""
        own = slice(*self.span)
        self.anchor.copy_(anchor[own])
        state = self._optimizer.state[self._distance]
        state.update({key: value[own].clone() for key, value in tensors.items()})
        state.update({key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()})

    def _state(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._distance, {}))

    def _is_elementwise(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == len(self.anchor)


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
        """Bytes in memory."""
        return self.values.nbytes * (1 if self.sent is None else 2)


class LateMeans(Rule):
    """The rule of ``LocalSGDState``.

    Args:
        schedule: when fragments leave and come back.
        outer_optimizer: steps the mean; None takes it as it is.
    """

    def __init__(self, schedule: Schedule, outer_optimizer: OuterOptimizer | None) -> None:
        outer = None if outer_optimizer is None else described(outer_optimizer)
        self.settings = {**asdict(schedule), "outer_optimizer": outer}
        self.has_local_steps = schedule.has_local_steps
        self._schedule, self._make_outer = schedule, outer_optimizer
        self._slices: list[list[_Slice]] = []  # by fragment
        self._flights: dict[int, list[_Flight]] = {}
        self._loaded: dict[str, Any] | None = None
        self._steps = self._exchanges = self._bytes = self._peak_bytes = 0

    def is_local(self, steps: int) -> bool:
        """See `Rule`."""
        return self._schedule.is_local(steps)

    def begin(self, replica: Replica) -> None:
        """See `Rule`."""
        super().begin(replica)
        fragments = range(self._schedule.fragments)
        self._slices = [[self._slice(block, fragment) for block in replica.blocks] for fragment in fragments]
        if self._loaded is not None:
            self._load_outer(self._loaded)
            self._loaded = None

    def _slice(self, block: FlatBlock, fragment: int) -> _Slice:
        exchange, make = self.replica.exchange, self._make_outer
        span = fragment_span(block.numel, fragment, self._schedule.fragments)
        # Cut by the wire's dtype, which is the block's.
        layout = exchange.equal_layout(torch.empty(span.numel, dtype=block.dtype, device=block.device))
        start = span.start + sum(layout[: exchange.rank])
        own = Span(start, start + layout[exchange.rank])
        return _Slice(block, span, layout, None if make is None else OuterPart(block, own, make))

    # --- between two steps -----------------------------------------------------------------------------------

    def act(self, steps: int) -> None:
        """See `Rule`."""
        self._steps = steps
        arriving, leaving = self._schedule.arriving(steps), self._schedule.leaving(steps)
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
        return _Flight(piece, values, sent, self.replica.begin_mean(values, owner_step=step, sent=sent))

    def _land(self, fragments: Sequence[int], *, leave: bool = False) -> None:
        """Apply what has come back; nothing of what was applied early, by `at_rest`."""
        for fragment in fragments:
            for (block, span, _, _), values, sent, trip in self._flights.get(fragment, ()):
                self.replica.wait(trip, without_turn=sent is None)
                if sent is None:
                    self.replica.check_finite(values, block.pieces(span), self._steps)
                    block.unpack(span, values)
                else:
                    block.add(span, self.replica.finite_or_zero(values, sent, self._steps))
            if not leave:
                self._flights.pop(fragment, None)

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """See `Rule`."""
        self._land(list(self._flights), leave=leave)
        yield

    # --- what is kept ----------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Any]:
        """See `Rule`."""
        for flights in self._flights.values():
            for flight in flights:
                self.replica.wait(flight.trip)  # the owner's step of a fragment in flight may be under way
        if self._make_outer is None:
            return {}
        firsts = [slices[0].outer for slices in self._slices]
        return {
            "fragments": self._schedule.fragments,
            "anchor": self._gathered(None),
            "state": {
                name: self._gathered(name) for name in sorted(firsts[0].tensors() if firsts[0] else ())
            },
            "numbers": {fragment: outer.numbers() for fragment, outer in enumerate(firsts) if outer},
        }

    def _gathered(self, name: str | None) -> dict[str, torch.Tensor]:
        """Gather what all owners keep of this name, or z, by the tensors' names. **Collective**."""
        found: dict[str, torch.Tensor] = {}
        for place, block in enumerate(self.replica.blocks):
            whole = torch.zeros(block.numel, dtype=wide(block.dtype), device=block.device)
            for _, span, layout, outer in [slices[place] for slices in self._slices]:
                assert outer is not None
                whole[slice(*outer.span)] = outer.anchor if name is None else outer.tensors()[name]
                gather(self.replica.exchange, whole[slice(*span)], layout)
            found.update(block.named(whole))
        return found

    def load(self, kept: dict[str, Any]) -> None:
        """See `Rule`."""
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
        for place, block in enumerate(self.replica.blocks):
            dtype = wide(block.dtype)
            anchor = block.unnamed(kept["anchor"], dtype)
            tensors = {name: block.unnamed(values, dtype) for name, values in kept["state"].items()}
            for fragment, slices in enumerate(self._slices):
                outer = slices[place].outer
                assert outer is not None
                outer.load(anchor, tensors, kept["numbers"][fragment])

    def stats(self) -> dict[str, Any]:
        """See `Rule`."""
        outers = [each.outer for slices in self._slices for each in slices if each.outer is not None]
        return {
            "exchanges": self._exchanges,
            "exchanged_bytes": self._bytes,
            "in_flight": len(self._flights),
            "peak_bytes": self._peak_bytes,
            "outer_bytes": sum(
                t.nbytes for outer in outers for t in (outer.anchor, *outer.tensors().values())
            ),
        }

    def close(self) -> None:
        """See `Rule`."""
        self._flights.clear()
        self._slices.clear()


# --- which optimizers may step the mean ----------------------------------------------------------------------------


def check_outer(make: OuterOptimizer) -> None:
    """Refuse what cannot make an optimizer, or one that looks at the parameters' values."""
    remedy = (
        "pass a function of the parameters such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)"
    )
    if not callable(make) or isinstance(make, Optimizer):
        raise TypeError(
            f"expected outer_optimizer to make an optimizer, got outer_optimizer={make!r}; {remedy}"
        )
    made = make([torch.nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise TypeError(f"expected outer_optimizer to make an optimizer, got {type(made).__name__}; {remedy}")
    decay = made.param_groups[0].get(_DECAY, 0)
    if decay:
        raise ValueError(
            f"expected an outer optimizer without weight decay, got weight_decay={decay}; let the inner one decay"
        )
    if not torch.equal(_first_step(make, torch.ones(2)), _first_step(make, torch.zeros(2))):
        raise ValueError(
            f"expected an outer optimizer whose step depends on gradients alone, got {type(made).__name__}; use SGD "
            "(with momentum, Nesterov or not) or Adam without weight decay"
        )


def described(make: OuterOptimizer) -> str:
    """Return the optimizer's class and arguments as a text."""
    made = make([torch.nn.Parameter(torch.zeros(1))])
    given = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    return f"{type(made).__name__}({given})"


def _first_step(make: OuterOptimizer, at: torch.Tensor) -> torch.Tensor:
    probe = torch.nn.Parameter(at.clone())
    probe.grad = torch.ones(2)
    make([probe]).step()
    return (probe.detach() - at).round(decimals=4)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
