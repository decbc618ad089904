"""What tests compare with: sums as owners make them, and what the package says."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from crossover_ddp.errors import CrossoverError


def sum_as_owners_do(gradients: Sequence[torch.Tensor], owner: int) -> torch.Tensor:
    """Add the ranks' parts to the last bit as their owner gets them around a ring, as large uneven layouts go.

    The sum begins at the rank behind the owner and ends at the owner.
    """
    behind = owner + 1
    return functools.reduce(torch.add, [*gradients[behind:], *gradients[:behind]])


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add as a balanced tree over the ranks: ((0 + 1) + (2 + 3)) + …, as owners of the engine's journeys do."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def error_of(act: Callable[[], object]) -> str:
    """Return the text of the package's error, or "no error"."""
    try:
        act()
    except CrossoverError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect what the package logs during the block, from a level on."""
    messages: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("crossover_ddp")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
