"""A message of chosen elements: their number, their places, their values."""

from collections.abc import Sequence

import torch

from .codec import Encoded

_HEAD_BYTES = 4
_ENTRY_BYTES = 8
_ROW = 32


def room_for(count: int) -> int:
    """Return the bytes of a message of ``count`` elements."""
    return _HEAD_BYTES + _ENTRY_BYTES * count


def next_room(lengths: Sequence[int], rate: float, wanted: int | None, most: float) -> int:
    """Return the bytes of the next message: a tenth more than the last one wanted, at most ``most`` times the rate."""
    numel = sum(lengths)
    target = rate * numel
    guess = target * most if wanted is None else min(1.1 * wanted, target * most)
    return room_for(min(numel, int(max(guess, target / 2)) + 1))


def write_chosen(
    values: torch.Tensor, threshold: float, message: torch.Tensor, residual: torch.Tensor
) -> Encoded:
    """Write the elements whose magnitude is above ``threshold``, the largest ones if they are too many.

    ``residual`` gets all the others. NaN counts as above.
    """
    chosen = _places_above(values, threshold)
    wanted = chosen.numel()
    picked = values[chosen]
    if not bool(torch.isfinite(picked).all()):
        return Encoded(False, wanted, None)
    capacity = (message.numel() - _HEAD_BYTES) // _ENTRY_BYTES
    if wanted > capacity:
        largest = torch.topk(picked.abs(), capacity, sorted=False).indices
        chosen, picked = chosen[largest], picked[largest]
    count = chosen.numel()
    message[:_HEAD_BYTES].view(torch.int32).fill_(count)
    places, sent = _entries(message, count)
    places.copy_(chosen)
    sent.copy_(picked)
    residual.copy_(values)
    # Zero in float32; what float32 cannot hold of wider values otherwise.
    residual[chosen] = picked - sent
    return Encoded(True, wanted, None)


def add_chosen(message: torch.Tensor, out: torch.Tensor) -> None:
    """Add the values at their places to ``out``."""
    count = int(message[:_HEAD_BYTES].view(torch.int32).item())
    places, sent = _entries(message, count)
    out.index_add_(0, places, sent.to(out.dtype))


def _places_above(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the places of all magnitudes that are not at most ``threshold``, in order.

    Rows without any are sorted out first: that reads the values twice, and torch.nonzero reads them a dozen times.
    """
    whole = values.numel() // _ROW * _ROW
    rows = values[:whole].view(-1, _ROW)
    below = rows.amax(1).le_(threshold) if whole else rows.new_empty(0)
    if whole:
        below.mul_(rows.amin(1).ge_(-threshold))
    hit = torch.nonzero(below.eq(0)).view(-1)
    row, column = _not_below(rows[hit], threshold).unbind(1)
    tail = _not_below(values[whole:], threshold).view(-1)
    return torch.cat([hit[row].mul_(_ROW).add_(column), tail.add_(whole)])


def _not_below(values: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.nonzero(values.abs().le_(threshold).eq(0))


def _entries(message: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    middle, stop = _HEAD_BYTES + 4 * count, _HEAD_BYTES + _ENTRY_BYTES * count
    return message[_HEAD_BYTES:middle].view(torch.int32), message[middle:stop].view(torch.float32)
