"""What must be the same on all ranks is compared once, and a difference is an error on all of them."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch.distributed as dist

from crossover_ddp._system import environment
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

_LONGEST: Final = 300
Said = TypeVar("Said")


class Agreement:
    """A comparison of what the ranks of a process group say, at the first bucket and after each load; then it is made.

    torch's own collective carries it, so that a rank with ``CROSSOVER_DISABLE=1`` takes part, too.
    """

    def __init__(self) -> None:
        self.made = False

    def forget(self) -> None:
        """Compare again at the next bucket."""
        self.made = False

    def make(self, group: dist.ProcessGroup, said: Callable[[], Mapping[str, object]]) -> None:
        """Raise unless all ranks say the same, once.

        Args:
            group: whose ranks compare.
            said: returns this rank's values by name, which are compared by their ``repr``; not called with
                ``CROSSOVER_DISABLE=1``.

        On failure: ``UnsupportedConfigurationError`` on all ranks; the next bucket compares again. ``ExchangeError`` if
        a peer is gone.

        **Collective**.
        """
        if not self.made:
            if group.size() > 1:
                disabled = environment.is_set(environment.DISABLE)
                compare(group, {environment.DISABLE: int(disabled), **({} if disabled else said())})
            self.made = True


def compare(group: dist.ProcessGroup, said: Mapping[str, object]) -> None:
    """Raise on all ranks of ``group`` unless all say the same; see `Agreement.make`. **Collective**."""
    everyone = told_by_all(group, {name: repr(value) for name, value in said.items()})
    for name in said:
        values = [each.get(name, "nothing") for each in everyone]
        if len({*values}) > 1:
            by_rank = ", ".join(f"{rank}: {value[:_LONGEST]}" for rank, value in enumerate(values))
            raise UnsupportedConfigurationError(
                f"expected the same {name} on all ranks, got {name} by rank {{{by_rank}}}; pass the same everywhere, "
                "and call load_state_dict on all ranks or on none"
            )


def told_by_all(group: dist.ProcessGroup, said: Said) -> list[Said]:
    """Return by rank what the ranks of ``group`` say. **Collective**.

    On failure: ``ExchangeError`` if a peer is gone.
    """
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, said, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {group.rank()} of {group.size()}: comparing with the other ranks failed: {error}; restart the job"
        ) from error
    return everyone
