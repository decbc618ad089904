"""Local SGD: ranks send snapshots, receive the mean some steps later, and keep local progress.

[Note: delta rule] A rank sends s, its parameters after step k. After step k + d it adds
mean(s) - s to its parameters. With d = 0 the result is the mean itself. The rule follows CoCoD-SGD
and DaSGD (arXiv 2006.00441); fragments follow streaming DiLoCo.

[Note: the clock] A step is counted for each backward pass that reaches the hook, since all ranks
run the same number of those. Calls of ``optimizer.step()`` are not counted, because a GradScaler
may skip one on a single rank. Exchanges that are due after n backward passes run before the next
training forward. By then the parameters include the n-th update.

[Note: outer steps] These follow DiLoCo (arXiv 2311.08105, and the code of its followers). Let z be
the parameters after the last outer step. The outer optimizer updates z with the gradient
z - mean(x). Each owner updates its own part.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import check_keys
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Layout, all_finite
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp.errors import UnsupportedConfigurationError

from .increments import Increments, MakeCodec
from .replica import (
    OWNED_STATE,
    FlatBlock,
    PendingSlice,
    Replica,
    wide_dtype,
)

OuterOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]
OuterRate = Callable[[int], float]


@dataclass(frozen=True)
class Schedule:
    """Computes after which backward passes each fragment is sent and applied. Pure.

    The fields are arguments of ``LocalSGDState``.
    """

    sync_every: int
    delay: int = 0
    fragments: int = 1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in {"sync_every": 1, "delay": 0, "fragments": 1, "warmup_steps": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"expected an integer {name} >= {least}, got {name}={value!r}; "
                    "see LocalSGDState"
                )
        # A slice may be sent in the step in which its last mean arrives, which is applied first.
        if self.sync_every < self.delay:
            raise ValueError(
                f"expected sync_every >= delay, got sync_every={self.sync_every} and "
                f"delay={self.delay}: two exchanges of the same element would be in flight, and "
                f"both would be added; pass sync_every={self.delay} or more"
            )
        if self.sync_every == 1 and self.fragments > 1:
            raise ValueError(
                f"expected fragments=1 with sync_every=1, got fragments={self.fragments}: all of "
                "them would leave in every step; leave fragments out"
            )

    @property
    def local_from(self) -> float:
        """The number of steps after which each step uses only this rank's gradients."""
        return self.warmup_steps if self.is_local else math.inf

    @property
    def is_local(self) -> bool:
        """Whether ranks train on their own gradients at all."""
        return self.sync_every > 1 or self.delay > 0

    def leaving(self, steps: int) -> list[int]:
        """Return the fragments that are sent after ``steps`` steps."""
        every = self.sync_every
        local = steps - self.local_from
        if local <= 0:
            return []
        return [
            f for f in range(self.fragments) if (local - f * every // self.fragments) % every == 0
        ]

    def arriving(self, steps: int) -> list[int]:
        """Return the fragments whose means are applied after ``steps`` steps."""
        return self.leaving(steps - self.delay)

    def span(self, numel: int, fragment: int) -> Span:
        """Return a fragment's slice of a flat vector. Slice lengths differ by at most one."""
        return Span(numel * fragment // self.fragments, numel * (fragment + 1) // self.fragments)


def _shortened(layout: Layout, numel: int) -> Layout:
    """Return the layout of the first ``numel`` elements."""
    stops = [min(stop, numel) for stop in accumulate(layout, initial=0)]
    return [stop - start for start, stop in pairwise(stops)]


def constant(rate: float) -> OuterRate:
    """Return a schedule of the outer learning rate that never changes."""
    return lambda steps: rate


def described(make: OuterOptimizer) -> str:
    """Return the optimizer's class and arguments as text; refuse a ``make`` that returns none."""
    is_function = callable(make) and not isinstance(make, Optimizer)
    made = make([torch.nn.Parameter(torch.zeros(1))]) if is_function else None
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"expected outer_optimizer to make an optimizer, got outer_optimizer={make!r}; pass a "
            "function of the parameters such as functools.partial(torch.optim.SGD, lr=0.7, "
            "momentum=0.9)"
        )
    given = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    return f"{type(made).__name__}({given})"


class OuterPart:
    """An owner's part of one block's fragment, with its z and its outer optimizer state.

    Only parameters take outer steps. Buffers are just averaged.
    """

    def __init__(
        self, block: FlatBlock, piece: Span, exchange: Exchange, make: OuterOptimizer
    ) -> None:
        self.piece = piece
        # The parts must match those of the exchange, which uses the dtype of the block.
        flat = torch.empty(piece.numel, dtype=block.dtype, device=block.device)
        self.layout = exchange.equal_layout(flat)
        rank = exchange.rank
        start = piece.start + sum(self.layout[:rank])
        stop = min(start + self.layout[rank], block.parameters_numel)
        self.span = Span(start, max(start, stop))
        # z, see [Note: outer steps].
        self.anchor = torch.nn.Parameter(block.copy(self.span, wide_dtype(block.dtype)))
        self._optimizer = make([self.anchor])

    def set_rate(self, rate: float) -> None:
        """Set the outer learning rate of the steps to come."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self, mean: torch.Tensor) -> None:
        """Replace the mean of this part with the next z; see [Note: outer steps]."""
        own = mean[: len(self.anchor)]
        if self._update(own.to(self.anchor.dtype) - self.anchor.detach()):
            own.copy_(self.anchor.detach())

    def step_by(self, mean_increment: torch.Tensor) -> None:
        """Replace the mean increment of this part with the change of z in an outer step."""
        own = mean_increment[: len(self.anchor)]
        former = self.anchor.detach().clone()
        if self._update(own):
            torch.sub(self.anchor.detach(), former, out=own)

    def _update(self, progress: torch.Tensor) -> bool:
        """Take an outer step, and return True; do nothing if ``progress`` is not finite."""
        if progress.device.type == "cpu" and not all_finite(progress):
            return False  # the optimizer's state stays finite, and all ranks refuse the mean
        self.anchor.grad = -progress
        self._optimizer.step()
        self.anchor.grad = None
        return True

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the per-element state, including z, and single numbers such as "step"."""
        tensors = {"anchor": self.anchor.detach()}
        numbers: dict[str, float] = {}
        # A copy, since a journey may be taking this part's first step.
        for key, value in [*self._optimizer.state.get(self.anchor, {}).items()]:
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.shape == self.anchor.shape:
                tensors[key] = value
            elif isinstance(value, int | float) or (is_tensor and value.dim() == 0):
                numbers[key] = float(value)
        return tensors, numbers

    def load(self, tensors: dict[str, torch.Tensor], part: dict[str, float | None]) -> None:
        """Load the state of this part.

        Args:
            tensors: maps each key to the per-element state of the whole block.
            part: maps each key to a single number, or to None if the state is in ``tensors``.
        """
        state = {}
        for key, number in part.items():
            if number is None:
                state[key] = tensors[key][slice(*self.span)].clone()
            else:
                state[key] = torch.tensor(number, dtype=torch.float32)
        self.anchor.data.copy_(state.pop("anchor"))
        self._optimizer.state[self.anchor].update(state)


class LocalSGDReplica(Replica):
    """The replica of ``LocalSGDState``."""

    def __init__(
        self,
        schedule: Schedule,
        outer_optimizer: OuterOptimizer | None,
        outer_lr: OuterRate | None = None,
        codec: object = None,
        make_codec: MakeCodec | None = None,
    ) -> None:
        """Create a replica.

        Args:
            schedule: when fragments are sent and applied.
            outer_optimizer: see ``LocalSGDState``.
            outer_lr: see ``LocalSGDState``.
            codec: a description of the codec of increments, for other ranks to compare.
            make_codec: makes the codec of a vector. None if parameters travel.
        """
        outer = None if outer_optimizer is None else described(outer_optimizer)
        first_step = schedule.warmup_steps + schedule.sync_every
        self.settings = {
            **asdict(schedule),
            "outer_optimizer": outer,
            "outer_lr": None if outer_lr is None else float(outer_lr(first_step)),
            "codec": codec,
        }
        self._make_codec = make_codec
        # The codec's statistics when the replica was closed.
        self._last_stats: dict[str, Any] | None = None
        # For each fragment and block that is exchanged, its increments. Empty without a codec.
        self._increments: dict[tuple[int, int], Increments] = {}
        self.local_from = schedule.local_from
        self._schedule = schedule
        self._make_outer = outer_optimizer
        self._outer_lr = outer_lr
        # A list for each fragment, with one part per block. Empty without an outer optimizer.
        self._outer_parts: list[list[OuterPart]] = []
        # The slices in flight, by fragment.
        self._pending: dict[int, list[PendingSlice]] = {}
        self._exchanges = 0
        self._bytes = 0
        self._peak_bytes = 0

    def adopt(self, blocks: Sequence[FlatBlock], *others: Any) -> None:
        for block in blocks if self._make_codec is not None else ():
            if block.parameters_numel and block.dtype != torch.float32:
                raise UnsupportedConfigurationError(
                    f"expected parameters of float32 with a codec, got dtype={block.dtype}, in "
                    "which small increments vanish; leave codec out, or train with autocast"
                )
        super().adopt(blocks, *others)

    def begin(self) -> None:
        make = self._make_outer
        if make is not None:
            for fragment in range(self._schedule.fragments):
                outers = []
                for block in self.blocks:
                    piece = self._schedule.span(block.numel, fragment)
                    outers.append(OuterPart(block, piece, self.exchange, make))
                self._outer_parts.append(outers)
        if self.loaded:
            self._restore(self.loaded)
        if self._make_codec is not None:
            self._begin_increments(self._make_codec)

    def _begin_increments(self, make_codec: MakeCodec) -> None:
        for number, block in enumerate(self.blocks):
            for fragment in range(self._schedule.fragments):
                span = self._schedule.span(block.numel, fragment)
                # Buffers follow the parameters, and may have a dtype of their own.
                parameters = Span(span.start, min(span.stop, block.parameters_numel))
                if parameters.start < parameters.stop:
                    common = block.copy(parameters)
                    increments = Increments(common, make_codec(block.runs(span)))
                    self._increments[fragment, number] = increments
        self._make_common()

    def _make_common(self) -> None:
        """Reset c to the parameters, which are the same on all ranks, or to z. **Collective**.

        It is called while no exchange is pending.
        """
        for (fragment, number), increments in self._increments.items():
            start = self._schedule.span(self.blocks[number].numel, fragment).start
            common = increments.common
            increments.codec.forget()
            self.blocks[number].pack(Span(start, start + len(common)), common)
            if self._outer_parts:
                outer = self._outer_parts[fragment][number]
                own = Span(outer.span.start - start, outer.span.stop - start)
                common[own.start : own.stop] = outer.anchor.detach()
                self.exchange.gather(common, _shortened(outer.layout, len(common)), OWNED_STATE)

    def _add_left_out(self) -> None:
        """Add the residuals of messages to the parameters; see [Note: increments]."""
        for (fragment, number), increments in self._increments.items():
            start = self._schedule.span(self.blocks[number].numel, fragment).start
            values = torch.zeros_like(increments.common)
            increments.codec.add_left_out(values)
            self.blocks[number].add(Span(start, start + len(values)), values)

    def _restore(self, state: dict[str, Any]) -> None:
        """Load a state dict into the outer optimizers."""
        for place, block in enumerate(self.blocks):
            dtype = wide_dtype(block.dtype)
            tensors = {
                name: block.unnamed(values, dtype) for name, values in state["tensors"].items()
            }
            for outers, parts in zip(self._outer_parts, state["parts"], strict=True):
                outers[place].load(tensors, parts[place])

    def act(self) -> None:
        is_late = self._schedule.delay > 0
        leaving = self._schedule.leaving(self.acted)
        if is_late:
            self._apply(self._schedule.arriving(self.acted))
        for fragment in leaving:
            self._send(fragment, is_late)
        if not is_late:
            self._apply(leaving)

    def _send(self, fragment: int, is_late: bool) -> None:
        slices = self._pending[fragment] = []
        for place, block in enumerate(self.blocks):
            span = self._schedule.span(block.numel, fragment)
            if span.start < span.stop:
                increments = self._increments.get((fragment, place))
                outer_step = None
                if self._outer_parts:
                    outer = self._outer_parts[fragment][place]
                    if self._outer_lr is not None:
                        outer.set_rate(self._outer_lr(self.acted))
                    outer_step = outer.step if increments is None else outer.step_by
                slices.append(
                    self.send(block, span, outer_step, late=is_late, increments=increments)
                )
        self._exchanges += 1
        self._bytes += sum(each.values.nbytes for each in slices)
        pending_bytes = sum(each.values.nbytes for each in self.in_flight())
        copies = 2 if is_late or self._increments else 1  # snapshots
        self._peak_bytes = max(self._peak_bytes, pending_bytes * copies)

    def in_flight(self) -> list[PendingSlice]:
        return [each for slices in self._pending.values() for each in slices]

    def _apply(self, fragments: list[int]) -> None:
        self.apply([each for number in fragments for each in self._pending.pop(number, ())])

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        self.apply(self.in_flight())
        if not leave:
            self._pending.clear()
        self._add_left_out()
        yield
        if not leave:  # all ranks now have the same parameters, which contain all residuals
            self._make_common()

    def state_dict(self) -> dict[str, Any]:
        for each in self.in_flight():
            self.result(each)  # wait: the owner may still be taking this fragment's outer step
        self.check_late_means(self.acted + 1)
        if self._make_outer is None:
            return {}
        if not self._outer_parts:
            raise UnsupportedConfigurationError(
                "this state was closed, and has dropped the outer optimizer's state; save before "
                "close()"
            )
        states = [[outer.state() for outer in outers] for outers in self._outer_parts]
        names = sorted({name for each in states for tensors, _ in each for name in tensors})
        return {
            "fragments": self._schedule.fragments,
            "tensors": {name: self._gathered(name) for name in names},
            # None means that the value is in "tensors".
            "parts": [
                [dict.fromkeys(tensors) | numbers for tensors, numbers in each] for each in states
            ],
        }

    def _gathered(self, key: str) -> dict[str, torch.Tensor]:
        """Gather the owners' state for ``key``; return it by tensor name. **Collective**.

        Fragments that do not have this state yet are filled with zeros.
        """
        found: dict[str, torch.Tensor] = {}
        for place, block in enumerate(self.blocks):
            whole = torch.zeros(block.numel, dtype=wide_dtype(block.dtype), device=block.device)
            for outers in self._outer_parts:
                outer = outers[place]
                own = outer.state()[0].get(key)
                if own is not None:
                    whole[slice(*outer.span)] = own
                    self.exchange.gather(whole[slice(*outer.piece)], outer.layout, OWNED_STATE)
            found.update(block.named(whole))
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            check_keys(state, {"fragments", "tensors", "parts"}, "the state of a LocalSGDState")
        was_outer = bool(state)
        if was_outer != (self._make_outer is not None):
            raise ValueError(
                f"expected a state saved {'without' if was_outer else 'with'} an outer optimizer, "
                f"got one saved {'with' if was_outer else 'without'} it; make LocalSGDState as it "
                "was when the state was saved"
            )
        if was_outer and state["fragments"] != self._schedule.fragments:
            raise ValueError(
                f"expected fragments={state['fragments']} as when the state was saved, got "
                f"fragments={self._schedule.fragments}; pass the same"
            )
        self.loaded = state

    def stats(self) -> dict[str, Any]:
        outer_states = [outer.state() for outers in self._outer_parts for outer in outers]
        return {
            "exchanges": self._exchanges,
            "exchanged_bytes": self._bytes,
            "in_flight": len(self._pending),
            "peak_bytes": self._peak_bytes,
            "outer_bytes": sum(tensor.nbytes for tensor in tensors_in(outer_states)),
            "common_bytes": sum(each.common.nbytes for each in self._increments.values()),
            "coded": self._coded_stats(),
        }

    def _coded_stats(self) -> dict[str, Any] | None:
        """Return the codec's statistics, as other states with a codec do; None without one."""
        if self._make_codec is None or self._last_stats is not None:
            return self._last_stats
        codecs = [each.codec for each in self._increments.values()]
        sent_bytes = sum(codec.sent_bytes for codec in codecs)
        exact_bytes = sum(codec.exact_bytes for codec in codecs)
        return {
            "sent_bytes": sent_bytes,
            "steps": self._exchanges,
            "rate": sent_bytes / exact_bytes if exact_bytes else 1.0,
            "residual_bytes": sum(codec.nbytes for codec in codecs),
        }

    def close(self) -> None:
        self._last_stats = self._coded_stats()
        self._pending.clear()
        self._outer_parts.clear()
        self._increments.clear()
