"""When which slice of the parameters is exchanged, and which intervals suit a link. Pure: no tensors, no clock.

[Note: the clock] What counts is the number of backward passes that reached the hook, which is the same on all ranks.
``optimizer.step()`` does not count: a GradScaler skips it on one rank alone. What is due after n of them happens before
the next training forward: then the update of the n-th is in the parameters.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from crossover_ddp._exchange.layout import Span
from crossover_ddp._planning import Link

_FULL: Final = 0.9
"""Greatest part of the compute time that a plan lets the wire take."""
_LONGEST_INTERVAL: Final = 4096


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

    def is_local(self, steps: int) -> bool:
        """Whether the step after ``steps`` of them uses this rank's gradients alone."""
        return self.sync_every > 1 and steps >= self.warmup_steps

    def leaving(self, steps: int) -> tuple[int, ...]:
        """Return the fragments that leave after this many steps."""
        local = steps - self.warmup_steps
        if local <= 0 or self.sync_every == 1:
            return ()
        return tuple([f for f in range(self.fragments) if (local - self._offset(f)) % self.sync_every == 0])

    def arriving(self, steps: int) -> tuple[int, ...]:
        """Return the fragments that come back after this many steps."""
        return self.leaving(steps - self.delay)

    def _offset(self, fragment: int) -> int:
        return fragment * self.sync_every // self.fragments


def fragment_span(numel: int, fragment: int, fragments: int) -> Span:
    """Return the slice of a flat vector; slices differ by one element at most."""
    return Span(numel * fragment // fragments, numel * (fragment + 1) // fragments)


def _check_count(name: str, value: int, least: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected an integer {name} >= {least}, got {name}={value!r}; {remedy}")


@dataclass(frozen=True)
class AveragingPlan:
    """Intervals that suit a model on a link.

    Args:
        sync_every, delay, fragments: arguments of ``LocalSGDState``.
        step_s: predicted seconds of a step.
        compute_s: C, seconds that a step computes.
        wire_s: M, seconds that one exchange of all parameters takes.
    """

    sync_every: int
    delay: int
    fragments: int
    step_s: float
    compute_s: float
    wire_s: float

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``LocalSGDState``."""
        return {"sync_every": self.sync_every, "delay": self.delay, "fragments": self.fragments}


def plan_averaging(compute_s: float, size_bytes: float, link: Link) -> AveragingPlan:
    """Choose the shortest interval for which the wire keeps up, and the shortest delay that no step waits for.

    A fragment leaves in every step if the link's start-up time allows that, else all parameters at once. Our design.

    Args:
        compute_s: of a step, more than 0.
        size_bytes: of all parameters.
        link: what one half of an exchange costs.
    """
    if not compute_s > 0:
        raise ValueError(f"expected compute_s > 0, got compute_s={compute_s}; measure some steps first")
    room_s = _FULL * compute_s
    for sync_every in range(2, _LONGEST_INTERVAL + 1):
        for fragments in (sync_every, 1):
            one_s = 2 * link.half_s(size_bytes / fragments)
            delay = max(1, math.ceil(one_s / room_s))
            if fragments * one_s <= sync_every * room_s and delay < sync_every:
                step_s = max(compute_s, fragments * one_s / sync_every)
                wire_s = 2 * link.half_s(size_bytes)
                return AveragingPlan(sync_every, delay, fragments, step_s, compute_s, wire_s)
    raise ValueError(
        f"expected an exchange within {_LONGEST_INTERVAL} steps, got {2 * link.half_s(size_bytes):.3g} s for it and "
        f"{compute_s:.3g} s a step; use larger batches or another link"
    )
