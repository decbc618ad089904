"""Expected sums, bit for bit, and the package's errors and log lines."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from crossover_ddp.errors import CrossoverError


def sum_as_owners_do(gradients: Sequence[torch.Tensor], owner: int) -> torch.Tensor:
    """Add the ranks' parts in the order of a ring, as the owner of a large uneven shard does.

    The sum begins at the rank after the owner and ends at the owner.
    """
    first = owner + 1
    return functools.reduce(torch.add, [*gradients[first:], *gradients[:first]])


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add as a balanced tree over the ranks: ((0 + 1) + (2 + 3)) + …, as the engine does."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def error_of(act: Callable[[], object]) -> str:
    """Return the message of the package's error that ``act`` raises, or "no error"."""
    try:
        act()
    except CrossoverError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the package's log messages during the block, from a level upwards."""
    messages: list[str] = []
    handler = logging.Handler(level)
    logger = logging.getLogger("crossover_ddp")

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
