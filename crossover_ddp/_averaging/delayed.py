"""Local SGD: a snapshot leaves, its mean comes back some steps later, and local progress in between is kept.

[Note: delta rule] A rank sends s, its parameters after step k, and adds mean(s) - s to what it has after step k + d.
With d = 0 that is the mean itself. After CoCoD-SGD and DaSGD (arXiv 2006.00441); fragments after streaming DiLoCo.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.trips import Trip

from .checks import check_finite
from .flat import FlatBlock, wide
from .means import Means
from .outer import OuterOptimizer, OuterPart, described
from .schedule import Schedule, fragment_span

if TYPE_CHECKING:
    from .replica import Replica


@dataclass(eq=False)
class _Flight:
    """One fragment of one block on its way.

    ``values`` comes back as the mean, or, if what was ``sent`` is kept, as the difference from that.
    """

    block: FlatBlock
    span: Span
    values: torch.Tensor
    sent: torch.Tensor | None
    trip: Trip


class DelayedMeans:
    """The rule of `LocalSGDState`.

    Args:
        schedule: when fragments leave and come back.
        outer_optimizer: steps the mean; None takes it as it is.
    """

    def __init__(self, schedule: Schedule, outer_optimizer: OuterOptimizer | None) -> None:
        self.schedule = schedule
        self._make_outer = outer_optimizer
        self._outer: dict[tuple[int, int], OuterPart] = {}
        self._flights: dict[int, list[_Flight]] = {}
        self._loaded: dict[str, Any] | None = None
        self._steps = 0
        self._counts = {"exchanges": 0, "exchanged_bytes": 0}
        self._peak_bytes = 0
        self._means: Means
        self._replica: Replica

    def __repr__(self) -> str:
        outer = "no outer optimizer" if self._make_outer is None else "an outer optimizer"
        return f"{self.schedule} and {outer}"

    @property
    def settings(self) -> Mapping[str, object]:
        """See `Rule`."""
        outer = None if self._make_outer is None else described(self._make_outer)
        return {**asdict(self.schedule), "outer_optimizer": outer}

    @property
    def steps_together(self) -> bool:
        """See `Rule`."""
        return True

    @property
    def has_local_steps(self) -> bool:
        """See `Rule`."""
        return self.schedule.has_local_steps

    def is_local(self, steps: int) -> bool:
        """See `Rule`."""
        return self.schedule.is_local(steps)

    def begin(self, replica: "Replica") -> None:
        """See `Rule`."""
        assert replica.means is not None
        self._replica, self._means = replica, replica.means
        if self._make_outer is None:
            return
        for place, block in enumerate(self._means.blocks):
            for fragment in range(self.schedule.fragments):
                span = fragment_span(block.numel, fragment, self.schedule.fragments)
                own = self._own(block, span)
                self._outer[place, fragment] = OuterPart(block, own, self._make_outer)
        if self._loaded is not None:
            self._load_outer(self._loaded)
            self._loaded = None

    def _own(self, block: FlatBlock, span: Span) -> Span:
        # A part of a fragment is cut by the wire's dtype, which is the block's.
        own = self._means.own_span(torch.empty(span.numel, dtype=block.dtype, device=block.device))
        return Span(span.start + own.start, span.start + own.stop)

    # --- between two steps -----------------------------------------------------------------------------------

    def act(self, steps: int) -> None:
        """See `Rule`."""
        self._steps = steps
        late = self.schedule.delay > 0
        if late:
            for fragment in self.schedule.arriving(steps):
                self._collect(fragment)
        leaving = self.schedule.leaving(steps)
        for fragment in leaving:
            self._leave(fragment, steps)
        if not late:
            for fragment in leaving:
                self._collect(fragment)

    def _leave(self, fragment: int, steps: int) -> None:
        flights = []
        for place, block in enumerate(self._means.blocks):
            span = fragment_span(block.numel, fragment, self.schedule.fragments)
            if span.numel == 0:
                continue
            values = torch.empty(span.numel, dtype=block.dtype, device=block.device)
            block.pack(span, values)
            sent = values.clone() if self.schedule.delay else None
            outer = self._outer.get((place, fragment))
            trip = self._means.begin(values, owner_step=None if outer is None else outer.step, sent=sent)
            flights.append(_Flight(block, span, values, sent, trip))
            self._counts["exchanged_bytes"] += values.nbytes
        self._flights[fragment] = flights
        self._counts["exchanges"] += 1
        self._peak_bytes = max(self._peak_bytes, self._flying_bytes())

    def _collect(self, fragment: int) -> None:
        """Apply what has come back; nothing if it was collected early, by `at_rest`."""
        for flight in self._flights.pop(fragment, ()):
            self._land(flight)

    def _land(self, flight: _Flight) -> None:
        if flight.sent is None:
            self._replica.wait_without_turn(flight.trip)
        else:
            self._replica.wait(flight.trip)
        own = flight.block.pieces(flight.span) if flight.sent is None else [flight.sent]
        check_finite(flight.values, self._means.exchange.rank, self._steps, own)
        if flight.sent is None:
            flight.block.unpack(flight.span, flight.values)
        else:
            flight.block.add(flight.span, flight.values)

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """See `Rule`."""
        for fragment, flights in list(self._flights.items()):
            for flight in flights:
                self._land(flight)
            if not leave:
                del self._flights[fragment]
        yield

    # --- what is kept ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Rule`."""
        for flights in self._flights.values():
            for flight in flights:
                self._replica.wait(flight.trip)  # the owner's step of a fragment in flight may be under way
        if self._make_outer is None:
            return {}
        numbers = {f: part.numbers() for (place, f), part in self._outer.items() if place == 0}
        names = sorted(next(iter(self._outer.values())).tensors()) if self._outer else []
        return {
            "fragments": self.schedule.fragments,
            "anchor": self._gathered(lambda part: part.anchor),
            "state": {name: self._gathered(lambda part, name=name: part.tensors()[name]) for name in names},
            "numbers": numbers,
        }

    def _gathered(self, get: Any) -> dict[str, torch.Tensor]:
        """Gather what all owners keep, by name. **Collective**."""
        found: dict[str, torch.Tensor] = {}
        for place, block in enumerate(self._means.blocks):
            whole = torch.zeros(block.numel, dtype=wide(block.dtype), device=block.device)
            for fragment in range(self.schedule.fragments):
                span = fragment_span(block.numel, fragment, self.schedule.fragments)
                like = torch.empty(span.numel, dtype=block.dtype, device=block.device)
                whole[span.start : span.stop] = self._means.gather(like, get(self._outer[place, fragment]))
            found.update(block.named(whole))
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
        has = "anchor" in state
        if has != (self._make_outer is not None):
            raise ValueError(
                f"expected a state saved {'without' if has else 'with'} an outer optimizer, got one saved "
                f"{'with' if has else 'without'} it; make LocalSGDState as it was when the state was saved"
            )
        if has and state["fragments"] != self.schedule.fragments:
            raise ValueError(
                f"expected fragments={state['fragments']} as when the state was saved, got "
                f"fragments={self.schedule.fragments}; pass the same"
            )
        self._loaded = state if has else None

    def _load_outer(self, state: dict[str, Any]) -> None:
        for place, block in enumerate(self._means.blocks):
            dtype = wide(block.dtype)
            anchor = block.unnamed(state["anchor"], dtype)
            tensors = {name: block.unnamed(values, dtype) for name, values in state["state"].items()}
            for fragment in range(self.schedule.fragments):
                part = self._outer[place, fragment]
                own = slice(part.span.start, part.span.stop)
                part.load(
                    anchor[own],
                    {name: each[own] for name, each in tensors.items()},
                    state["numbers"][fragment],
                )

    def _flying_bytes(self) -> int:
        flying = [flight for flights in self._flights.values() for flight in flights]
        return sum(f.values.nbytes + (0 if f.sent is None else f.sent.nbytes) for f in flying)

    def stats(self) -> dict[str, Any]:
        """See `Rule`."""
        return {
            **self._counts,
            "in_flight": len(self._flights),
            "peak_bytes": self._peak_bytes,
            "outer_bytes": sum(part.nbytes for part in self._outer.values()),
        }

    def close(self) -> None:
        """See `Rule`."""
        self._flights.clear()
        self._outer.clear()
