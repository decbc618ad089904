"""When which slice of the parameters is exchanged, and which intervals suit a link. Pure: no tensors, no clock.

[Note: the clock] What counts is the number of backward passes that reached the hook, which is the same on all ranks.
``optimizer.step()`` does not count: a GradScaler skips it on one rank alone. What is due after n of them happens before
the next training forward: then the update of the n-th is in the parameters.
"""

from dataclasses import dataclass

from crossover_ddp._ddp.layout import Span


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
